"""What is known of reals before they are looked at: statistics from a file, and those that were kept from before.

    reals = referenced(images, space=space, metrics=["fd", "kid"], known_as=digest)     # a summary, seen or kept
    reals = from_file("stats.npz", space)                                               # `mu` and `sigma`

Kept are Gaussians (safetensors) and features (npy, of which a rank reads its rows), under a digest of the images,
the space and how they were seen. Records and pixels that are quickly seen again are not.
"""

import contextlib
import hashlib
import json
import lzma
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError

from paragan.core.errors import UsageError
from paragan.eval import result_cache
from paragan.eval.accumulators import Accumulator, ClassGaussianAcc, FeatureAcc, FeaturePass, GaussianAcc
from paragan.eval.feature_stats import FeatureStats, ImageArray, LabelsFn, array_sampler, extract
from paragan.eval.features import FeatureSpace
from paragan.eval.frechet import Gaussian
from paragan.eval.sharding import FeatureShard, ReduceGroup, all_ranks

CACHE_FOLDER = "references"
FORMAT_VERSION = 1  # of how images are seen
WINDOW_ROWS = 8192  # rows of features that are written at a time
CHEAP_PRODUCTS = 10**10  # products that are summed in no time


def cached_reference(
    images: ImageArray,
    feature_pass: FeaturePass,
    accumulators: Sequence[Accumulator],
    group: ReduceGroup,
    data_digest: str,
    labels: LabelsFn | None = None,
) -> FeatureStats:
    """A summary of all of `images`: what was kept of it, and the rest seen now and kept. known_as: a digest of
    images and labels. Every rank calls this; what one rank lacks is seen again by all."""
    shape = tuple(images.shape[1:]) if feature_pass.space.array_shape else (images.shape[3], *images.shape[1:3])
    files = {
        reading: _cache_file(reading, feature_pass, data_digest, shape)
        for reading in accumulators
        if _is_cacheable(reading, feature_pass)
    }
    found: dict[Accumulator, Any] = {}
    for reading, file in files.items():
        had = _read_cached(reading, file, feature_pass, group)
        if all_ranks(group, had is not None):
            found[reading] = had
    missing = [reading for reading in accumulators if reading not in found]
    if missing:
        seen = extract(array_sampler(images, feature_pass.space), feature_pass, missing, group, labels)
        found |= seen.results
        for reading in (reading for reading in missing if reading in files):
            _write_cache(found[reading], files[reading], group)
    return FeatureStats(feature_pass.space, shape, feature_pass.count, found)


def _is_cacheable(accumulator: Accumulator, feature_pass: FeaturePass) -> bool:
    if not isinstance(accumulator, GaussianAcc | ClassGaussianAcc | FeatureAcc):
        return False
    return not feature_pass.space.is_raw or (
        isinstance(accumulator, GaussianAcc)
        and feature_pass.count * feature_pass.space.num_features**2 > CHEAP_PRODUCTS
    )


def _cache_file(accumulator: Accumulator, feature_pass: FeaturePass, data_digest: str, shape: tuple[int, ...]) -> Path:
    space = [feature_pass.space.name, feature_pass.space.hash, feature_pass.space.resizer]
    told = json.dumps(
        [FORMAT_VERSION, data_digest, feature_pass.count, shape, accumulator.name, feature_pass.classes, *space]
    )
    key = hashlib.sha256(told.encode()).hexdigest()[:24]
    return (
        result_cache.cache_dir()
        / CACHE_FOLDER
        / f"{key}.{'npy' if isinstance(accumulator, FeatureAcc) else 'safetensors'}"
    )


