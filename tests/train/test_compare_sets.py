"""Two sets of images are scored as written down in the definitions, and what cannot be scored is refused at once."""

from __future__ import annotations

import shutil
import zipfile

import h5py
import numpy as np
import pytest
import scipy.linalg
import torch
from PIL import Image
from torch import nn

import paragan
from advice import advises
from paragan.core.errors import UsageError
from paragan.eval import classifier, features, result_cache
from paragan.eval.features import inception_2015
from paragan.eval.inception import Inception
from paragan.train import compare_sets, image_set
from paragan.train.rank_agreement import check_same_sets

N, M = 80, 60


def draw_images(count, seed, side=8, channels=1):
    """Blocks of 2 x 2 pixels, darker with a larger seed."""
    blocks = np.random.default_rng(seed).integers(0, 256 - 20 * seed, (count, side // 2, side // 2, channels))
    return blocks.repeat(2, 1).repeat(2, 2).astype(np.uint8)


REALS, FAKES = draw_images(N, 1), draw_images(M, 2)


def vectors(images):
    """Pixels in [0, 1], as float32 features are."""
    return (images.reshape(len(images), -1).astype(np.float32) / 255).astype(np.float64)


def write_folder(folder, images, labels=None, suffix=".png"):
    for number, image in enumerate(images):
        path = folder / ("" if labels is None else str(labels[number])) / f"{number:04d}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.squeeze()).save(path)
    return folder


def write_npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def values(scores):
    return {score.name: score.value for score in scores}


# oracles


def frechet_by_scipy(x, y):
    mean = x.mean(0) - y.mean(0)
    a, b = np.cov(x.T), np.cov(y.T)
    noise = 1e-9 * np.eye(len(a))  # sqrtm of singular matrices is inexact
    return mean @ mean + np.trace(a + b - 2 * scipy.linalg.sqrtm((a + noise) @ (b + noise)).real)


def kernel_distance(x, y, subsets=100, seed=0):
    def kernel(a, b):
        return (a @ b.T / a.shape[1] + 1) ** 3

    size = min(len(x), len(y))
    generator = torch.Generator().manual_seed(seed)
    results = []
    for _ in range(subsets):
        a = x[torch.randperm(len(x), generator=generator)[:size].numpy()]
        b = y[torch.randperm(len(y), generator=generator)[:size].numpy()]
        within = sum(kernel(z, z).sum() - np.trace(kernel(z, z)) for z in (a, b)) / (size * (size - 1))
        results.append(within - 2 * kernel(a, b).mean())
    return np.mean(results)


def precision_recall_density_coverage(x, y, k=5):
    def radii(z):
        return np.sort(np.linalg.norm(z[:, None] - z[None], axis=2), axis=1)[:, k]

    distances = np.linalg.norm(x[:, None] - y[None], axis=2)
    in_reals, in_fakes = distances <= radii(x)[:, None] + 1e-9, distances <= radii(y)[None] + 1e-9
    return in_reals.any(0).mean(), in_fakes.any(1).mean(), in_reals.sum() / k / len(y), in_reals.any(1).mean()


def test_scores_are_those_of_the_definitions(tmp_path):
    fakes = write_npz(tmp_path / "samples.npz", images=FAKES, labels=np.zeros(M, np.int64))
    scores = values(paragan.compare(write_folder(tmp_path / "reals", REALS), fakes))
    x, y = vectors(REALS), vectors(FAKES)
    assert scores["fd_pixels"] == pytest.approx(frechet_by_scipy(x, y), rel=1e-4)
    assert scores["kid_pixels"] == pytest.approx(kernel_distance(x, y), rel=1e-9)
    names = [f"{name}_pixels" for name in ("precision", "recall", "density", "coverage")]
    assert [scores[name] for name in names] == pytest.approx(precision_recall_density_coverage(x, y))
    assert 0 < scores["recall_pixels"] < 1


def test_equal_sets_have_no_distance(tmp_path):
    scores = values(paragan.compare(REALS, write_npz(tmp_path / "a.npz", images=REALS)))
    assert scores["fd_pixels"] == pytest.approx(0, abs=1e-6)
    assert abs(scores["kid_pixels"]) < 1 / N  # pairs of an image with itself
    ones = [scores[f"{name}_pixels"] for name in ("precision", "recall", "coverage")]
    assert ones == [1, 1, 1]
    assert scores["density_pixels"] == pytest.approx(6 / 5, abs=0.2)  # its own ball, and 5 more


def test_exchanged_sets_exchange_precision_and_recall():
    there, back = (values(paragan.compare(a, b, ["fd", "prdc"])) for a, b in ((REALS, FAKES), (FAKES, REALS)))
    assert there["fd_pixels"] == pytest.approx(back["fd_pixels"], rel=1e-9)
    assert (there["precision_pixels"], there["recall_pixels"]) == (back["recall_pixels"], back["precision_pixels"])


def test_containers_of_the_same_images_have_the_same_scores(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "folder", FAKES)
    sets = [folder, *(tmp_path / name for name in ("a.zip", "a.tar", "b.npz", "adm.npz", "c.h5")), FAKES]
    shutil.make_archive(str(tmp_path / "a"), "zip", folder)
    shutil.make_archive(str(tmp_path / "a"), "tar", folder, ".")
    np.savez(tmp_path / "b.npz", images=FAKES)
    np.savez(tmp_path / "adm.npz", FAKES, np.zeros(M, np.int64))  # arr_0, arr_1
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file["imgs"] = FAKES.transpose(0, 3, 1, 2)
    results = [[(s.name, s.value) for s in paragan.compare(REALS, fakes, ["fd", "prdc"])] for fakes in sets]
    assert all(result == results[0] for result in results)
    monkeypatch.setattr(image_set, "MAX_AUTO_CACHE_BYTES", 0)  # decoded when needed
    assert [(s.name, s.value) for s in paragan.compare(REALS, folder, ["fd", "prdc"])] == results[0]


def test_scores_on_ranks_are_those_of_one(pool):
    def job(world):
        options = compare_sets.ComparisonOptions()
        comparison = compare_sets.prepare_comparison(REALS, FAKES, options)
        return [s.value for s in compare_sets.score_comparison(comparison, world.all_ranks, world.device)]

    (single,), two = pool(1, job), pool(2, job)
    assert two[0] == two[1] == pytest.approx(single, rel=1e-9)
    assert two[0][2:] == single[2:]  # counts
    assert single == [score.value for score in paragan.compare(REALS, FAKES)]


def test_ranks_with_other_images_are_refused(pool):
    def job(world):
        fakes = FAKES if world.is_main else FAKES[::-1].copy()
        comparison = compare_sets.prepare_comparison(REALS, fakes, compare_sets.ComparisonOptions())
        with pytest.raises(UsageError, match=r"fakes: rank 0 has 60 images .*; rank 1 has as many, but other images"):
            check_same_sets(comparison, world)

    pool(2, job)


# files of statistics


def test_statistics_stand_for_their_images(tmp_path):
    x = vectors(REALS)
    stats = write_npz(tmp_path / "stats.npz", mu=x.mean(0), sigma=np.cov(x.T))  # as pytorch-fid writes them
    (images,) = paragan.compare(REALS, FAKES, ["fd"])
    (score,) = paragan.compare(stats, FAKES, ["fd"])
    assert score.name == images.name == "fd_pixels"
    assert score.value == pytest.approx(images.value, rel=1e-9)
    assert score.protocol["data"].startswith("stats.npz ")
    assert "stats.npz: of unknown features and resizing, which may differ" in score.notes
    (score,) = paragan.compare(stats, stats, ["fd"])
    assert (score.name, score.value) == ("fd_stats", pytest.approx(0, abs=1e-9))


def test_files_of_data_stats_name_their_space(tmp_path):
    from processes import run_cli

    for name, images in (("a", REALS), ("b", FAKES)):
        data = write_npz(tmp_path / f"{name}.npz", images=images)
        assert run_cli("data", "stats", data, "--out", tmp_path / f"{name}-stats.npz").status == 0
    (score,) = paragan.compare(tmp_path / "a-stats.npz", tmp_path / "b-stats.npz", ["fd"])
    assert score.name == "fd_pixels"
    assert score.value == pytest.approx(paragan.compare(REALS, FAKES, ["fd"])[0].value, rel=1e-9)
    with pytest.raises(UsageError, match=r"is of images \[1, 8, 8\], and the others are \[1, 16, 16\]"):
        paragan.compare(tmp_path / "a-stats.npz", draw_images(9, 1, 16), ["fd"])


@pytest.mark.parametrize("side", ["reals", "fakes"])
def test_statistics_have_a_frechet_distance_only(tmp_path, side):
    stats = write_npz(tmp_path / "stats.npz", mu=np.zeros(64), sigma=np.eye(64))
    sets = {"reals": REALS, "fakes": FAKES} | {side: stats}
    for metric in ("kid", "prdc"):
        with pytest.raises(UsageError, match=rf"metrics={metric}: needs images, and {side} .* Use fd, or fid if"):
            paragan.compare(**sets, metrics=["fd", metric])


@pytest.mark.slow
def test_fid_needs_the_weights_of_inception(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"inception=any.pth: is not used by features=pixels. Leave one of them out"):
        paragan.compare(REALS, FAKES, features="pixels", inception="any.pth")
    with pytest.raises(UsageError, match="--inception: missing"):
        paragan.compare(REALS, FAKES, ["fid"], inception=str(tmp_path / "absent.pth"))
    torch.manual_seed(0)
    file = tmp_path / "random.pth"
    torch.save({k: v for k, v in Inception().state_dict().items() if "num_batches_tracked" not in k}, file)
    monkeypatch.setattr(features, "INCEPTION_SHA256", features._file_sha256(file))
    few, others = REALS[:3], FAKES[:2]
    (score,) = paragan.compare(few, others, ["fid"], inception=str(file))
    space = inception_2015(file)
    x, y = (space(torch.from_numpy(z).permute(0, 3, 1, 2)).double().numpy() for z in (few, others))
    assert score.name == "fid"
    assert score.value == pytest.approx(frechet_of_few(x, y), rel=1e-5)
    assert score.protocol["resizer"] == "tf1-bilinear-299"


def frechet_of_few(x, y):
    """tr (S T)^1/2 is the sum of the singular values of X Y', whatever the number of features."""
    a, b = ((z - z.mean(0)) / (len(z) - 1) ** 0.5 for z in (x, y))
    mean = x.mean(0) - y.mean(0)
    return mean @ mean + (a**2).sum() + (b**2).sum() - 2 * np.linalg.svd(a @ b.T, compute_uv=False).sum()


# labels


def test_labels_match_by_name_whatever_their_order(tmp_path):
    labels = np.arange(N) % 2
    reals = write_npz(tmp_path / "a.npz", images=REALS, labels=labels, classes=np.array(["cat", "dog"]))
    fakes = write_folder(tmp_path / "fakes", FAKES, ["dog", "cat"] * (M // 2))
    (score,) = paragan.compare(reals, fakes, ["intra_fd"])
    alone = {"cat": (REALS[::2], FAKES[1::2]), "dog": (REALS[1::2], FAKES[::2])}
    for name, pair in alone.items():
        assert score.per_class[name] == pytest.approx(paragan.compare(*pair, ["fd"])[0].value, rel=1e-8)
    in_memory = paragan.from_arrays(REALS, labels, ("cat", "dog"))
    for dataset in (in_memory, paragan.load_data(str(reals), resolution=8, cache="stream")):
        assert paragan.compare(dataset, fakes, ["intra_fd"])[0].per_class == score.per_class
    assert paragan.compare(dataset.only_class(0), FAKES[1::2], ["fd"])[0].value == pytest.approx(score.per_class["cat"])
    numbered = write_folder(tmp_path / "numbered", FAKES, ["1", "0"] * (M // 2))
    assert paragan.compare(reals, numbered, ["intra_fd"])[0].per_class == score.per_class


def test_other_classes_or_no_labels_are_refused(tmp_path):
    labels = np.arange(N) % 2
    reals = write_npz(tmp_path / "a.npz", images=REALS, labels=labels, classes=np.array(["cat", "dog"]))
    birds = write_folder(tmp_path / "birds", FAKES, ["bird", "cat"] * (M // 2))
    with pytest.raises(UsageError, match=r"has other classes \(2: bird, cat\) than .* \(2: cat, dog\). Use fd"):
        paragan.compare(reals, birds, ["intra_fd"])
    with pytest.raises(UsageError, match=r"metrics=intra_fd: needs classes, and fakes .* have none"):
        paragan.compare(reals, FAKES, ["intra_fd"])
    with pytest.raises(UsageError, match=r"features=resnet20: needs classes, and reals .* have none"):
        paragan.compare(FAKES, reals, ["fd"], features="resnet20")


def test_a_classifier_of_the_reals_scores_fakes(tmp_path, monkeypatch):
    monkeypatch.setattr(classifier, "DEFAULT_TRAINING", classifier.ClassifierTraining(max_samples=256))
    reals = write_npz(tmp_path / "a.npz", images=REALS, labels=np.arange(N) % 2)
    fakes = write_npz(tmp_path / "b.npz", images=FAKES, labels=np.arange(M) % 2)
    scores = values(paragan.compare(reals, fakes, ["accuracy", "is", "fd"], features="resnet20"))
    assert 0 <= scores["accuracy_resnet20"] <= 1
    assert 1 <= scores["is_resnet20"] <= 2
    unlabelled = values(paragan.compare(reals, FAKES, "is,fd", features="resnet20"))
    assert unlabelled == {name: scores[name] for name in unlabelled}


# sizes and colours


def test_images_of_other_sizes_are_refused_or_resized_alike(tmp_path):
    large = draw_images(30, 1, 16)
    small = write_folder(tmp_path / "small", FAKES)
    with pytest.raises(UsageError, match=r"images differ in size: the array has 16 x 16 and .* has 8 x 8. Use --reso"):
        paragan.compare(large, small, ["fd"])
    (score,) = paragan.compare(large, small, ["fd"], resolution=8)
    resized = np.stack([np.asarray(Image.fromarray(z[..., 0]).resize((8, 8), Image.Resampling.LANCZOS)) for z in large])
    assert score.value == paragan.compare(resized, FAKES, ["fd"])[0].value
    assert "square crop, Lanczos to 8 x 8" in score.protocol["data"]


def test_one_image_of_another_size_among_many_is_noticed(tmp_path):
    folder = write_folder(tmp_path / "mixed", FAKES)
    Image.fromarray(FAKES[0].squeeze()).resize((10, 9)).save(folder / "0033.png")
    with pytest.raises(UsageError, match=r"fakes: images in .*mixed are of several sizes, 8 x 8 to 10 x 9. Use --res"):
        paragan.compare(REALS, folder, ["fd"])
    assert paragan.compare(REALS, folder, ["fd"], resolution=8)


def test_images_that_are_not_square_are_scored_as_they_are_or_cropped_on_request(tmp_path):
    wide = np.random.default_rng(1).integers(0, 256, (60, 8, 12), np.uint8)
    folder = write_folder(tmp_path / "wide", wide)
    (score,) = paragan.compare(folder, wide, ["fd"])
    assert score.value == pytest.approx(0, abs=1e-6)
    assert "crop" not in score.protocol["data"]
    (cropped,) = paragan.compare(folder, wide, ["fd"], resolution="6x8")
    assert "centre crop, Lanczos to 6 x 8" in cropped.protocol["data"]


def test_grey_and_colour_are_refused_or_made_alike():
    colored = FAKES.repeat(3, 3)
    with pytest.raises(UsageError, match=r"the array is grey and the array is RGB. Use --channels 3"):
        paragan.compare(REALS, colored, ["fd"])
    expected = values(paragan.compare(REALS, FAKES, ["prdc"]))
    for channels in (1, 3):
        assert values(paragan.compare(REALS, colored, ["prdc"], channels=channels)) == expected


def test_a_damaged_image_is_named_and_not_replaced(tmp_path):
    folder = write_folder(tmp_path / "fakes", FAKES)
    (folder / "0007.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"fakes: .*0007.png: .* 1 of 60 images cannot be decoded. Use `paragan data"):
        paragan.compare(REALS, folder, ["fd"])
    whole = (folder / "0008.png").read_bytes()
    (folder / "0007.png").write_bytes(whole[:-30])  # only its pixels are damaged
    with pytest.raises(UsageError, match=r"fakes: .*0007.png cannot be decoded: .*: replace or remove it$"):
        paragan.compare(REALS, folder, ["fd"])


# counts


@pytest.mark.parametrize(
    ("metrics", "count", "message"),
    [
        (["fd"], 1, r"metrics=fd: needs at least 2 fakes, and the array has 1. Use 2 or more"),
        (["fd", "kid", "prdc"], 6, r"metrics=prdc: needs at least 7 fakes, and the array has 6. Use fd,kid, or more"),
        (["is"], 19, r"metrics=is: needs at least 20 fakes, and the array has 19"),
        (["fid50k_full"], 30, r"metrics=fid50k_full: is of 50000 fakes, and the array has 30. Use fid$"),
        (["fids"], 30, r"metrics=fids: is none of .*; did you mean fid\?"),
        ([], 30, r"metrics=: there is none. Use fd,kid,prdc"),
    ],
)
def test_too_few_images_are_refused_before_features_are_computed(monkeypatch, metrics, count, message):
    def fail(*_, **__):
        raise AssertionError

    monkeypatch.setattr(compare_sets, "compute_feature_stats", fail)
    with pytest.raises(UsageError, match=message):
        paragan.compare(REALS, FAKES[:count], metrics)


def test_sets_have_no_pairs():
    with advises(
        "metrics=psnr: compares what a model makes of a real with it, and two sets have no such pairs. "
        "Use fd,kid,prdc, or paragan eval RUN_DIR"
    ):
        paragan.compare(REALS, FAKES, ["fd", "psnr"])
    assert len(paragan.compare(REALS, FAKES, "fd,kid,prdc")) == 6


def test_images_of_12_bits_have_their_range(tmp_path):
    eight = write_folder(tmp_path / "eight", FAKES)
    twelve = tmp_path / "twelve"
    twelve.mkdir()
    deep = (FAKES.astype(np.uint16) << 4) | 7
    deep[0, 0, 0] = 4095
    high_bits = (deep >> 4).astype(np.uint8)
    for number, image in enumerate(deep):
        Image.fromarray(image.squeeze()).save(twelve / f"{number:04d}.png")
    assert values(paragan.compare(REALS, twelve)) == values(paragan.compare(REALS, high_bits))
    opened = image_set.open_image_set("fakes", twelve, with_labels=False)
    assert "0:4095 becomes 0:255" in " ".join(opened.notes)
    assert image_set.open_image_set("fakes", eight, with_labels=False).value_range is None


def test_count_chooses_fakes_evenly():
    (score,) = paragan.compare(REALS, FAKES, ["fd"], count=30)
    evenly = FAKES[np.linspace(0, M - 1, 30).astype(int)]
    assert score.value == paragan.compare(REALS, evenly, ["fd"])[0].value
    assert score.protocol["fakes"] == 30
    with pytest.raises(UsageError, match=r"count=61: fakes are 60 images in the array. Use count=60 or less"):
        paragan.compare(REALS, FAKES, ["fd"], count=61)


# numbers


def test_numbers_are_compared_as_they_are(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(2, 40, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    (score,) = paragan.compare(tmp_path / "x.npy", y, ["fd"])
    assert score.name == "fd_values"
    assert score.value == pytest.approx(frechet_by_scipy(x.astype(float), y.astype(float)), rel=1e-5)
    with pytest.raises(UsageError, match="reals the array are numbers and fakes the array are images"):
        paragan.compare(x, FAKES, ["fd"])
    with pytest.raises(UsageError, match=r"records are of shapes \[2\] and \[3\]"):
        paragan.compare(x, y[:, :2], ["fd"])


# cache


class CountedRows(nn.Module):
    """Mean rows; counts the images."""

    num_images = 0

    def forward(self, images):
        CountedRows.num_images += len(images)
        return images.float().mean(3).flatten(1) / 255


def test_features_are_cached_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = features.module_features("rows", CountedRows(), 8)
    monkeypatch.setattr(compare_sets, "space_from_module", lambda name, shape: rows)
    folder = write_folder(tmp_path / "fakes", FAKES, suffix=".bmp")
    for number, limit in enumerate((2**31, 0)):  # in memory, and decoded when needed
        monkeypatch.setattr(image_set, "MAX_AUTO_CACHE_BYTES", limit)
        (first,) = paragan.compare(REALS, folder, ["fd"], features="my:rows")
        CountedRows.num_images = 0
        assert paragan.compare(REALS, folder, ["fd"], features="my:rows")[0].value == first.value
        assert CountedRows.num_images <= 16  # to notice changes of the code
        Image.fromarray(FAKES[number].squeeze()).save(folder / "0009.bmp")  # of the same size
        assert paragan.compare(REALS, folder, ["fd"], features="my:rows")[0].value != first.value
    assert (result_cache.cache_dir() / "references").is_dir()


def test_a_zip_has_the_cache_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(image_set, "MAX_AUTO_CACHE_BYTES", 0)
    folder = write_folder(tmp_path / "a", FAKES)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, file.name)
    keys = {
        image_set.read_image_set(image_set.open_image_set("fakes", path, False), 8, 1, "").cache_key
        for path in (folder, tmp_path / "a.zip")
    }
    assert len(keys) == 1
