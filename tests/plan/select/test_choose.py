import dataclasses
import json
import signal

import pytest

import fake_profiles
from advice import Case, advises
from paragan.config.resolve import fill_strategy_defaults
from paragan.config.run import to_saved_dict
from paragan.core.schema import read_yaml
from paragan.plan.measure_links import round_robin
from paragan.plan.profile.profile import profile_to_yaml
from paragan.plan.select.candidates import parse_strategy
from paragan.plan.select.choose import (
    comparable_candidates,
    is_strategy_open,
    scale_profile,
)
from paragan.strategies.auto import Auto, AutoChoice
from paragan.train.run_dir_selection import RunDirRequest, config_changes, previous_auto_run
from processes import run_cli, usage_error, wait_until


def auto(**fields):
    return dataclasses.replace(fake_profiles.make_run(), strategy=Auto(**fields))


def started_at(name, ranks):
    run = dataclasses.replace(
        fake_profiles.make_run(), strategy=parse_strategy(name).without_rank_loss(), auto_choice=AutoChoice(ranks)
    )
    return fill_strategy_defaults(run)


def test_a_strategy_is_open_until_it_was_chosen_for_these_ranks():
    assert is_strategy_open(auto(), 4)
    assert not is_strategy_open(fake_profiles.make_run(), 4)
    assert not is_strategy_open(started_at("gossip", 4), 4)
    assert is_strategy_open(started_at("gossip", 4), 3)


def test_what_auto_compares():
    names = [one.name for one in comparable_candidates(Auto(), None, fake_profiles.make_profile(), auto(), 4)]
    assert "sync" in names
    assert "per-label" not in names
    assert [
        one.name
        for one in comparable_candidates(
            Auto(strategies=("sync", "gossip")), None, fake_profiles.make_profile(), auto(), 4
        )
    ] == [
        "sync",
        "gossip",
    ]


@pytest.mark.parametrize(
    ("name", "before", "goes"),
    [
        ("sync+int8+sync_period=4", "sync", True),
        ("quantized", "sync", False),
        ("gossip+topology=ring", "gossip", True),
        ("async-gossip", "gossip", False),
        ("async+split=1:2", "async+split=2:2", True),
        ("async+split=1:2+max_lead_rounds=2", "async+split=2:2", False),
        ("async+split=none", "async+split=2:2", False),
    ],
)
def test_what_a_checkpoint_can_follow(name, before, goes):
    assert parse_strategy(name).can_resume_from(parse_strategy(before)) == goes


def test_a_run_that_goes_on_is_compared_with_its_like():
    result = comparable_candidates(Auto(), started_at("gossip", 4), fake_profiles.make_profile(), auto(), 3)
    assert {one.strategy.name for one in result} == {"gossip"}
    resumed = started_at("gossip", 4)
    with advises("strategy.strategies=sync: none of them can resume from gossip. Name others"):
        comparable_candidates(Auto(strategies=("sync",)), resumed, fake_profiles.make_profile(), auto(), 3)
    others = Auto(strategies=("sync", "gossip+int8"))
    assert comparable_candidates(others, resumed, fake_profiles.make_profile(), auto(), 3)


def test_a_record_that_was_planned_may_take_another_form():
    former = to_saved_dict(started_at("sync+int8", 4))
    assert not config_changes(former, started_at("sync+sync_period=4", 2))
    assert config_changes(former, started_at("gossip", 2))
    assert config_changes(
        to_saved_dict(fake_profiles.make_run()),
        fill_strategy_defaults(dataclasses.replace(fake_profiles.make_run(), strategy=parse_strategy("sync+int8"))),
    )


def test_a_slower_worker_is_slower_throughout():
    before, after = fake_profiles.make_profile(), scale_profile(fake_profiles.make_profile(), 3.0)
    assert after.round_s(40) == pytest.approx(3 * before.round_s(40))
    assert after.g[0].total_s == pytest.approx(3 * before.g[0].total_s)
    assert after.g[0].grads_ready_s[-1] == pytest.approx(3 * before.g[0].grads_ready_s[-1])


@pytest.mark.parametrize("hosts", range(2, 8))
def test_every_pair_of_hosts_is_measured_once(hosts):
    rounds = round_robin(hosts)
    assert sorted(pair for matches in rounds for pair in matches) == [
        (a, b) for a in range(hosts) for b in range(a + 1, hosts)
    ]
    assert all(len({host for pair in matches for host in pair}) == 2 * len(matches) for matches in rounds)


@pytest.mark.slow
def test_one_rank_chooses_once(tmp_path):
    command = (
        "train",
        "digits",
        "--strategy=auto",
        "--strategy.measure_s=1",
        f"--run-dir={tmp_path}/run",
        "--kimg=0.1",
    )
    ended = run_cli(*command, "--batch=16", QUICK)
    assert ended.status == 0, ended.err
    record = read_yaml(tmp_path / "run/run.yaml")
    assert record["strategy"]["name"] in ("sync", "async")
    assert record["auto_choice"]["ranks"] == 1
    repeated = run_cli(*command, "--batch=16", QUICK)
    assert "with which this run was started" in repeated.out + repeated.err


