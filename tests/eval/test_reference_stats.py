import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from advice import advises
from paragan.core.errors import UsageError
from paragan.eval import (
    ClassLabels,
    FeatureSpace,
    compute_feature_stats,
    evaluate,
    load_reference_stats,
    module_features,
    named_space,
    pixels,
    result_cache,
)
from paragan.eval.accumulators import ClassGaussianAcc, FeatureAcc, GaussianAcc
from paragan.eval.features import INCEPTION_SHA256
from paragan.eval.reference_stats import NUM_PROBE_IMAGES, recorded_space
from processes import run_cli

PIXELS = pixels(8, 1)
EVERYTHING = ["fd", "kid", "intra_fd"]


class Rows(nn.Module):
    """Return the mean rows of images, and count the images."""

    num_probed = 0
    scale = 1.0

    def forward(self, images):
        type(self).num_probed += len(images) > NUM_PROBE_IMAGES
        return self.scale * images.float().mean(3).flatten(1) / 255


@pytest.fixture
def cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "paragan" / "references"


@pytest.fixture
def space():
    return module_features("rows", Rows(), 8)


def labelled(digits):
    return ClassLabels(("even", "odd"), np.arange(len(digits)) % 2)


def test_features_of_reals_are_computed_once(cache_folder, digits, space):
    options = {"space": space, "metrics": EVERYTHING, "labels": labelled(digits)}
    plain, first = (
        compute_feature_stats(digits, **options),
        compute_feature_stats(digits, data_digest="digits", **options),
    )
    Rows.num_probed = 0
    repeated = compute_feature_stats(digits, data_digest="digits", **options)
    assert Rows.num_probed == 0
    assert len(list(cache_folder.iterdir())) == 3
    for result in (first, repeated):
        assert (result.image_shape, result.count) == (plain.image_shape, plain.count) == ((1, 8, 8), 1797)
        assert torch.equal(result.get(GaussianAcc()).covariance, plain.get(GaussianAcc()).covariance)
        assert torch.equal(result.get(FeatureAcc()).local, plain.get(FeatureAcc()).local)
        assert [g.count for g in result.get(ClassGaussianAcc())] == [899, 898]
    compute_feature_stats(digits, data_digest="others", **options)
    assert Rows.num_probed > 0


def test_changed_code_of_a_space_is_computed_again(cache_folder, digits, space, monkeypatch):
    options = {"space": space, "metrics": ["fd", "kid"], "data_digest": "digits"}
    first = compute_feature_stats(digits, **options)
    monkeypatch.setattr(Rows, "scale", 2.0)
    changed = compute_feature_stats(digits, **options)
    assert torch.equal(changed.get(FeatureAcc()).local, 2 * first.get(FeatureAcc()).local)
    torch.testing.assert_close(changed.get(GaussianAcc()).mean, 2 * first.get(GaussianAcc()).mean)


def test_cache_serves_any_number_of_ranks(cache_folder, on_ranks, digits, blurred, space):
    def scores(group):
        reals = compute_feature_stats(
            digits, space=space, metrics=["fd", "kid"], data_digest="digits", group=group, batch=50
        )
        options = {"space": space, "metrics": ["fd", "kid"], "count": 200, "batch": 50, "group": group}
        return [score.value for score in evaluate(blurred, reals, **options)]

    first = on_ranks(3, scores)
    Rows.num_probed = 0
    repeated = on_ranks(2, scores)
    assert Rows.num_probed == 4  # for the fakes alone
    assert repeated[0] == repeated[1] == pytest.approx(first[0], rel=1e-9)


def test_damaged_cache_is_computed_again(cache_folder, digits, space):
    options = {"space": space, "metrics": ["fd", "kid"], "data_digest": "digits"}
    first = compute_feature_stats(digits, **options)
    for file in cache_folder.iterdir():
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    Rows.num_probed = 0
    repeated = compute_feature_stats(digits, **options)
    assert Rows.num_probed > 0
    assert torch.equal(repeated.get(GaussianAcc()).covariance, first.get(GaussianAcc()).covariance)


