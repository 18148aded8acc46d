"""`paragan data`: what it answers, and the one line with which it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paragan.cli.main import main
from paragan.data.dataset import load_data
from processes import run_cli, usage_error

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def photos(count: int = 3, side: int = 8, channels: int = 3) -> Path:
    """A folder of two classes."""
    for name in ("ant", "bee"):
        folder = Path("photos") / name
        folder.mkdir(parents=True)
        for index in range(count):
            pixels = RNG.integers(0, 256, (side, side, channels), np.uint8)
            Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels).save(folder / f"{index}.png")
    return Path("photos")


BAD = {  # command line: what its one line must say
    "data": ["COMMAND"],
    "data inspct digits": ["inspct", "inspect"],
    "data inspect": ["PATH"],
    "data inspect nowhere": ["nowhere does not exist"],
    "data inspect digits --fast": ["--fast"],
    "data inspect digits --resolution 0": ["--resolution=0", "64"],
    "data inspect digits --resolution big": ["--resolution", "big"],
    "data inspect digits --resolution 16x": ["--resolution=16x", "256x128"],
    "data inspect digits --channels 4": ["digits has 1 channels", "Use 1 or 3"],
    "data convert digits a --channels 5": ["--channels=5", ".npz or .h5"],
    "data convert digits a --channels 0": ["--channels=0", "3 (RGB)"],
    "data inspect digits --sheet sheet.jpg": ["sheet.jpg", ".png"],
    "data convert digits": ["TO"],
    "data convert nowhere a.npz": ["nowhere does not exist"],
    "data convert digits a.tgz": ["a.tgz", ".npz", "--to tars"],
    "data convert digits a --to tgz": ["tgz", "npz"],
    "data convert digits a.npz --format jpg": ["--format=jpg", "pixels"],
    "data convert digits a --format gif": ["gif", "png"],
    "data convert digits a --quality 0": ["--quality=0", "95"],
    "data convert digits a --resolution -1": ["--resolution=-1"],
    "data convert digits a --shuffle x": ["--shuffle"],
    "data convert digits a --shuffle -1": ["--shuffle=-1", "0 or more"],
    "data shard digits a --shard-mb 0": ["--shard-mb=0", "64"],
    "data shard digits a --shard-mb nan": ["--shard-mb=nan"],
    "data index nowhere": ["nowhere does not exist"],
    "data index .": ["holds no .tar", "paragan data shard"],
    "data stats digits": ["--out"],
    "data stats digits --out a.txt": ["a.txt", "stats.npz"],
    "data stats nowhere --out a.npz": ["nowhere does not exist"],
    "data stats digits --out a.npz --count 1": ["--count 1", "1797"],
    "data stats digits --out a.npz --count 9999": ["--count 9999", "1797"],
    "data stats digits --out a.npz --features pixel": ["did you mean pixels?"],
    "data stats digits --out a.npz --features inception --inception nowhere": ["missing nowhere"],
    "data encode digits a.npz": ["--encoder"],
    "data encode digits a --encoder nowhere": ["a: latents", "latents.npz"],
    "data encode digits a.npz --encoder nowhere": ["--encoder=nowhere: does not exist"],
    "data encode digits a.npz --encoder no_such:Class": ["--encoder=no_such:Class: ModuleNotFoundError"],
    "data encode digits a.npz --encoder nowhere --resolution 0": ["--resolution=0"],
    "data encode digits a.npz --encoder nowhere --device abacus": ["--device abacus", "cpu"],
    "data inspect digits --range=2": ["data.range=2", "0:4095"],
    "data convert digits a.npz --range=9:1": ["data.range=9:1", "MIN must be below MAX"],
    "data stats digits --out a.npz --data.range=x": ["data.range=x"],
    "bench data --data digits --range=x": ["data.range=x"],
    "data stats digits --out a.npz --resolution 128": ["8192"],
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_writes_no_file(line, tmp_path):
    message = usage_error(*line.split())
    assert all(words in message for words in BAD[line]), message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["", "inspect", "convert", "shard", "index", "stats", "encode"])
def test_every_help_teaches_by_examples(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["data", *command.split(), "--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert "examples:" in output
    assert not [line for line in output.splitlines() if line != line.rstrip()]
    usage = output.partition("\n\n")[0]
    assert all(name in usage for name in ("PATH", "FROM") if command and f"\n{name} is whatever" in output)


def test_inspect_describes_the_data():
    output = run_cli("data", "inspect", "digits")
    assert output.status == 0
    for words in ("1,797", "all 8 x 8", "10 classes: 0 (178)", "grey 1,797", "8 x 8, grey; 115 kB, cached in memory"):
        assert words in output.out
    assert output.err == ""


@pytest.mark.parametrize(
    "line", ["data inspect photos/ant", "data convert photos/ant b.zip", "bench data --seconds 0.1 --data photos/ant"]
)
def test_labels_that_cannot_be_read_can_be_left_out_by_every_command(line):
    photos()
    Path("photos/ant/0.txt").write_text("a caption")
    error = usage_error(*line.split())
    assert "captions are no classes" in error
    assert error.endswith("or use --no-labels\n")
    assert run_cli(*line.split(), "--no-labels").status == 0


def test_the_key_of_labels_is_chosen_by_an_option():
    images = RNG.integers(0, 256, (4, 8, 8, 3), np.uint8)
    np.savez("a.npz", images=images, y=[0, 1, 0, 1], target=[0, 1, 2, 3])
    assert "Choose with --label-key=target, or use --no-labels" in usage_error("data", "inspect", "a.npz")
    assert "4 classes" in run_cli("data", "inspect", "a.npz", "--label-key=target").out
    assert "--label-key=z: " in usage_error("data", "inspect", "a.npz", "--label-key=z")


def test_every_command_takes_the_range_that_an_error_names():
    folder = photos(2, channels=1)
    for index, path in enumerate(sorted(folder.rglob("*.png"))):
        pixels = np.full((8, 8), 1000 + 500 * index, np.int32)
        pixels[0, 0] = -100
        Image.fromarray(pixels).save(path.with_suffix(".tif"))
        path.unlink()
    commands = {
        "inspect": ["data", "inspect", "photos"],
        "convert": ["data", "convert", "photos", "a.npz"],
        "shard": ["data", "shard", "photos", "shards"],
        "stats": ["data", "stats", "photos", "--out=a_stats.npz"],
        "bench": ["bench", "data", "--data=photos", "--batch=4", "--seconds=0.1"],
    }
    for name, command in commands.items():
        assert "--data.range=-100:2500, or --data.range=0:2500 (clips)" in usage_error(*command), name
        for option in ("--data.range=-100:2500", "--range=0:2500"):
            if name in ("convert", "shard"):
                command = [*command[:3], f"{option.strip('-')}{command[3]}"]
            ended = run_cli(*command, option)
            assert ended.status == 0, ended.err
            assert "values -100:2500 found in 4 images of int32" in ended.out or name == "stats"


def test_inspect_reports_bad_images_with_status_0():
    (photos() / "ant" / "bad.png").write_bytes(b"no image")
    ended = run_cli("data", "inspect", "photos", "--json=found.json", "--sheet=sheet.png")
    assert ended.status == 0
    assert "1 of 7 cannot be decoded" in ended.out
    assert "photos/ant/bad.png: not a PNG" in ended.out
    report = json.loads(Path("found.json").read_text())
    assert [Path(one["name"]).name for one in report["bad"]] == ["bad.png"]
    with Image.open("sheet.png") as sheet:
        assert sheet.size == (3 * 64 + 4, 2 * 64 + 2)  # with gutters of 2
    assert "none of the 1 images" in usage_error("data", "inspect", _only_bad())


@pytest.mark.parametrize("oddity", ["stray", "empty"])
def test_inspect_describes_invalid_layouts(oddity, tmp_path):
    folder = photos()
    messages = {
        "stray": "photos holds images (1) and folders (2) side by side",
        "empty": "photos/cat: this class has no",
    }
    if oddity == "stray":
        Image.fromarray(RNG.integers(0, 256, (8, 8, 3), np.uint8)).save(folder / "stray.png")
    else:
        (folder / "cat").mkdir()
    ended = run_cli("data", "inspect", "photos", "--json=found.json", "--sheet=sheet.png")
    assert ended.status == 2
    assert {"stray": "3 classes: ant (3), bee (3), (no class) (1)", "empty": "cat (0)"}[oddity] in ended.out
    assert f"training would not accept it: data: {messages[oddity]}" in ended.err
    assert json.loads(Path("found.json").read_text())["images"] == 6 + (oddity == "stray")
    assert Path("sheet.png").exists()
    assert messages[oddity] in usage_error("data", "convert", "photos", "a.zip")


def test_statistics_are_no_images():
    assert run_cli("data", "stats", str(photos()), "--out", "stats.npz").status == 0
    for line in (["data", "inspect", "stats.npz"], ["train", "folder", "--data=stats.npz"]):
        assert "stats.npz holds moments of images (mu, sigma; " in usage_error(*line)


def _only_bad() -> str:
    Path("bad").mkdir()
    Path("bad/a.png").write_bytes(b"")
    return "bad"


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("out", ["a.npz", "a.zip", "a", "a.tars"])
def test_a_full_disk_is_one_line_and_leaves_no_files(out, tmp_path):
    """A limit on the size of files stands for it."""
    code = f"""import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({100 if out == "a" else 100_000},) * 2)