@pytest.mark.slow
def test_a_profile_of_bench_step_is_used_as_advised(tmp_path, check_advice):
    profile = fake_profiles.make_profile()
    (tmp_path / "other.yaml").write_text(profile_to_yaml(profile))
    (tmp_path / "broken.yaml").write_text(profile_to_yaml(dataclasses.replace(profile, g=())))
    ended = run_cli("bench", "step", "digits", "--seconds=1", "--noise-kimg=0", f"--out={tmp_path}/profile.yaml")
    assert ended.status == 0, ended.err
    train = f"train digits --strategy=auto --run-dir=NEW/run --kimg=0.1 {QUICK} --strategy.profile=NEW/"
    plan = "plan digits --strategies=sync --profile=NEW/"
    good = "profile=NEW/profile.yaml"
    for case in (
        Case(f"{train}other.yaml", "Use `paragan bench step digits --out NEW/other.yaml`", (f"--strategy.{good}",)),
        Case(f"{plan}none.yaml", "Use `paragan bench step RECIPE --out NEW/none.yaml`", (f"--{good}",)),
        Case(f"{plan}broken.yaml", "Use `paragan bench step RECIPE --out FILE`", (f"--{good}",)),
        Case(
            f"{plan}other.yaml",
            "Use `paragan bench step digits --out NEW/other.yaml` with the same settings",
            (f"--{good}",),
        ),
    ):
        check_advice(case)


QUICK = "--evaluation.metrics=[]"


@pytest.mark.slow
def test_another_number_of_ranks_chooses_again(tmp_path, processes):
    run = ["train", "digits", "--strategy=auto", "--strategy.measure_s=1", "--batch=16", "--lanes=4", QUICK]
    run += [f"--run-dir={tmp_path}/run", "--strategy.strategies=sync,sync+int8"]
    for ranks, kimg in ((2, 0.16), (3, 0.32)):
        started = processes.start_ranks(ranks, *run, f"--kimg={kimg}")
        assert [rank.wait() for rank in started] == [0] * ranks, started[0].err
        record = read_yaml(tmp_path / "run/run.yaml")
        assert record["strategy"]["name"] == "sync"
        assert record["auto_choice"]["ranks"] == ranks
        assert record["reasons"][0].startswith("strategy: sync")
        assert record["batch"] == 16
    assert any("resumed from sync" in line for line in record["reasons"])
    ranks = json.loads((tmp_path / "run/checkpoints/00000020/checkpoint.json").read_text())["ranks"]
    assert ranks == 3


def test_an_auto_run_is_resumed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    from paragan.train.run_dir import RunDir

    RunDir(folder).write_run_config(to_saved_dict(started_at("gossip+int8", 4)))
    result = previous_auto_run(RunDirRequest(run_dir=folder), auto())
    assert result is not None
    assert result.strategy.wire.name == "int8"
    assert previous_auto_run(RunDirRequest(run_dir=folder, resume="never"), auto()) is None
    assert previous_auto_run(RunDirRequest(run_dir=folder), dataclasses.replace(auto(), batch=32)) is None


def test_a_profile_of_another_device_is_refused(tmp_path, processes):
    (tmp_path / "other.yaml").write_text(profile_to_yaml(fake_profiles.make_profile()))
    run = ["train", "digits", "--strategy=auto", f"--strategy.profile={tmp_path}/other.yaml", f"--run-dir={tmp_path}/r"]
    ranks = processes.start_ranks(2, *run)
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert "name a processor, not" in ranks[0].err
    assert "paragan bench step digits --out" in ranks[0].err
    assert not (tmp_path / "r").exists()


def test_a_folder_that_holds_something_else_is_refused_before_anything_is_measured(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    assert run_cli("train", "digits", "--kimg=0.032", "--batch=16", f"--run-dir={run}", QUICK).status == 0
    for folder, more, words in (
        (run, ["--batch=16"], "--strategy sync"),
        (run, [], "batch was 16"),
        (other, [], "run.yaml"),
    ):
        ended = run_cli("train", "digits", "--strategy=auto", f"--run-dir={folder}", QUICK, *more)
        assert ended.status == 2, ended
        assert words in ended.err
        assert "profiling" not in ended.out + ended.err


def test_a_rank_that_freezes_while_auto_chooses_is_noticed_after_the_timeout(tmp_path, processes):
    line = [
        "train",
        "digits",
        "--strategy=auto",
        "--strategy.measure_s=2",
        "--timeout_s=10",
        f"--run-dir={tmp_path}/run",
    ]
    ranks = processes.start_ranks(2, *line)
    wait_until(lambda: "profiling one worker" in ranks[0].out, description="rank 0 measures")
    ranks[0].send_signal(signal.SIGSTOP)
    assert ranks[1].wait() == 1
    assert "rank 0 was lost" in ranks[1].err
    assert not (tmp_path / "run").exists()


def test_auto_and_measured_layouts_are_refused():
    assert "does not decide together" in usage_error("train", "digits", "--strategy=auto", "--device.tune=measured")


def test_invalid_settings_are_refused():
    assert "strategy.margin" in usage_error("train", "digits", "--strategy=auto", "--strategy.margin=2")
    assert "there is no syncc" in usage_error("train", "digits", "--strategy=auto", "--strategy.strategies=syncc")
