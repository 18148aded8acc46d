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

from paragan.core.errors import Unusable
from paragan.eval import result_cache
from paragan.eval.accumulators import Features, Look, OfAll, OfClasses, Reading
from paragan.eval.feature_stats import LabelsOf, Rows, Summary, look, rows_of
from paragan.eval.features import FeatureSpace
from paragan.eval.frechet import Gaussian
from paragan.eval.sharding import Share, Summing, everywhere

KIND = "references"
VERSION = 1  # of how images are seen
WINDOW = 8192  # rows of features that are written at a time
QUICK = 10**10  # products that are summed in no time


def referenced(
    images: Rows, how: Look, readings: Sequence[Reading], group: Summing, known_as: str, labels: LabelsOf | None = None
) -> Summary:
    """A summary of all of `images`: what was kept of it, and the rest seen now and kept. known_as: a digest of
    images and labels. Every rank calls this; what one rank lacks is seen again by all."""
    shape = tuple(images.shape[1:]) if how.space.shape else (images.shape[3], *images.shape[1:3])
    files = {reading: _file(reading, how, known_as, shape) for reading in readings if _is_kept(reading, how)}
    found: dict[Reading, Any] = {}
    for reading, file in files.items():
        had = _read(reading, file, how, group)
        if everywhere(group, had is not None):
            found[reading] = had
    missing = [reading for reading in readings if reading not in found]
    if missing:
        seen = look(rows_of(images, how.space), how, missing, group, labels)
        found |= seen.kept
        for reading in (reading for reading in missing if reading in files):
            _keep(found[reading], files[reading], group)
    return Summary(how.space, shape, how.count, found)


def _is_kept(reading: Reading, how: Look) -> bool:
    if not isinstance(reading, OfAll | OfClasses | Features):
        return False
    return not how.space.plain or (isinstance(reading, OfAll) and how.count * how.space.num_features**2 > QUICK)


def _file(reading: Reading, how: Look, known_as: str, shape: tuple[int, ...]) -> Path:
    space = [how.space.name, how.space.hash, how.space.resizer]
    told = json.dumps([VERSION, known_as, how.count, shape, reading.name, how.classes, *space])
    key = hashlib.sha256(told.encode()).hexdigest()[:24]
    return result_cache.folder() / KIND / f"{key}.{'npy' if isinstance(reading, Features) else 'safetensors'}"


def _read(reading: Reading, file: Path, how: Look, group: Summing) -> Any:
    """What is in a file, or None where it is not there, or damaged."""
    with contextlib.suppress(OSError, ValueError, KeyError, EOFError, SafetensorError):
        if isinstance(reading, Features):
            rows = np.load(file, mmap_mode="r", allow_pickle=False)
            if rows.shape != (how.count, how.space.num_features) or rows.dtype != np.float32:
                return None
            share = Share(torch.zeros(0, device=how.device), how.count, how.block)
            own = torch.from_numpy(np.ascontiguousarray(rows[share.rows(group).cpu().numpy()])).to(how.device)
            result_cache.used(file)
            return Share(own, how.count, how.block)
        several = _gaussians(safetensors.torch.load_file(file), how)
        result_cache.used(file)
        return several if isinstance(reading, OfClasses) else several[0]
    return None


def _gaussians(tensors: dict[str, torch.Tensor], how: Look) -> list[Gaussian | None]:
    counts, means, covariances = (tensors[name].to(how.device) for name in ("count", "mean", "covariance"))
    parts = zip(counts.tolist(), means, covariances, strict=True)
    return [Gaussian(count, mean, covariance) if count else None for count, mean, covariance in parts]


def _keep(found: Any, file: Path, group: Summing) -> None:
    if isinstance(found, Share):
        _keep_features(found, file, group)
    elif group.rank == 0:
        several: list[Gaussian | None] = found if isinstance(found, list) else [found]
        size = len(next(one for one in several if one).mean) if any(several) else 0
        nothing = Gaussian(0, torch.zeros(size).double(), torch.zeros(size, size).double())
        whole = [one or nothing for one in several]
        tensors = {
            "count": torch.tensor([one.count for one in whole]),
            "mean": torch.stack([one.mean.cpu() for one in whole]),
            "covariance": torch.stack([one.covariance.cpu() for one in whole]),
        }
        result_cache.put(file, lambda aside: safetensors.torch.save_file(tensors, aside))


