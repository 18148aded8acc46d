"""`paragan train`, `sample` and `eval`: what they do, and their one-line errors."""

from __future__ import annotations

import json
import re
import shutil
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from advice import advises
from paragan.cli.common import parse_settings
from paragan.cli.main import EXIT_DELAY_S, main
from paragan.comm.launch_info import MPIRUN, MVAPICH, OPEN_MPI, TORCHRUN
from paragan.core.schema import from_yaml, to_dict
from paragan.data import decode
from paragan.recipes import build_run, get_recipe
from processes import TINY_RUN_ARGS, final_tensors, run_cli, train_args, train_tiny, usage_error


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# Invalid input ------------------------------------------------------------------------------------------

INVALID_LINES = {  # command line -> parts of its error
    "tarin digits": ["tarin", "train"],
    "train": ["paragan recipes"],
    "train digts": ["digts", "did you mean digits?"],
    "train xyzzy": ["xyzzy", "digits, fashion, folder"],
    "train digits --bach 64": ["bach", "did you mean batch?"],
    "train digits --g.optimiser.lr=1": ["did you mean g.optimizer?"],
    "train digits --g.optimizer.rl=1": ["did you mean g.optimizer.lr?"],
    "train digits --nets.foo=1": ["nets.foo", "nets.width"],
    "train digits --batch many": ["batch=many", "integer"],
    "train digits --batch": ["--batch", "expected one argument"],
    "train digits --g.optimizer.lr": ["--g.optimizer.lr needs a value"],
    "train digits --g.optimizer.lr --batch=16": ["--g.optimizer.lr needs a value"],
    "train digits --g.optimizer.lr=-1": ["g.optimizer.lr=-1", "greater than 0"],
    "train digits --g.optimizer=adamm": ["adamm", "did you mean adam?"],
    "train digits --g=3 --g.optimizer.lr=1": ["g is a value"],
    "train digits --nets=dcgam": ["dcgam", "did you mean dcgan?"],
    "train digits --seed -1": ["seed=-1", "0"],
    "train digits --seed 1.5": ["seed=1.5", "integer"],
    "train digits --kimg 0": ["kimg=0", "greater than 0"],
    "train digits --kimg inf": ["kimg=inf", "finite"],
    "train digits --strategy gossip --strategy.topology=hypercube --ranks 3": ["hypercube on 3 ranks", "one-peer"],
    "train digits --strategy gosip": ["gosip", "gossip"],
    "train digits --device.kind=gpu": ["gpu", "'auto', 'cpu', 'cuda', 'xpu' or 'mps'"],
    "train digits more": ["more"],
    "train digits --batch 60": ["--batch 60", "--lanes 8", "56 or 64"],
    "train digits --batch 4": ["--batch 4", "8 or 16"],
    "train digits --ranks 9": ["9 ranks", "at most 8"],
    "train digits --ranks 0": ["--ranks 0", "1 or more"],
    "train digits --ranks -1": ["--ranks -1", "1 or more"],
    "train digits --ranks two": ["two"],
    "train digits --resume nowhere": ["nowhere: does not exist"],
    "train digits --resume . --run-dir here": ["--resume", "--run-dir"],
    "train digits --init-from nowhere": ["--init-from", "nowhere"],
    "train digits --g.optimizer.betas=0.5": ["g.optimizer.betas=[0.5]"],
    "train digits --evaluation.metrics=kid,fod": ["fod", "did you mean fd?"],
    "train digits --evaluation.metrics=[fid]": ["fid", "Use fd"],
    "train digits --evaluation.features=inception --evaluation.inception=nowhere": ["missing nowhere"],
    "train digits --evaluation.count=1": ["evaluation.count=1", "2"],
    "train fashion": ["fashion needs --data", ".npz"],
    "train folder --data nowhere": ["nowhere does not exist"],
    "train folder --data 2024": ["2024 does not exist"],
    "train nowhere.yaml": ["nowhere.yaml: does not exist"],
    "sample nowhere --out a.png": ["nowhere: does not exist"],
    "sample . --out a.png": ["no model yet"],
    "sample . --out a.png --count 0": ["--count 0"],
    "sample . --out a.png --count 2.5": ["--count", "2.5"],
    "sample . --out a.png --truncation 0": ["--truncation 0", "between 0.05 and 1"],
    "sample . --out a.png --truncation 2": ["--truncation 2", "between 0.05 and 1"],
    "sample . --out a.png --truncation nan": ["--truncation nan"],
    "sample . --out a.png --seed -1": ["--seed -1"],
    "sample . --out a.png --fast": ["--fast"],
    "sample .": ["--out"],
    "eval nowhere": ["nowhere: does not exist"],
    "eval .": ["no run folder"],
    "eval . --seed -1": ["--seed -1"],
    "report nowhere": ["nowhere"],
    "recipes all": ["all"],
}


