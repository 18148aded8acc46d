"""Stats of real images without a pass over them: from the cache, or from a file of statistics.

    reals = compute_feature_stats(images, ..., data_digest=digest)     # uses `cached_reference`
    reals = load_reference_stats("stats.npz", space)                   # `mu` and `sigma`

The cache holds Gaussians (safetensors) and features (npy, of which each rank reads its rows). The key is a digest of
the images, the space and the options of the pass; of a space of user code also of the features of a few images, since
its code may change. All ranks use a cached result, or all compute it again. Raw pixels
and arrays are not cached where computing them again is fast.
"""

import contextlib
import hashlib
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import nn

from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize
from paragan.eval import result_cache
from paragan.eval.accumulators import Accumulator, ClassGaussianAcc, FeatureAcc, FeaturePass, GaussianAcc
from paragan.eval.feature_stats import FeatureStats, ImageArray, LabelsFn, array_sampler, extract
from paragan.eval.features import FeatureSpace
from paragan.eval.frechet import Gaussian
from paragan.eval.sharding import FeatureShard, ReduceGroup, all_ranks

CACHE_FOLDER = "references"
FORMAT_VERSION = 1  # rises when the results of a pass change
WINDOW_ROWS = 8192  # rows of features written at a time
NUM_PROBE_IMAGES = 4
UNNAMED_SPACE = "stats"  # of a file of statistics that does not name its space
CHEAP_PRODUCTS = 10**10  # products of a covariance that are not worth caching


def cached_reference(
    images: ImageArray,
    feature_pass: FeaturePass,
    accumulators: Sequence[Accumulator],
    group: ReduceGroup,
    data_digest: str,
    labels: LabelsFn | None = None,
) -> FeatureStats:
    """Return the stats of all of `images`: results from the cache, and the others computed now and cached.

    Every rank calls this; a result that one rank cannot read is computed again by all.

    Args:
        images: uint8 [N, H, W, C].
        feature_pass: Space, number of images, block size and device.
        accumulators: What to collect.
        group: All ranks.
        data_digest: Digest of images and labels.
        labels: Labels of a range of indices, if an accumulator needs them.
    """
    shape = tuple(images.shape[1:]) if feature_pass.space.array_shape else (images.shape[3], *images.shape[1:3])
    space_digest = _probe_space(images, feature_pass) if feature_pass.space.is_user_code else ""
    files = {
        accumulator: _cache_file(accumulator, feature_pass, data_digest + space_digest, shape)
        for accumulator in accumulators
        if _is_cacheable(accumulator, feature_pass)
    }
    results: dict[Accumulator, Any] = {}
    for accumulator, file in files.items():
        cached = _read_cached(accumulator, file, feature_pass, group)
        if all_ranks(group, cached is not None):
            results[accumulator] = cached
    missing = [accumulator for accumulator in accumulators if accumulator not in results]
    if missing:
        computed = extract(array_sampler(images, feature_pass.space), feature_pass, missing, group, labels)
        results |= computed.results
        for accumulator in missing:
            if accumulator in files:
                _write_cache(results[accumulator], files[accumulator], group)
    return FeatureStats(feature_pass.space, shape, feature_pass.count, results)


def _probe_space(images: ImageArray, feature_pass: FeaturePass) -> str:
    """Return a digest of the features of the first images."""
    rows = range(min(NUM_PROBE_IMAGES, feature_pass.count))
    features = feature_pass.space(array_sampler(images, feature_pass.space)(rows).to(feature_pass.device))
    return hashlib.sha256(features.cpu().numpy().tobytes()).hexdigest()[:16]


def _is_cacheable(accumulator: Accumulator, feature_pass: FeaturePass) -> bool:
    if not accumulator.name:
        return False
    if not feature_pass.space.is_raw:
        return True
    num_products = feature_pass.count * feature_pass.space.num_features**2
    return isinstance(accumulator, GaussianAcc) and num_products > CHEAP_PRODUCTS


def _cache_file(accumulator: Accumulator, feature_pass: FeaturePass, data_digest: str, shape: tuple[int, ...]) -> Path:
    space = [feature_pass.space.name, feature_pass.space.hash, feature_pass.space.resizer]
    text = json.dumps(
        [FORMAT_VERSION, data_digest, feature_pass.count, shape, accumulator.name, feature_pass.classes, *space]
    )
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    suffix = "npy" if isinstance(accumulator, FeatureAcc) else "safetensors"
    return result_cache.cache_dir() / CACHE_FOLDER / f"{key}.{suffix}"