def _keep_features(found: Share, file: Path, group: Summing) -> None:
    """Window by window: no rank ever has all of them. All ranks walk, whatever befalls the one that writes."""
    shape = (found.count, found.own.shape[1])
    if 4 * shape[0] * shape[1] > result_cache.MOST_BYTES:
        return
    windows = found.windows(group, WINDOW)

    def write(aside: Path) -> None:
        with aside.open("wb") as target:
            header = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(target, header)
            for _, rows in windows:
                target.write(rows.cpu().numpy().astype("<f4").tobytes())

    if group.rank == 0:
        result_cache.put(file, write)
    for _ in windows:
        pass


# from a file ------------------------------------------------------------------------------------------------


UNREADABLE = (  # what is raised for files that are no npz, or damaged
    *(OSError, ValueError, TypeError, EOFError, KeyError, RuntimeError, MemoryError),  # the last of sizes that lie
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)


def from_file(path: str | Path, space: FeatureSpace, device: torch.device | str = "cpu") -> Summary:
    """The Gaussian in an npz with `mu` [F] and `sigma` [F, F], as pytorch-fid, TTUR and `paragan data stats` write
    it. Raises `Unusable` for another file, another size, and another space where the file names one."""
    file = Path(path).expanduser()
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ("mu", "sigma", "count", "space_hash", "image") if name in stored}
    except FileNotFoundError as error:
        raise Unusable(
            f"reference: {file} does not exist; `paragan data stats PATH --out {file}` writes one"
        ) from error
    except UNREADABLE as error:
        raise Unusable(
            f"reference: {file} is no npz of plain arrays, or not a whole one (pickles are refused: they can run code)"
        ) from error
    _check(arrays, file, space)
    mean, covariance = (torch.from_numpy(arrays[name].astype(np.float64)).to(device) for name in ("mu", "sigma"))
    try:
        count, image = int(arrays.get("count", 0)), tuple(int(n) for n in arrays.get("image", ()))
    except (ValueError, TypeError, OverflowError) as error:
        raise Unusable(f"reference: count or image in {file} is no whole number, nor several: leave it out") from error
    if "count" in arrays and count < 2:
        raise Unusable(f"reference: count={count} in {file} must be 2 or more: leave it out where it is not known")
    digest = hashlib.sha256(arrays["mu"].tobytes() + arrays["sigma"].tobytes()).hexdigest()[:16]
    gaussian = Gaussian(count or len(mean) + 1, mean, covariance)  # of an unknown number: full rank
    return Summary(space, image, count, {OfAll(): gaussian}, f"{file.name} {digest}")


def _check(arrays: dict[str, np.ndarray], file: Path, space: FeatureSpace) -> None:
    missing = [name for name in ("mu", "sigma") if name not in arrays]
    if missing:
        raise Unusable(f"reference: {file} has no {' and no '.join(missing)}: want mu [F] and sigma [F, F]")
    mu, sigma, size = arrays["mu"], arrays["sigma"], space.num_features
    if mu.shape != (size,) or sigma.shape != (size, size):
        found = f"mu {list(mu.shape)} and sigma {list(sigma.shape)}"
        raise Unusable(f"reference: {file} has {found}, and {space.name} has {size} features: another space?")
    floats = mu.dtype.kind == sigma.dtype.kind == "f" and max(mu.itemsize, sigma.itemsize) <= 8
    if not floats or not (np.isfinite(mu).all() and np.isfinite(sigma).all()):
        raise Unusable(f"reference: {file} holds numbers that are not finite, or not floats of at most 8 bytes")
    if not np.allclose(sigma, sigma.T, rtol=1e-4, atol=1e-6 * max(np.abs(sigma).max(), 1e-30)):
        raise Unusable(f"reference: sigma in {file} is not symmetric: it is no covariance")
    roots = np.linalg.eigvalsh(sigma.astype(np.float64))
    if roots[0] < -1e-6 * max(roots[-1], 0):
        raise Unusable(f"reference: sigma in {file} has negative variances: it is no covariance")
    if "space_hash" in arrays and space.hash and str(arrays["space_hash"]) != space.hash:
        raise Unusable(f"reference: {file} was measured in another space than this {space.name}: make it again")