@pytest.mark.parametrize("line", INVALID_LINES)
def test_invalid_commands_print_one_line_and_write_no_files(line, tmp_path):
    error = usage_error(*line.split())
    assert all(part in error for part in INVALID_LINES[line]), error
    assert not list(tmp_path.iterdir())


INVALID_RUN_FILES = {  # content of run.yaml -> parts of the error
    b"a: [1": ["run.yaml is not YAML"],
    b"\xff\xfe\x00": ["run.yaml cannot be read"],
    b"- digits": ["run.yaml: must hold fields"],
    b"": ["run.yaml: must hold fields"],
    b"recipe: digits\nbach: 64": ["bach", "did you mean batch?"],
    b"data: null": ["data=None"],
    b"1: 2": ["1"],
    b"data: {path: digits}\ng: {optimizer: {name: adam, learning_rate: 1}}": ["g.optimizer.learning_rate"],
}


@pytest.mark.parametrize("content", INVALID_RUN_FILES)
def test_invalid_run_files_are_rejected(content):
    Path("run.yaml").write_bytes(content)
    error = usage_error("train", "run.yaml")
    assert all(part in error for part in INVALID_RUN_FILES[content]), error


def test_a_folder_is_not_a_run_file():
    Path("run.yaml").mkdir()
    assert "run.yaml cannot be read" in usage_error("train", "run.yaml")


def write_image(path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8)).save(path)


def without_images() -> str:
    Path("data").mkdir()
    return "data is empty"


def class_without_images() -> str:
    write_image("data/cat/1.png")
    Path("data/dog").mkdir()
    return "data/dog: this class has no image"


def corrupt_image() -> str:
    write_image("data/cat/1.png")
    Path("data/cat/2.png").write_bytes(Path("data/cat/1.png").read_bytes()[:40])
    return "data/cat/2.png cannot be decoded"


def labels_out_of_range() -> str:
    np.savez("data.npz", images=np.zeros((4, 8, 8, 1), np.uint8), labels=np.array([0, 1, -1, 1]))
    return "labels"


def wrong_keys() -> str:
    np.savez("data.npz", pictures=np.zeros((4, 8, 8, 1), np.uint8))
    return "images"


def text_file() -> str:
    Path("data.npz").write_text("images")
    return "data.npz"


@pytest.mark.parametrize(
    "make_data", [without_images, class_without_images, corrupt_image, labels_out_of_range, wrong_keys, text_file]
)
def test_unusable_data_are_rejected(make_data):
    message = make_data()
    error = usage_error("train", "folder", "--nets=dcgan", "--data", next(Path().glob("data*")))
    assert error.startswith("paragan: data: ")
    assert message in error
    assert not Path("runs").exists()


