"""Runs on images that are not square, and on more than three channels: trained, resumed, sampled and scored."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paragan.models.load import load
from processes import final_tensors, logged_steps, run_cli, train_args, train_interrupted, train_tiny, usage_error

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """A folder of two classes of images, 18 wide and 10 high."""
    folder = tmp_path_factory.mktemp("wide")
    for index in range(32):
        path = folder / "ab"[index % 2] / f"{index:02}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(RNG.integers(0, 256, (10, 18, 3), np.uint8)).save(path)
    return folder


def options(data: Path, *more: str) -> list[str]:
    return [f"--data={data}", "--data.resolution=16x8", "--data.channels=3", "--kimg=0.064", *more]


def test_a_stopped_run_resumes_exactly_samples_and_is_scored(wide, tmp_path):
    straight = train_tiny(tmp_path / "straight", *options(wide))
    stopped = train_interrupted(tmp_path / "stopped", 2, *options(wide))
    assert run_cli(*train_args(stopped, *options(wide))).status == 0
    assert final_tensors(stopped) == final_tensors(straight)
    assert logged_steps(stopped) == logged_steps(straight)
    assert load(str(straight)).sample(3).shape == (3, 8, 16, 3)
    scored = run_cli("eval", straight, "--metrics=fd", "--count=16")
    assert "fd_pixels" in scored.out
    assert run_cli("sample", straight, "--count=4", f"--out={tmp_path / 'samples'}").status == 0
    for path in (tmp_path / "samples").glob("*/*.png"):
        with Image.open(path) as image:
            assert image.size == (16, 8)


@pytest.mark.slow
def test_two_ranks_train_what_one_does_and_resume_exactly(wide, tmp_path, processes):
    one = train_tiny(tmp_path / "one", *options(wide))
    straight = tmp_path / "straight"
    resumed = tmp_path / "resumed"
    for folder, kimg in ((straight, "--kimg=0.064"), (resumed, "--kimg=0.032"), (resumed, "--kimg=0.064")):
        ranks = processes.start_ranks(2, *train_args(folder, *options(wide), kimg))
        assert [rank.wait() for rank in ranks] == [0, 0]
    assert final_tensors(resumed) == final_tensors(straight)
    assert logged_steps(resumed) == logged_steps(one)
    a, b = (load(str(folder)).sample(4).astype(int) for folder in (one, resumed))
    assert np.abs(a - b).max() <= 1  # sums of gradients in another order


def test_a_size_that_the_networks_cannot_make_is_refused_and_the_advice_works(wide, tmp_path):
    line = usage_error(*train_args(tmp_path / "run", *options(wide, "--data.resolution=17x10")))
    assert "data.resolution=17x10: 17 wide, 10 high" in line
    suggested = line.split("Use ")[1].split()[0]
    assert not (tmp_path / "run").exists()
    arguments = train_args(tmp_path / "run", *options(wide), f"--data.resolution={suggested}", "--kimg=0.016")
    assert run_cli(*arguments).status == 0


@pytest.mark.slow
def test_five_channels_are_trained_on_and_inception_is_refused(tmp_path):
    np.savez(tmp_path / "bands.npz", images=RNG.integers(0, 256, (32, 8, 16, 5), np.uint8))
    bands = [f"--data={tmp_path / 'bands.npz'}", "--data.resolution=16x8", "--kimg=0.032"]
    assert "--data.channels=5" in usage_error(*train_args(tmp_path / "run", *bands, "--data.channels=0"))
    bands.append("--data.channels=5")
    line = usage_error(*train_args(tmp_path / "run", *bands, "--evaluation.features=inception"))
    assert "5 channels. Use pixels" in line
    run = train_tiny(tmp_path / "run", *bands, "--objective.augment=ada")
    assert load(str(run)).sample(2).shape == (2, 8, 16, 5)
    with Image.open(run / "reals.png") as image:
        assert image.mode == "RGB"
    assert run_cli("sample", run, "--count=2", f"--out={tmp_path / 'two.npz'}").status == 0
    shown = run_cli("sample", run, "--count=2", f"--out={tmp_path / 'two.png'}")
    assert "shows the first three of 5 channels" in shown.out
    assert "Use samples.npz" in usage_error("sample", run, "--count=2", f"--out={tmp_path / 'folder'}")