def test_cheap_results_are_not_cached(cache_folder, digits):
    compute_feature_stats(digits, space=PIXELS, metrics=["fd", "kid"], data_digest="digits")
    assert not cache_folder.exists()


def test_cache_is_bounded_and_evicts_the_least_recently_used(tmp_path):
    for name in "abc":
        result_cache.store(tmp_path / name, lambda aside: aside.write_bytes(bytes(10)), max_bytes=10**3)
        result_cache.os.utime(tmp_path / name, ns=(0, ord(name)))
    result_cache.touch(tmp_path / "a")
    result_cache.store(tmp_path / "d", lambda aside: aside.write_bytes(bytes(10)), max_bytes=25)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "d"]


def test_unwritable_cache_is_ignored(tmp_path):
    (tmp_path / "file").write_text("")
    result_cache.store(tmp_path / "file" / "x", lambda aside: aside.write_bytes(b""))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_cache_with_concurrent_writers(tmp_path):
    def retain(number):  # of which there is room for two
        result_cache.store(tmp_path / str(number % 5), lambda aside: aside.write_bytes(bytes(10)), max_bytes=20)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(retain, range(300)))
    retain(0)
    assert "0" in {file.name for file in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) <= 2


def test_no_cache_without_a_home(monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    file = result_cache.cache_dir() / "profiles" / "x"
    result_cache.store(file, lambda aside: aside.write_bytes(b"x"))
    result_cache.touch(file)
    assert not file.exists()


# from a file


@pytest.fixture
def stats(tmp_path, digits):
    x = digits.reshape(len(digits), -1) / 255
    return lambda **more: saved(tmp_path / "stats.npz", **{"mu": x.mean(0), "sigma": np.cov(x, rowvar=False)} | more)


def saved(file, **arrays):
    np.savez(file, **{name: value for name, value in arrays.items() if value is not None})
    return file


def test_file_of_mu_and_sigma_replaces_the_reals(stats, digits, blurred):
    request = {"space": PIXELS, "metrics": ["fd"], "count": 100}
    (result,) = evaluate(blurred, load_reference_stats(stats(), PIXELS), **request)
    (plain,) = evaluate(blurred, digits, **request)
    assert result.value == pytest.approx(plain.value, rel=1e-5)  # pixels are float32
    assert result.protocol["reals"] is None
    assert result.protocol["data"].startswith("stats.npz ")
    assert result.fingerprint != plain.fingerprint
    known = load_reference_stats(stats(count=1797, space_hash=PIXELS.hash, image=(1, 8, 8)), PIXELS)
    assert evaluate(blurred, known, **request)[0].protocol["reals"] == 1797


def test_file_that_fits_is_used_as_advised(stats, blurred):
    file = stats()

    def load(**arrays):
        recorded_space(stats(**arrays))
        return load_reference_stats(file, PIXELS)

    with advises(f"reference={file}: mu is [8, 8]. Use a file with mu [F] and sigma [F, F]"):
        load(mu=np.zeros((8, 8)))
    with advises(f"reference={file}: has no mu. Use a file with mu [F] and sigma [F, F]"):
        load(mu=None)
    with advises("mu [3] and sigma [3, 3], but the space pixels has 64 features. Use a file of this space"):
        load(mu=np.zeros(3), sigma=np.eye(3))
    with advises("Use finite float32 or float64 arrays"):
        load(mu=np.full(64, np.nan))
    with advises(f"reference={file}: sigma is not symmetric. Use a covariance matrix"):
        load(sigma=np.arange(4096.0).reshape(64, 64))
    with advises(f"reference={file}: sigma has negative variances. Use a covariance matrix"):
        load(sigma=-np.eye(64))
    with advises("count must be an integer and image several. Use a file without them"):
        load(count="abc")
    with advises("count=-5 must be 2 or more. Use a file without count if it is unknown"):
        load(count=-5)
    assert load().count == 0
    assert load(mu=np.zeros(64, np.float32), sigma=np.eye(64, dtype=np.float32), count=9).count == 9


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"count": np.inf}, "count must be an integer"),
        ({"count": 64.0, "image": [np.inf]}, "count must be an integer"),
        ({"mu": np.full(64, "1e4000").astype(np.longdouble)}, "Use finite float32 or float64"),
        ({"mu": np.array([None] * 64)}, "pickles are refused"),
        ({"space_hash": "0" * 16}, "is of another space"),
    ],
)
def test_file_that_does_not_fit_raises(stats, arrays, message):
    with pytest.raises(UsageError, match=message):
        load_reference_stats(stats(**arrays), PIXELS)


