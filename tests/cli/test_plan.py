"""`paragan plan RECIPE` from the command line, with a profile by hand."""

import dataclasses
import json
from pathlib import Path

import pytest

import fake_profiles
import tiny_run
from advice import Case, advises, case_id
from paragan.cli import plan_tune
from paragan.plan.profile.profile import NoiseScale, profile_to_yaml, read_profile
from processes import run_cli, usage_error

LINE = "--links=200 Mbit/s, 10 ms"


@pytest.fixture(scope="module")
def plan_inputs(tmp_path_factory):
    """A folder with profile.yaml of the digits' networks, by a device that is not here, quiet.yaml and links.yaml."""
    from paragan.config.resolve import load_dataset, make_spec, resolve
    from paragan.core.rng import CPU
    from paragan.recipes import get_recipe
    from paragan.train.build import build_networks

    run = get_recipe("digits")
    images = load_dataset(run.data)
    pair = build_networks(resolve(run, images), make_spec(run.data, images), CPU)
    g, d = (sum(p.numel() for p in net.parameters()) for net in (pair.g, pair.d))
    unfitted = fake_profiles.make_profile(noise=64, memory=((16, 10**8), (64, 3 * 10**8)))
    fitted = dataclasses.replace(unfitted, num_params=(g, d))
    folder = tmp_path_factory.mktemp("plan")
    (folder / "profile.yaml").write_text(profile_to_yaml(fitted))
    (folder / "quiet.yaml").write_text(profile_to_yaml(dataclasses.replace(fitted, noise_scale={})))
    (folder / "links.yaml").write_text('hosts: 3\nup: 1 Gbit/s\nlatency: 1 ms\npairs: {0-1: "100 Mbit/s, 1 ms"}\n')
    return folder


@pytest.fixture
def profile(plan_inputs):
    return f"--profile={plan_inputs}/profile.yaml"


def test_a_plan(profile, tmp_path):
    output = run_cli(
        "plan", "digits", "--hosts=4", LINE, "--kimg=100", "--price=2", profile, f"--json={tmp_path}/plan.json"
    )
    assert output.status == 0, output.err
    lines = output.out.splitlines()
    assert lines[0].startswith("digits, 4 ranks: 4 hosts, 200 Mbit/s, 10 ms")
    assert any(line.startswith("sync ") and "equivalent" in line for line in lines)
    assert any(line.startswith("note: --batch 128") for line in lines)
    plan = json.loads((tmp_path / "plan.json").read_text())
    first = plan["rows"][0]
    assert plan["command"].startswith("torchrun --nnodes 4 ")
    assert plan["command"].endswith(" ".join(first["options"]))
    assert first["cost"] == pytest.approx(4 * 2 * first["hours"])
    assert len(plan["rows"]) > 25


def test_one_host_is_a_plain_command(profile):
    output = run_cli("plan", "digits", "--ranks-per-host=2", "--strategies=sync,gossip", profile, "--seed=3")
    assert output.status == 0, output.err
    assert output.out.splitlines()[-1].startswith("run: paragan train digits")
    assert "--ranks 2" in output.out
    assert "--seed 3 " in output.out


def test_the_batch_is_left_to_the_noise(profile):
    output = run_cli("plan", "digits", "--hosts=4", LINE, "--batch=auto", "--strategies=sync", profile)
    assert output.status == 0, output.err
    assert len([line for line in output.out.splitlines() if line.startswith("sync ")]) == 5


def test_the_command_trains_what_was_planned(profile, tmp_path):
    output = run_cli("plan", "digits", "--hosts=4", LINE, "--strategies=sync", "--kimg=1234567.25", profile)
    assert " --kimg 1234567.25 " in output.out
    noisy = tmp_path / "noisy.yaml"
    known = read_profile(Path(profile.partition("=")[2]))
    noisy.write_text(profile_to_yaml(dataclasses.replace(known, noise_scale={"G": NoiseScale(1000.0, 500.0, 2000.0)})))
    arguments = ("--batch=auto", "--g_batch=256", "--kimg=10", "--strategies=sync", f"--profile={noisy}")
    lines = run_cli("plan", "digits", "--hosts=4", LINE, *arguments).out.splitlines()
    last = next(line for line in lines if line.startswith("run: "))
    batch = int(last.partition("--batch ")[2].split()[0])
    assert batch > 128
    assert f"--g_batch={2 * batch}" in last
    assert f"--kimg {round(10 * (batch + 1000) / 1128, 3):g} " in last
    (row,) = (line for line in lines if line.startswith(f"sync      {batch} "))
    assert f" {(batch + 1000) / 1128:.2f}x " in row
    assert any(line.startswith(f"sync, batch {batch}: ") for line in lines)