from paragan.cli.main import main
sys.exit(main(["data", "convert", "digits", "{out}", "--resolution=64", *{["--to=tars"] * (out == "a.tars")}]))"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1, ended
    assert f"paragan: {out} cannot be written: File too large: make room" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_convert_reports_its_output_and_never_overwrites():
    photos(side=16)
    ended = run_cli("data", "convert", "photos", "a.npz", "--resolution=8")
    assert (ended.status, ended.out) == (0, "6 images in a.npz, each 8 x 8, RGB\n")
    before = Path("a.npz").read_bytes()
    assert "exists already" in usage_error("data", "convert", "digits", "a.npz")
    assert Path("a.npz").read_bytes() == before


@pytest.mark.parametrize("channels", [1, 3])
def test_shards_come_with_their_index_and_can_be_trained_on(channels):
    photos(channels=channels)
    assert run_cli("data", "shard", "photos", "shards", "--shard-mb=0.001").status == 0
    assert {"classes.json", "paragan-index.npz", "shard-000000.tar"} <= {path.name for path in Path("shards").iterdir()}
    one, other = load_data("shards", resolution=None), load_data("photos", resolution=None)
    assert (one.images[:] == other.images[:]).all()
    assert one.classes == other.classes == ("ant", "bee")
    Path("shards/paragan-index.npz").unlink()
    assert "6 images" in run_cli("data", "index", "shards").out
    assert Path("shards/paragan-index.npz").exists()