LAUNCH_ENVIRONMENTS = {
    "RANK=2 WORLD_SIZE=2": "RANK=2: must be from 0 to 1",
    "RANK=1 WORLD_SIZE=1": "RANK=1: must be from 0 to 0",
    "RANK=first WORLD_SIZE=2": "RANK='first': must be a number",
    "RANK=1 WORLD_SIZE=-2": "WORLD_SIZE='-2': must be a number",
    "RANK=1": "RANK, WORLD_SIZE: only one of them is set",
    "WORLD_SIZE=2": "RANK, WORLD_SIZE: only one of them is set",
    "RANK=0 WORLD_SIZE=2": "MASTER_ADDR: is not set",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=x": "MASTER_PORT='x': must be a number",
    "RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=99999": "MASTER_PORT=99999",
    "RANK=0 WORLD_SIZE=3": "--lanes 2: 3 ranks cannot share",
    "PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1": "MASTER_ADDR: is not set, and mpirun",
}


@pytest.mark.parametrize("variables", LAUNCH_ENVIRONMENTS)
def test_invalid_launch_environments_are_rejected(variables, monkeypatch):
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert LAUNCH_ENVIRONMENTS[variables] in usage_error("train", *TINY_RUN_ARGS)


@pytest.mark.parametrize("names", [*MPIRUN, TORCHRUN], ids=lambda names: names.rank)
def test_rank_0_says_what_is_wrong_before_mpirun_kills_it(names, monkeypatch, capsys):
    """Open MPI and MVAPICH kill the other ranks as soon as one has failed."""
    delays = []
    monkeypatch.setattr(time, "sleep", delays.append)
    errors = []
    for rank in range(2):
        for name, value in zip(names[:4], (rank, 2, 0, 1), strict=True):
            monkeypatch.setenv(name, str(value))
        assert main(["train", *TINY_RUN_ARGS, "--lanes=1"]) == 2
        errors.append(capsys.readouterr().err)
        assert delays == ([EXIT_DELAY_S] if rank == 1 and names in (OPEN_MPI, MVAPICH) else [])
    assert "--lanes 1: 2 ranks cannot share" in errors[0]
    assert not errors[1]


def test_existing_files_are_not_overwritten():
    Path("file").write_text("")
    assert "file" in usage_error("train", *TINY_RUN_ARGS, "--run-dir=file")
    assert "--outdir file: cannot be written" in usage_error("train", *TINY_RUN_ARGS, "--outdir=file")
    Path("folder").mkdir()
    Path("folder/thesis.txt").write_text("")
    assert "folder: has files in it but no run.yaml" in usage_error("train", *TINY_RUN_ARGS, "--run-dir=folder")
    assert [path.name for path in Path("folder").iterdir()] == ["thesis.txt"]


# Without training ---------------------------------------------------------------------------------------


def test_a_dry_run_prints_a_reproducible_run_and_no_files(tmp_path):
    first = run_cli("train", *TINY_RUN_ARGS, "--g.optimizer=sgd", "--ema.half_life_kimg=3", "-n")
    assert first.status == 0
    assert not list(tmp_path.iterdir())
    Path("that.yaml").write_text(first.out)
    assert run_cli("train", "that.yaml", "-n") == first
    assert from_yaml(first.out, "")["g"]["optimizer"]["name"] == "sgd"


def test_a_run_folder_is_no_recipe(tmp_path):
    run = train_tiny(tmp_path / "run", "--kimg=0.016")
    with advises(f"recipe={run}: is a run folder. Use `paragan train {run}/run.yaml --run-dir {run}`"):
        get_recipe(str(run))
    assert run_cli("train", run / "run.yaml", "--run-dir", run).status == 0


def test_a_run_without_a_checkpoint_says_so(tmp_path):
    run = train_tiny(tmp_path / "run", "--kimg=0.016")
    assert "checkpoint at 0.016 kimg" in run_cli("status", run).out
    shutil.rmtree(run / "checkpoints")
    assert "no checkpoint yet" in run_cli("status", run).out