def test_many_workers_are_simulated(profile, tmp_path):
    output = run_cli(
        *("plan", "digits", "--links=2000 hosts, 100/20 Mbit/s, 40 ms", "--large-scale", "--churn=0.01", profile),
        *("--strategies=gossip+int8,per-label", f"--json={tmp_path}/crowd.json"),
    )
    assert output.status == 0, output.err
    rows = json.loads((tmp_path / "crowd.json").read_text(), parse_constant=pytest.fail)["rows"]
    assert set(rows) == {"gossip+int8", "per-label"}
    assert "unbounded" in output.out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--price=-3"], "--price -3: it must be above 0"),
        (["--kimg=0"], "--kimg 0: it must be above 0"),
        (["--kimg=nan"], "--kimg nan: it must be above 0"),
        (["--hosts=0"], "--hosts 0: it must be above 0"),
        (["--ranks-per-host=-1"], "--ranks-per-host -1: it must be above 0"),
        (["--margin=-1"], "--margin -1: it must be above 0"),
        (["--memory=-1 GB"], "--memory -1 GB"),
        (["--memory=10"], "--memory 10: it must be a size of 1 MB or more"),
        (["--hosts=4", "--links=4 hosts"], "is not understood"),
        (["--links=" + "x" * 300], "is not understood"),
        (["--hosts=2", LINE, "--strategies=sync+topology=ring"], "it is of strategy=gossip"),
        (["--hosts=2", "--links=0 Mbit/s, 1 ms"], "a rate must be above 0"),
        (["--hosts=100", LINE], "Use --lanes 128"),
        (["--hosts=300", LINE], "Use --lanes 300 --batch 300"),
        (["--hosts=2", LINE, "--memory=1 MB", "--strategies=sync"], "No batch fits"),
        (["--hosts=2", LINE, "--memory=120 MB", "--strategies=sync"], ", the largest that fits"),
        (["--hosts=3", LINE, "--strategies=gossip+topology=hypercube"], "power of two"),
        (["--hosts=3", LINE, "--strategies=syncc"], "there is no syncc"),
        (["--hosts=2", LINE, "--json=/nowhere/x.json"], "--json /nowhere/x.json"),
        (["--hosts=2", LINE, "--nets.width=8"], "it is of another game than digits"),
        (
            ["--links=9 hosts, 1 Gbit/s, 1 ms", "--large-scale", "--strategies=async+split=3:3"],
            "split=3:3: needs 6 ranks",
        ),
        (["--links=9 hosts, 1 Gbit/s, 1 ms", "--large-scale", "--batch=auto"], "--batch auto: it has no effect"),
        (["--links=9 hosts, 1 Gbit/s, 1 ms", "--large-scale", "--ramp=1:256"], "--ramp=1:256: it has no effect"),
        (["--hosts=2", "--links=1e-320 B/s, 1 ms"], "is not understood"),
        (["--hosts=2", "--links=0.000001 bit/s, 1 ms"], "a rate must be above 0"),
        (["--hosts=2", "--links=25 Gbit/s"], "--links '25 Gbit/s': is not understood"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_one_line(arguments, line, profile):
    assert line in usage_error("plan", "digits", profile, *arguments)


PLAN_CASES = [
    Case(
        "--hosts=3",
        "Use a file, or --links '25 Gbit/s, 50 us'",
        ("--links='25 Gbit/s, 50 us'", "--links=links.yaml"),
    ),
    Case(
        "--links=1",
        "Use a file, or '8 hosts, 25 Gbit/s, 50 us'",
        ("--links='8 hosts, 25 Gbit/s, 50 us'", "--links=links.yaml"),
    ),
    Case(
        "--hosts=3 --links='4 hosts, 1 Gbit/s, 1 ms'",
        "Leave --hosts out, or use other links",
        ("~hosts", "--links=links.yaml"),
    ),
    Case(
        "--ranks-per-host=3 --links='4 hosts of 2 ranks, 1 Gbit/s, 1 ms'",
        "Leave --ranks-per-host out",
        ("~ranks-per-host",),
    ),
    Case(
        "--ranks-per-host=2000 --lanes=1024 --batch=1024 --strategies=per-label --memory=40TB",
        "--ranks-per-host 2000: too many. Use at most 1024",
        ("--ranks-per-host=1024",),
    ),
    Case(
        "--links='9 hosts, 1 Gbit/s, 1 ms'",
        "--lanes 8: 9 ranks cannot share them. Use --lanes 16",
        ("--lanes=16",),
    ),
    Case(
        "--links='20 hosts, 1 Gbit/s, 1 ms' --batch=16",
        "--lanes 8: 20 ranks cannot share them. Use --lanes 20 --batch 20",
        ("--lanes=20 --batch=20",),
    ),
    Case("--price=0", "--price 0: it must be above 0. Use 1.5", ("--price=1.5",)),
    Case("--memory=lots", "Use 40 GB or 900 MB", ("--memory='40 GB'", "--memory='900 MB'")),
    Case(
        "--batch=auto --ramp=100:256",
        "--batch auto: chooses one batch, and --ramp has several. Leave one of them out",
        ("~batch", "~ramp"),
    ),
    Case("--batch=auto --profile=quiet.yaml", "Use --batch N, or another profile", ("--batch=64", "~profile=quiet")),
    Case("--json=NEW", "--json NEW: this is a folder. Use the name of a file", ("--json=NEW/plan.json",)),
    Case(
        "--churn=0.01 --links='9 hosts, 1 Gbit/s, 1 ms' --lanes=16",
        "Add --large-scale, or leave it out",
        ("--large-scale", "~churn"),
    ),
]
LARGE_SCALE_CASES = [
    Case("--churn=2", "--churn 2: it must be from 0 to below 1. Use 0.01", ("--churn=0.01",)),
    Case("--links='1 hosts, 1 Gbit/s, 1 ms'", "Use 2 to 200,000", ("--links='2 hosts, 1 Gbit/s, 1 ms'",)),
    Case(
        "--links='300000 hosts, 1 Gbit/s, 1 ms' --strategies=per-label",
        "Use 2 to 200,000",
        ("--links='200000 hosts, 1 Gbit/s, 1 ms'",),
    ),
    Case(
        "--links=links.yaml --hosts=3",
        "Use one line: '100/20 Mbit/s, 40 ms'",
        ("--links='100/20 Mbit/s, 40 ms'",),
    ),
    Case(
        "--links='1 Gbit/s, 1 ms' --hosts=4 --ranks-per-host=2",
        "--ranks-per-host 2: --large-scale has one worker per host. Leave it out",
        ("~ranks-per-host",),
    ),
    Case(
        "--price=2",
        "--price: it has no effect with --large-scale, which simulates rates. Leave it out",
        ("~price",),
    ),
]


@pytest.mark.parametrize("case", PLAN_CASES, ids=case_id)
def test_advice_on_a_plan_works(case, check_advice, plan_inputs, monkeypatch):
    monkeypatch.chdir(plan_inputs)
    check_advice(case, ["plan", "digits", "--strategies=sync", "--profile=profile.yaml"])


@pytest.mark.parametrize("case", LARGE_SCALE_CASES, ids=case_id)
def test_advice_on_a_simulation_works(case, check_advice, plan_inputs, monkeypatch):
    monkeypatch.chdir(plan_inputs)
    base = ["plan", "digits", "--strategies=sync", "--profile=profile.yaml", "--large-scale"]
    check_advice(case, [*base, "--links=9 hosts, 1 Gbit/s, 1 ms"])


def test_advice_on_a_run_to_tune_works(check_advice, monkeypatch):
    monkeypatch.setattr(plan_tune, "format_tuning", lambda run, dataset, world, remeasure: [f"tuned {run.recipe}"])
    case = Case(
        "plan digits --tune --strategy=per-label",
        "--strategy per-label: --tune is for one game. Leave --strategy out",
        ("~strategy",),
    )
    check_advice(case)


def test_a_plan_shows_what_a_run_of_auto_chooses_later(profile):
    with advises("Use `paragan plan` to see the choice."):
        tiny_run.make_session(tiny_run.make_run("strategy=auto"))
    assert "run: paragan train" in run_cli("plan", "digits", profile).out


def test_links_with_missing_pairs_raise(profile, tmp_path):
    (tmp_path / "links.yaml").write_text('hosts: 3\npairs: {0-1: "1 Gbit/s, 1 ms", 0-2: "1 Gbit/s, 1 ms"}\n')
    assert "pairs lacks 1-2" in usage_error("plan", "digits", profile, f"--links={tmp_path}/links.yaml")


def test_a_file_of_links_may_have_the_one_line(profile, tmp_path):
    (tmp_path / "links.yaml").write_text("4 hosts, 200 Mbit/s, 10 ms\n")
    ended = run_cli("plan", "digits", profile, f"--links={tmp_path}/links.yaml", "--strategies=sync")
    assert "4 ranks: 4 hosts, 200 Mbit/s, 10 ms" in ended.out
    (tmp_path / "links.yaml").write_text("hosts: 2\nup: 1e-320 B/s\nlatency: 0\n")
    assert "a rate must be above 0" in usage_error("plan", "digits", profile, f"--links={tmp_path}/links.yaml")


def test_a_missing_profile_names_the_command_that_writes_one():
    assert "paragan bench step RECIPE --out" in usage_error("plan", "digits", "--profile=/nowhere.yaml")