def _read_cached(accumulator: Accumulator, file: Path, feature_pass: FeaturePass, group: ReduceGroup) -> Any:
    """What is in a file, or None where it is not there, or damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, SafetensorError):
        if isinstance(accumulator, FeatureAcc):
            rows = np.load(file, mmap_mode="r", allow_pickle=False)
            if rows.shape != (feature_pass.count, feature_pass.space.num_features) or rows.dtype != np.float32:
                return None
            share = FeatureShard(
                torch.zeros(0, device=feature_pass.device), feature_pass.count, feature_pass.block_size
            )
            own = torch.from_numpy(np.ascontiguousarray(rows[share.rows(group).cpu().numpy()])).to(feature_pass.device)
            result_cache.touch(file)
            return FeatureShard(own, feature_pass.count, feature_pass.block_size)
        several = _unpack_gaussians(safetensors.torch.load_file(file), feature_pass)
        result_cache.touch(file)
        return several if isinstance(accumulator, ClassGaussianAcc) else several[0]
    return None


def _unpack_gaussians(tensors: dict[str, torch.Tensor], feature_pass: FeaturePass) -> list[Gaussian | None]:
    counts, means, covariances = (tensors[name].to(feature_pass.device) for name in ("count", "mean", "covariance"))
    parts = zip(counts.tolist(), means, covariances, strict=True)
    return [Gaussian(count, mean, covariance) if count else None for count, mean, covariance in parts]


def _write_cache(result: Any, file: Path, group: ReduceGroup) -> None:
    if isinstance(result, FeatureShard):
        _write_feature_cache(result, file, group)
    elif group.rank == 0:
        several: list[Gaussian | None] = result if isinstance(result, list) else [result]
        size = len(next(one for one in several if one).mean) if any(several) else 0
        nothing = Gaussian(0, torch.zeros(size).double(), torch.zeros(size, size).double())
        whole = [one or nothing for one in several]
        tensors = {
            "count": torch.tensor([one.count for one in whole]),
            "mean": torch.stack([one.mean.cpu() for one in whole]),
            "covariance": torch.stack([one.covariance.cpu() for one in whole]),
        }
        result_cache.store(file, lambda aside: safetensors.torch.save_file(tensors, aside))


def _write_feature_cache(shard: FeatureShard, file: Path, group: ReduceGroup) -> None:
    """Window by window: no rank ever has all of them. All ranks walk, whatever befalls the one that writes."""
    shape = (shard.count, shard.local.shape[1])
    if 4 * shape[0] * shape[1] > result_cache.MAX_BYTES:
        return
    windows = shard.windows(group, WINDOW_ROWS)

    def write(path: Path) -> None:
        with path.open("wb") as target:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(target, header)
            for _, rows in windows:
                target.write(rows.cpu().numpy().astype("<f4").tobytes())

    if group.rank == 0:
        result_cache.store(file, write)
    for _ in windows:
        pass


# from a file ------------------------------------------------------------------------------------------------


NPZ_ERRORS = (  # what is raised for files that are no npz, or damaged
    *(OSError, ValueError, TypeError, EOFError, KeyError, RuntimeError, MemoryError),  # the last of sizes that lie
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)


def load_reference_stats(path: str | Path, space: FeatureSpace, device: torch.device | str = "cpu") -> FeatureStats:
    """The Gaussian in an npz with `mu` [F] and `sigma` [F, F], as pytorch-fid, TTUR and `paragan data stats` write
    it. Raises `Unusable` for another file, another size, and another space where the file names one."""
    file = Path(path).expanduser()
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ("mu", "sigma", "count", "space_hash", "image") if name in stored}
    except FileNotFoundError as error:
        raise UsageError(
            f"reference: {file} does not exist; `paragan data stats PATH --out {file}` writes one"
        ) from error
    except NPZ_ERRORS as error:
        raise UsageError(
            f"reference: {file} is no npz of plain arrays, or not a whole one (pickles are refused: they can run code)"
        ) from error
    _check_arrays(arrays, file, space)
    mean, covariance = (torch.from_numpy(arrays[name].astype(np.float64)).to(device) for name in ("mu", "sigma"))
    try:
        count, image = int(arrays.get("count", 0)), tuple(int(n) for n in arrays.get("image", ()))
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"reference: count or image in {file} is no whole number, nor several: leave it out"
        ) from error
    if "count" in arrays and count < 2:
        raise UsageError(f"reference: count={count} in {file} must be 2 or more: leave it out where it is not known")
    digest = hashlib.sha256(arrays["mu"].tobytes() + arrays["sigma"].tobytes()).hexdigest()[:16]
    gaussian = Gaussian(count or len(mean) + 1, mean, covariance)  # of an unknown number: full rank
    return FeatureStats(space, image, count, {GaussianAcc(): gaussian}, f"{file.name} {digest}")


def _check_arrays(arrays: dict[str, np.ndarray], file: Path, space: FeatureSpace) -> None:
    missing = [name for name in ("mu", "sigma") if name not in arrays]
    if missing:
        raise UsageError(f"reference: {file} has no {' and no '.join(missing)}: want mu [F] and sigma [F, F]")
    mu, sigma, size = arrays["mu"], arrays["sigma"], space.num_features
    if mu.shape != (size,) or sigma.shape != (size, size):
        found = f"mu {list(mu.shape)} and sigma {list(sigma.shape)}"
        raise UsageError(f"reference: {file} has {found}, and {space.name} has {size} features: another space?")
    floats = mu.dtype.kind == sigma.dtype.kind == "f" and max(mu.itemsize, sigma.itemsize) <= 8
    if not floats or not (np.isfinite(mu).all() and np.isfinite(sigma).all()):
        raise UsageError(f"reference: {file} holds numbers that are not finite, or not floats of at most 8 bytes")
    if not np.allclose(sigma, sigma.T, rtol=1e-4, atol=1e-6 * max(np.abs(sigma).max(), 1e-30)):
        raise UsageError(f"reference: sigma in {file} is not symmetric: it is no covariance")
    roots = np.linalg.eigvalsh(sigma.astype(np.float64))
    if roots[0] < -1e-6 * max(roots[-1], 0):
        raise UsageError(f"reference: sigma in {file} has negative variances: it is no covariance")
    if "space_hash" in arrays and space.hash and str(arrays["space_hash"]) != space.hash:
        raise UsageError(f"reference: {file} was measured in another space than this {space.name}: make it again")
