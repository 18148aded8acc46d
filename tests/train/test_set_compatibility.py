"""Advice on two sets that cannot be compared: followed, it leads to scores."""

from __future__ import annotations

import hashlib
import shutil

import numpy as np
import pytest
from PIL import Image
from torch import nn

import paragan
from advice import Case, advises, case_id
from paragan.eval import features
from paragan.train.compare_sets import ComparisonOptions, prepare_comparison
from processes import run_cli

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (24, 4, 4, 1), np.uint8)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A folder of sets: grey images of 4 px unless their name says something else, numbers and statistics."""
    folder = tmp_path_factory.mktemp("sets")
    pairs = np.arange(24) % 12
    np.savez(folder / "cats.npz", images=IMAGES, labels=pairs % 2, classes=["cat", "dog"])
    np.savez(folder / "birds.npz", images=255 - IMAGES, labels=pairs % 2, classes=["bird", "cow"])
    np.savez(folder / "single.npz", images=IMAGES, labels=np.arange(24))
    np.savez(folder / "plain.npz", images=255 - IMAGES)
    np.savez(folder / "few.npz", images=IMAGES[:6])
    np.savez(folder / "one.npz", images=IMAGES[:1])
    np.savez(folder / "large.npz", images=IMAGES.repeat(2, 1).repeat(2, 2))
    np.savez(folder / "rgb.npz", images=IMAGES.repeat(3, 3))
    np.savez(folder / "large_rgb.npz", images=IMAGES.repeat(2, 1).repeat(2, 2).repeat(3, 3))
    np.save(folder / "pairs.npy", RNG.normal(size=(24, 2)).astype(np.float32))
    np.save(folder / "triples.npy", RNG.normal(size=(24, 3)).astype(np.float32))
    moments = {"mu": np.zeros(16), "sigma": np.eye(16)}
    np.savez(folder / "stats.npz", **moments)
    np.savez(folder / "small_stats.npz", mu=np.zeros(3), sigma=np.eye(3))
    inception = {
        "mu": np.zeros(2),
        "sigma": np.eye(2),
        "space": "inception",
        "space_hash": features.INCEPTION_SHA256[:16],
    }
    np.savez(folder / "inception_stats.npz", **inception)
    for name, size in (("mixed", 6), ("damaged", 4)):
        (folder / name).mkdir()
        for number, image in enumerate(IMAGES):
            Image.fromarray(image[..., 0]).save(folder / name / f"{number:02}.png")
        Image.fromarray(IMAGES[0, ..., 0]).resize((size, size)).save(folder / name / "03.png")
    (folder / "damaged" / "05.png").write_bytes(b"no image")
    return folder


CASES = [
    # counts
    Case("cats one", "needs at least 2 fakes, and one.npz has 1. Use 2 or more", ("~fakes --fakes=few.npz",)),
    Case(
        "cats few --metrics=fd,prdc",
        "Use fd,kid, or more images",
        ("--metrics=fd", "--metrics=kid", "~fakes --fakes=plain.npz"),
    ),
    Case(
        "cats plain --metrics=kid50k_full --features=pixels",
        "metrics=kid50k_full: is of 50000 fakes, and plain.npz has 24. Use kid",
        ("--metrics=kid",),
    ),
    Case("cats plain --count=25", "fakes are 24 images in plain.npz. Use count=24 or less", ("--count=24",)),
    # files of statistics
    Case("cats stats --count=5", "Leave --count out", ("~count",)),
    Case(
        "cats stats --metrics=kid",
        "Use fd, or fid if it is of Inception, or give the images",
        ("--metrics=fd", "~fakes --fakes=plain.npz"),
    ),
    Case(
        "inception_stats inception_stats --metrics=kid",
        "Use fd, or fid if it is of Inception, or give the images",
        ("--metrics=fid",),
    ),
    Case(
        "stats plain --features=resnet20",
        "Use the space of the file, which is taken without --features",
        ("~features",),
    ),
    Case("stats stats --features=pixels", "Leave --features out", ("~features",)),
    Case(
        "stats stats --features=test_set_compatibility:Corner",
        "features=test_set_compatibility:Corner: is for images, and both sets are files of statistics. Leave it out",
        ("~features",),
    ),
    Case(
        "stats stats --resolution=4 --channels=1", "Leave --resolution and --channels out", ("~resolution ~channels",)
    ),
    Case("pairs pairs --channels=1", "Leave --resolution and --channels out", ("~channels",)),
    Case(
        "stats small_stats",
        "Use files and --features of one space",
        ("~fakes --fakes=stats.npz", "~reals --reals=small_stats.npz"),
    ),
    Case("cats small_stats", "Use files and --features of one space", ("~fakes --fakes=stats.npz",)),
    # labels
    Case(
        "cats plain --metrics=intra_fd",
        "Use fd, kid or prdc with other features, or images with labels",
        ("--metrics=fd", "--metrics=kid", "--metrics=prdc", "~fakes --fakes=cats.npz"),
    ),
    Case(
        "plain cats --features=resnet20",
        "Use fd, kid or prdc with other features, or images with labels",
        ("--features=pixels",),
    ),
    Case(
        "cats birds --metrics=intra_fd",
        "metrics=intra_fd: goes class by class, and birds.npz has other classes (2: bird, cow) than cats.npz "
        "(2: cat, dog). Use fd, kid or prdc",
        ("--metrics=fd", "--metrics=kid", "--metrics=prdc"),
    ),
    Case(
        "single single --metrics=intra_fd",
        "metrics=intra_fd: no class of reals single.npz has two images, which a distance within classes needs. "
        "Use fd, kid or prdc",
        ("--metrics=fd", "--metrics=kid", "--metrics=prdc"),
    ),
    # sizes, colours, numbers
    Case(
        "cats large",
        "Use --resolution 4, which crops every image of both sets to the largest centred square and resizes it with "
        "Lanczos",
        ("--resolution=4",),
    ),
    Case(
        "cats large_rgb",
        "Use --resolution 4, which crops every image of both sets to the largest centred square and resizes it with "
        "Lanczos, and --channels 3 or 1, since colour differs too",
        ("--resolution=4 --channels=3", "--resolution=4 --channels=1"),
    ),
    Case("cats mixed", "are of several sizes, 4 x 4 to 6 x 6. Use --resolution 4", ("--resolution=4",)),
    Case(
        "cats rgb",
        "Use --channels 3 to repeat grey to RGB, or --channels 1 to reduce colour to grey",
        ("--channels=3", "--channels=1"),
    ),
    Case(
        "cats pairs",
        "Use two sets of one kind",
        ("~fakes --fakes=plain.npz", "~reals ~fakes --reals=pairs.npy --fakes=pairs.npy"),
    ),
    Case("pairs triples", "Use records of one shape", ("~fakes --fakes=pairs.npy",)),
    Case(
        "pairs pairs --features=inception",
        "features=inception: needs images, and the sets are numbers. Use values",
        ("--features=values",),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_advice_on_two_sets_leads_to_scores(case, sets, check_advice, monkeypatch):
    monkeypatch.chdir(sets)
    reals, fakes, *options = case.arguments.split()
    files = [next(path.name for path in sets.iterdir() if path.stem == name) for name in (reals, fakes)]
    arguments = " ".join([f"--reals={files[0]} --fakes={files[1]}", *options])
    check_advice(case._replace(arguments=arguments), ["eval", "--metrics=fd"])


class Corner(nn.Module):
    def forward(self, images):
        return images[:, 0, 0, :4].float()


def test_statistics_of_other_images_are_written_as_advised(sets, tmp_path):
    stats = tmp_path / "stats.npz"
    assert run_cli("data", "stats", sets / "plain.npz", "--out", stats).status == 0
    with advises(f"Use `paragan data stats PATH --out {stats} --resolution 8 --channels 3`"):
        paragan.compare(stats, sets / "large_rgb.npz", ["fd"])
    command = ["data", "stats", sets / "plain.npz", "--out", stats, "--resolution", "8", "--channels", "3"]
    assert run_cli(*command).status == 0
    assert paragan.compare(stats, sets / "large_rgb.npz", ["fd"])


def test_a_damaged_image_is_left_out_as_advised(sets, tmp_path):
    fakes = shutil.copytree(sets / "damaged", tmp_path / "fakes")
    with advises("Use `paragan data convert FROM TO --skip-bad` to leave them out"):
        paragan.compare(IMAGES, fakes, ["fd"])
    assert run_cli("data", "convert", fakes, tmp_path / "clean", "--skip-bad").status == 0
    (score,) = paragan.compare(IMAGES, tmp_path / "clean", ["fd"])
    assert score.protocol["fakes"] == 23


def test_metrics_and_channels_are_given_as_advised():
    with advises("metrics=: there is none. Use fd,kid,prdc"):
        paragan.compare(IMAGES, IMAGES, [])
    assert len(paragan.compare(IMAGES, IMAGES, "fd,kid,prdc")) == 6
    with advises("Use 1 (grey) or 3 (RGB)"):
        paragan.compare(IMAGES, IMAGES, ["fd"], channels=2)
    for channels in (1, 3):
        assert paragan.compare(IMAGES, IMAGES, ["fd"], channels=channels)


def test_weights_of_inception_are_used_or_left_out_as_advised(tmp_path, monkeypatch):
    weights = tmp_path / "weights.pth"
    weights.write_bytes(b"")
    monkeypatch.setattr(features, "INCEPTION_SHA256", hashlib.sha256(b"").hexdigest())
    options = ComparisonOptions(("fd",), features="pixels", inception=str(weights))
    with advises(f"inception={weights}: is not used by features=pixels. Leave one of them out"):
        prepare_comparison(IMAGES, IMAGES, options)
    for followed in (ComparisonOptions(("fd",), inception=str(weights)), ComparisonOptions(("fd",), "pixels")):
        assert prepare_comparison(IMAGES, IMAGES, followed)


def test_many_fakes_are_reduced_as_advised():
    pixels = IMAGES[:, :1, :1]
    many = np.zeros((50_001, 1, 1, 1), np.uint8)
    options = {"metrics": ("kid50k_full",), "features": "pixels"}
    with advises("metrics=kid50k_full: is of 50000 fakes, and the array has 50001. Use kid, or --count 50000"):
        prepare_comparison(pixels, many, ComparisonOptions(**options))
    assert prepare_comparison(pixels, many, ComparisonOptions(**options, count=50_000))
    assert prepare_comparison(pixels, many, ComparisonOptions(**options | {"metrics": ("kid",)}))