def test_bad_images_raise_or_are_skipped():
    (photos() / "ant" / "bad.png").write_bytes(b"no image")
    assert "--skip-bad" in usage_error("data", "convert", "photos", "a.zip")
    assert sorted(path.name for path in Path().iterdir()) == ["photos"]
    ended = run_cli("data", "convert", "photos", "a.zip", "--skip-bad", "--no-labels")
    assert "1 cannot be decoded and were left out: a.zip.bad.txt" in ended.out
    assert load_data("a.zip", resolution=None).labels is None


@pytest.mark.parametrize("channels", [1, 3])
def test_stats_are_the_moments_of_the_pixels(channels):
    photos(count=20, channels=channels)
    assert run_cli("data", "stats", "photos", "--out=s.npz").status == 0
    x = load_data("photos", resolution=None).images[:].transpose(0, 3, 1, 2).reshape(40, -1) / 255.0
    with np.load("s.npz") as saved:
        assert np.allclose(saved["mu"], x.mean(0), atol=1e-6)
        assert np.allclose(saved["sigma"], np.cov(x, rowvar=False), atol=1e-6)
        assert saved["mu"].dtype == saved["sigma"].dtype == np.float64
        assert (int(saved["count"]), str(saved["space"]), str(saved["resizer"])) == (40, "pixels", "none")
        assert len(str(saved["space_hash"])) == 16


def test_stats_are_those_that_scores_compare_with():
    from paragan.eval.accumulators import GaussianAcc
    from paragan.eval.evaluate import compute_feature_stats
    from paragan.eval.features import pixels
    from paragan.eval.frechet import Gaussian, frechet_distance

    assert "64" in run_cli("data", "stats", "digits", "--out=s.npz", "--count=500").out
    reals = load_data("digits", resolution=None).images[np.linspace(0, 1796, 500).astype(int)]
    space = pixels(8, 1)
    expected = compute_feature_stats(reals, space=space, metrics=["fd"]).get(GaussianAcc())
    with np.load("s.npz") as saved:
        stored = Gaussian(int(saved["count"]), torch.from_numpy(saved["mu"]), torch.from_numpy(saved["sigma"]))
        assert str(saved["space_hash"]) == space.hash
    assert frechet_distance(stored, expected).value < 1e-5


@pytest.mark.slow
@pytest.mark.kill
def test_a_killed_conversion_leaves_no_output(tmp_path):
    photos(count=150)
    command = [sys.executable, "-m", "paragan", "data", "convert", "photos", "out.zip", "--resolution=1024"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".out*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 3
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_sizes_have_the_width_first():
    photos(side=12)
    inspected = run_cli("data", "inspect", "photos", "--resolution=16x8")
    assert "training  16 wide, 8 high, RGB" in inspected.out
    converted = run_cli("data", "convert", "photos", "a.npz", "--resolution=16x8")
    assert "each 16 wide, 8 high, RGB" in converted.out
    with np.load("a.npz") as arrays:
        assert arrays["images"].shape == (6, 8, 16, 3)
    assert run_cli("data", "stats", "photos", "--resolution=16x8", "--out=stats.npz").status == 0


def test_a_refused_number_of_channels_names_the_option_that_reads_them():
    np.savez("bands.npz", images=RNG.integers(0, 256, (4, 8, 8, 5), np.uint8))
    assert "--channels 5" in usage_error("data", "inspect", "bands.npz")
    assert "training  8 x 8, 5 channels" in run_cli("data", "inspect", "bands.npz", "--channels=5").out
    assert run_cli("data", "convert", "bands.npz", "bands.h5", "--channels=5").status == 0
    assert load_data("bands.h5", resolution=None, channels=5).shape == (5, 8, 8)