def test_a_dry_run_shows_the_traffic_of_ranks():
    one, two = (run_cli("train", *TINY_RUN_ARGS, "-n", f"--ranks={n}").out for n in (1, 2))
    assert "# each rank sends 0 MB" in one
    assert "# each rank sends 0 MB" not in two
    seldom = run_cli("train", *TINY_RUN_ARGS, "--strategy.sync_period=32", "-n", "--ranks=2").out
    assert re.search(r"# each rank sends 0.0\d+ MB in less than one message per round", seldom)
    teams = run_cli("train", *TINY_RUN_ARGS, "--strategy=async", "-n", "--ranks=2").out
    assert "# a rank of G sends" in teams
    assert "# a rank of D sends" in teams


def test_recipes_and_fields_are_listed():
    listed = run_cli("recipes")
    names = [line.split()[0] for line in listed.out.splitlines()]
    assert names[:3] == ["digits", "fashion", "folder"]
    assert "biggan-imagenet1024" in names
    fields = run_cli("train", "--fields")
    assert fields.status == 0
    for name in ("batch", "g.optimizer.lr", "nets.width", "objective.r1", "strategy.order", "device.threads"):
        assert f"--{name} " in fields.out


def test_help_exits_with_status_0(capsys):
    for words in ([], ["train"], ["sample"], ["eval"]):
        with pytest.raises(SystemExit) as ended:
            run_cli(*words, "--help")
        assert ended.value.code == 0


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"paragan {version('paragan')}\n"


# Runs ---------------------------------------------------------------------------------------------------


def test_run_yaml_repeats_its_run_bit_for_bit(finished):
    ended = run_cli("train", finished / "run.yaml", "--run-dir=repeated")
    assert ended.status == 0
    assert final_tensors(Path("repeated")) == final_tensors(finished)
    assert Path("repeated/run.yaml").read_bytes() == (finished / "run.yaml").read_bytes()


def test_another_seed_trains_another_model(finished):
    assert final_tensors(train_tiny(Path("run"), "--kimg=0.16", "--seed=1")) != final_tensors(finished)


def test_a_run_folder_accepts_only_the_same_run(finished):
    shutil.copytree(finished, "run")
    before = final_tensors(Path("run"))
    error = usage_error("train", *TINY_RUN_ARGS, "--run-dir=run", "--batch=32", "--lanes=4")
    assert "batch was 16, is 32" in error
    assert "lanes was 2, is 4" in error
    assert "recipe was 'digits', is 'folder'" in usage_error("train", "folder", "--data=digits", "--resume=run")
    assert "--resume never" in usage_error("train", *TINY_RUN_ARGS, "--run-dir=run", "--resume=never")
    assert final_tensors(Path("run")) == before
    assert run_cli("train", *TINY_RUN_ARGS, "--resume=run", "--kimg=0.176").status == 0  # a run may become longer


def test_samples_as_a_grid_an_archive_or_a_folder(finished):
    for out in ("grid.png", "samples.npz", "folder"):
        assert run_cli("sample", finished, "--count=12", "--labels=3,7", "--out", out).status == 0
    with Image.open("grid.png") as grid:
        assert grid.size == (4 * 64 + 3 * 2, 3 * 64 + 2 * 2)
    with np.load("samples.npz") as samples:
        assert samples["images"].shape == (12, 8, 8, 1)
        assert samples["images"].dtype == np.uint8
        assert samples["labels"].tolist() == [3, 7] * 6
    assert sorted(path.name for path in Path("folder").iterdir()) == ["3", "7"]


def test_a_sample_depends_only_on_seed_and_index(finished):
    def images(*more: str) -> np.ndarray:
        assert run_cli("sample", finished, "--labels=3", "--out=samples.npz", *more).status == 0
        with np.load("samples.npz") as samples:
            return samples["images"]

    few, many, other = images("--count=5"), images("--count=300"), images("--count=5", "--seed=1")
    assert np.array_equal(few, many[:5])
    assert not np.array_equal(few, other)
    assert not np.array_equal(few, images("--count=5", "--truncation=0.5"))