def test_file_that_is_no_npz_raises(tmp_path):
    file = tmp_path / "x.npz"
    file.write_bytes(b"no zip")
    with advises(f"Use `paragan data stats PATH --out {file}` to write one"):
        load_reference_stats(file, PIXELS)
    file.unlink()
    with advises(f"Use `paragan data stats PATH --out {file}` to write it"):
        load_reference_stats(file, PIXELS)
    assert run_cli("data", "stats", "digits", "--out", file).status == 0
    assert load_reference_stats(file, PIXELS).count == 1797


def test_file_with_other_compression_or_wrong_sizes_raises(stats, tmp_path):
    complete, other = stats(), tmp_path / "other.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**14,)})
    with zipfile.ZipFile(other, "w") as file:
        file.writestr("mu.npy", header.getvalue())
    with pytest.raises(UsageError, match="is no complete npz of plain arrays"):
        load_reference_stats(other, PIXELS)
    with np.load(complete) as arrays, zipfile.ZipFile(other, "w", zipfile.ZIP_LZMA) as file:
        for name in ("mu", "sigma"):
            data = io.BytesIO()
            np.save(data, arrays[name])
            file.writestr(f"{name}.npy", data.getvalue())
    data = other.read_bytes()
    assert load_reference_stats(other, PIXELS).count == 0
    other.write_bytes(data[:60] + b"xxxx" + data[64:])
    with pytest.raises(UsageError, match="is no complete npz"):
        load_reference_stats(other, PIXELS)
    other.write_bytes(data.replace(bytes([63, 0, 2, 0, 14]), bytes([63, 0, 2, 0, 77])))  # a method that nobody knows
    with pytest.raises(UsageError, match="is no complete npz"):
        load_reference_stats(other, PIXELS)


def test_truncated_file_raises(stats):
    cut = stats()
    cut.write_bytes(cut.read_bytes()[:-200])
    with pytest.raises(UsageError, match="is no complete npz"):
        load_reference_stats(cut, PIXELS)


def test_metrics_that_need_features_raise_for_a_file(stats, digits, blurred):
    reference = load_reference_stats(stats(), PIXELS)
    with advises("kid or prdc needs more. Use fd, or fid if it is of Inception, or no reference"):
        evaluate(blurred, reference, space=PIXELS, metrics=["fd", "kid"], count=50)
    assert evaluate(blurred, reference, space=PIXELS, metrics=["fd"], count=50)
    assert evaluate(blurred, digits, space=PIXELS, metrics=["fd", "kid"], count=50)
    inception = FeatureSpace("inception", INCEPTION_SHA256[:16], 64, PIXELS.build)
    assert evaluate(blurred, load_reference_stats(stats(), inception), space=inception, metrics=["fid"], count=50)


def test_a_file_has_no_network(stats, digits, blurred):
    options = {"metrics": ["fd"], "count": 50}
    with advises("space: a file of statistics holds no network. Use named_space"):
        evaluate(blurred, digits, space=recorded_space(stats()), **options)
    assert evaluate(blurred, digits, space=named_space("pixels", 8, 1), **options)