def _read_cached(accumulator: Accumulator, file: Path, feature_pass: FeaturePass, group: ReduceGroup) -> Any:
    """Return the result in a file; None if the file is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, SafetensorError):
        if isinstance(accumulator, FeatureAcc):
            rows = np.load(file, mmap_mode="r", allow_pickle=False)
            if rows.shape != (feature_pass.count, feature_pass.space.num_features) or rows.dtype != np.float32:
                return None
            empty = torch.zeros(0, device=feature_pass.device)
            indices = FeatureShard(empty, feature_pass.count, feature_pass.block_size).rows(group).cpu().numpy()
            local = torch.from_numpy(np.ascontiguousarray(rows[indices])).to(feature_pass.device)
            result_cache.touch(file)
            return FeatureShard(local, feature_pass.count, feature_pass.block_size)
        gaussians = _unpack_gaussians(safetensors.torch.load_file(file), feature_pass)
        result_cache.touch(file)
        return gaussians if isinstance(accumulator, ClassGaussianAcc) else gaussians[0]
    return None


def _unpack_gaussians(tensors: dict[str, torch.Tensor], feature_pass: FeaturePass) -> list[Gaussian | None]:
    counts, means, covariances = (tensors[name].to(feature_pass.device) for name in ("count", "mean", "covariance"))
    parts = zip(counts.tolist(), means, covariances, strict=True)
    return [Gaussian(count, mean, covariance) if count else None for count, mean, covariance in parts]


def _write_cache(result: Any, file: Path, group: ReduceGroup) -> None:
    if isinstance(result, FeatureShard):
        _write_feature_cache(result, file, group)
    elif group.rank == 0:
        results: list[Gaussian | None] = result if isinstance(result, list) else [result]
        size = len(next(gaussian for gaussian in results if gaussian).mean) if any(results) else 0
        missing = Gaussian(0, torch.zeros(size).double(), torch.zeros(size, size).double())
        gaussians = [gaussian or missing for gaussian in results]
        tensors = {
            "count": torch.tensor([gaussian.count for gaussian in gaussians]),
            "mean": torch.stack([gaussian.mean.cpu() for gaussian in gaussians]),
            "covariance": torch.stack([gaussian.covariance.cpu() for gaussian in gaussians]),
        }
        result_cache.store(file, lambda path: safetensors.torch.save_file(tensors, path))


def _write_feature_cache(shard: FeatureShard, file: Path, group: ReduceGroup) -> None:
    """Write features window by window, so that no rank holds all. All ranks gather, even if rank 0 cannot write."""
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


NPZ_ERRORS = (  # raised for files that are no npz, or damaged
    *(OSError, ValueError, TypeError, EOFError, KeyError, RuntimeError, MemoryError),  # MemoryError: wrong sizes
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)


def is_reference_stats(path: str | Path) -> bool:
    """Return whether a file is an npz with `mu` and `sigma`, and without images."""
    file = Path(path).expanduser()
    if file.suffix.lower() != ".npz" or not file.is_file():
        return False
    with contextlib.suppress(*NPZ_ERRORS), zipfile.ZipFile(file) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
        return {"mu", "sigma"} <= names and names.isdisjoint({"images", "x", "arr_0"})
    return False


def recorded_space(path: str | Path, field: str = "reference") -> FeatureSpace:
    """Return the space of an npz with `mu` and `sigma`, without its network.

    It is called "stats" if the file does not name it, as those of pytorch-fid and clean-fid do not.

    Args:
        path: The file.
        field: What messages call it.

    Raises:
        UsageError: The file is missing or no such file.
    """
    file = Path(path).expanduser()
    arrays = _read_arrays(file, field)
    if arrays["mu"].ndim != 1 or not arrays["mu"].size:
        raise UsageError(f"{field}={file}: mu is {list(arrays['mu'].shape)}. Use a file with mu [F] and sigma [F, F]")
    name, digest, resizer = (str(arrays.get(key, "")) for key in ("space", "space_hash", "resizer"))
    if not (digest and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name)):
        name = UNNAMED_SPACE
        digest = ""
    return FeatureSpace(name, digest, len(arrays["mu"]), _raise_no_network, resizer=resizer or "unknown")


def _raise_no_network() -> nn.Module:
    raise UsageError("space: a file of statistics holds no network. Use named_space")


def load_reference_stats(
    path: str | Path, space: FeatureSpace, device: torch.device | str = "cpu", field: str = "reference"
) -> FeatureStats:
    """Return the Gaussian in an npz with `mu` [F] and `sigma` [F, F], as of pytorch-fid, TTUR or `paragan data stats`.

    Args:
        path: The file.
        space: Feature space that its statistics must be of.
        device: Where to put them.
        field: What messages call the file.

    Raises:
        UsageError: The file is missing or no such file, or is of another size or another space.
    """
    file = Path(path).expanduser()
    arrays = _read_arrays(file, field)
    _check_arrays(arrays, file, space, field)
    mean, covariance = (torch.from_numpy(arrays[name].astype(np.float64)).to(device) for name in ("mu", "sigma"))
    try:
        count = int(arrays.get("count", 0))
        image_shape = tuple(int(n) for n in arrays.get("image", ()))
    except (ValueError, TypeError, OverflowError) as error:
        raise UsageError(
            f"{field}={file}: count must be an integer and image several. Use a file without them"
        ) from error
    if "count" in arrays and count < 2:
        raise UsageError(f"{field}={file}: count={count} must be 2 or more. Use a file without count if it is unknown")
    digest = hashlib.sha256(arrays["mu"].tobytes() + arrays["sigma"].tobytes()).hexdigest()[:16]
    gaussian = Gaussian(count or len(mean) + 1, mean, covariance)  # if the count is unknown: full rank
    return FeatureStats(space, image_shape, count, {GaussianAcc(): gaussian}, f"{file.name} {digest}")


def check_image_shape(stats: FeatureStats, path: str | Path, shape: tuple[int, ...], field: str = "reference") -> None:
    """Raise `UsageError` if statistics are of images of another shape than [C, H, W]; `()` stands for an unknown one.

    Args:
        stats: Statistics of the file.
        path: The file.
        shape: Shape of the images that they are compared with, [C, H, W].
        field: What messages call the file.
    """
    if shape and stats.image_shape and stats.image_shape != shape:
        channels, height, width = shape
        raise UsageError(
            f"{field}={path}: is of images {list(stats.image_shape)}, and the others are {list(shape)}. Use "
            f"`paragan data stats PATH --out {path} --resolution {ImageSize(width, height).resolution} "
            f"--channels {channels}`"
        )


def _read_arrays(file: Path, field: str) -> dict[str, np.ndarray]:
    """Read the arrays of a file of statistics, which has `mu` and `sigma` at least."""
    names = ("mu", "sigma", "count", "space", "space_hash", "resizer", "image")
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in names if name in stored}
    except FileNotFoundError as error:
        raise UsageError(
            f"{field}={file}: does not exist. Use `paragan data stats PATH --out {file}` to write it"
        ) from error
    except NPZ_ERRORS as error:
        raise UsageError(
            f"{field}={file}: is no complete npz of plain arrays (pickles are refused, because they can run code). "
            f"Use `paragan data stats PATH --out {file}` to write one"
        ) from error
    missing = [name for name in ("mu", "sigma") if name not in arrays]
    if missing:
        raise UsageError(f"{field}={file}: has no {' and no '.join(missing)}. Use a file with mu [F] and sigma [F, F]")
    return arrays


def _check_arrays(arrays: dict[str, np.ndarray], file: Path, space: FeatureSpace, field: str) -> None:
    mu = arrays["mu"]
    sigma = arrays["sigma"]
    size = space.num_features
    if mu.shape != (size,) or sigma.shape != (size, size):
        shapes = f"mu {list(mu.shape)} and sigma {list(sigma.shape)}"
        raise UsageError(
            f"{field}={file}: has {shapes}, but the space {space.name} has {size} features. Use a file of this space"
        )
    floats = mu.dtype.kind == sigma.dtype.kind == "f" and max(mu.itemsize, sigma.itemsize) <= 8
    if not floats or not (np.isfinite(mu).all() and np.isfinite(sigma).all()):
        raise UsageError(f"{field}={file}: has numbers that are not finite. Use finite float32 or float64 arrays")
    if not np.allclose(sigma, sigma.T, rtol=1e-4, atol=1e-6 * max(np.abs(sigma).max(), 1e-30)):
        raise UsageError(f"{field}={file}: sigma is not symmetric. Use a covariance matrix")
    eigenvalues = np.linalg.eigvalsh(sigma.astype(np.float64))
    if eigenvalues[0] < -1e-6 * max(eigenvalues[-1], 0):
        raise UsageError(f"{field}={file}: sigma has negative variances. Use a covariance matrix")
    if "space_hash" in arrays and space.hash and str(arrays["space_hash"]) != space.hash:
        raise UsageError(f"{field}={file}: is of another space than this {space.name}. Compute it again")