def test_invalid_samples_are_rejected(finished):
    assert "there is no class '10'" in usage_error("sample", finished, "--labels=10", "--out=a.png")
    assert "there is no class 'x'" in usage_error("sample", finished, "--labels=3,x", "--out=a.png")
    Path("file").write_text("")
    assert "cannot be written" in usage_error("sample", finished, "--out=file/a.png")


def test_too_many_samples_are_rejected_with_a_limit_that_works(finished, monkeypatch):
    for out in ("a.png", "a.npz", "folder"):
        assert "--count 1000000000000: more than the memory" in usage_error(
            "sample", finished, "--count", 10**12, "--out", out
        )
    monkeypatch.setattr(decode, "ram_bytes", lambda: 4 * 10 * 64 * 64)
    assert "at most 640 samples" in usage_error("sample", finished, "--count=641", "--out=a.npz")
    assert "at most 0 frames" in usage_error("sample", finished, "--video=a.gif")


def test_labels_are_rejected_without_classes():
    train_tiny(Path("run"), "--kimg=0.016", "--data.labels=false")
    assert "without classes" in usage_error("sample", "run", "--labels=3", "--out=a.png")
    assert run_cli("sample", "run", "--out=a.png").status == 0


def test_scores_are_added_with_their_protocol(finished):
    shutil.copytree(finished, "run")
    ended = run_cli("eval", "run", "--metrics=fd,kid", "--count=32")
    assert ended.status == 0
    assert "fd_pixels" in ended.out
    assert ended.out.count("not comparable") == 1
    assert re.search(r"not comparable with the fd_pixels [0-9.]+ before: fakes 32, was 16\n", ended.out)
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["fd_pixels", "fd_pixels", "kid_pixels"]
    assert [row["protocol"]["fakes"] for row in rows] == [16, 32, 32]


def test_invalid_scores_are_rejected(finished):
    shutil.copytree(finished, "run")
    before = Path("run/metrics.jsonl").read_bytes()
    assert "did you mean" in usage_error("eval", "run", "--metrics=foo")
    assert "missing nowhere" in usage_error("eval", "run", "--metrics=fid", "--inception=nowhere")
    assert "count=0" in usage_error("eval", "run", "--count=0")
    assert "nowhere does not exist" in usage_error("eval", "run", "--data=nowhere")
    assert Path("run/metrics.jsonl").read_bytes() == before


def test_init_from_the_model_of_another_run(finished):
    ended = run_cli(*train_args(Path("a"), "--kimg=0.016", "--init-from", str(finished)))
    assert f"starts from the weights of {finished}" in ended.out
    a, b = Path("a"), train_tiny(Path("b"), "--kimg=0.016", "--init-from", str(finished))
    assert final_tensors(a) == final_tensors(b) != final_tensors(train_tiny(Path("c"), "--kimg=0.016"))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ([], r"of another width, resolution or number of classes: \S+ is \[[\d, ]+\] in the file, "),
        (["--strategy=per-label"], "another architecture; the first names that differ: "),
    ],
)
def test_a_model_of_another_architecture_is_rejected_and_no_files(finished, more, reason, tmp_path):
    words = ["train", *TINY_RUN_ARGS, "--init-from", finished, "--nets.width=12", *more]
    for where in (["--run-dir", tmp_path / "run"], ["--outdir", tmp_path / "runs"]):
        line = usage_error(*words, *where)
        assert re.search(f"model.safetensors: {reason}", line)
        assert str(finished) in line
    assert "no model.safetensors" in usage_error(*words, "--init-from", tmp_path, "--outdir", tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_field_is_kept_whether_its_group_is_chosen_before_or_after_it(order):
    words = ("--g.optimizer.lr=5e-4", "--g.optimizer=sgd")
    run, _ = build_run(to_dict(get_recipe("digits")), parse_settings([words[i] for i in order]))
    assert (run.g.optimizer.name, run.g.optimizer.lr) == ("sgd", 5e-4)
