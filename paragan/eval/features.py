"""Feature spaces: what a score sees of an image.

    space = by_name("pixels", resolution=32, channels=3)
    space(images)                        # uint8 [N, 3, 32, 32] -> float32 [N, 3072]

A space is a description; its network is built when it is first used, so that one can be named, refused or
written into a record at no cost. Its name and hash are part of every score's protocol.
"""

import copy
import difflib
import hashlib
import importlib
import math
import os
import pickle
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragan.core.devices import backend_of
from paragan.core.errors import UsageError
from paragan.eval import inception as network
from paragan.eval import result_cache

INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
INCEPTION_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{INCEPTION_FILE}"
INCEPTION_SHA256 = "6726825d"  # how the file's digest starts
SPACE_NAMES = ("pixels", "inception", "values")
CUSTOM_SPACES = ("resnet20", "module:callable")  # that need more than a name: see classifier and `from_module`


def _identity(images: Tensor) -> Tensor:
    return images


@dataclass(frozen=True)
class FeatureSpace:
    """A named map from images (or records of numbers) to vectors, uint8 [N, C, H, W] -> float32 [N, num_features].

    `build` makes the module that does it. A module that also classifies has `logits(features) -> [N,
    num_logits]`; `num_logits` is 0 where there is none, and `classes` names what it tells apart where these are the
    classes of the data. `resizer` says how images reach the module's own resolution, `seen` does that much of it
    which leaves uint8 images. `plain` are features that are the numbers of the image, `notes` go with every score.
    """

    name: str
    hash: str
    num_features: int
    build: Callable[[], nn.Module] = field(repr=False, compare=False)
    num_logits: int = 0
    resizer: str = "none"
    array_shape: tuple[int, ...] = ()  # of what it takes, float32 [N, *shape], where that is no image
    classes: tuple[str, ...] = ()
    is_raw: bool = False
    preprocess: Callable[[Tensor], Tensor] = field(default=_identity, repr=False, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_inception(self) -> bool:
        """Whether this is the Inception of 2015-12-05: only there is a Fréchet distance called FID."""
        return self.name == "inception" and self.hash.startswith(INCEPTION_SHA256)

    @cached_property
    def module(self) -> nn.Module:
        """The network, built once, in evaluation mode and without gradients."""
        return self.build().eval().requires_grad_(False)

    def __call__(self, images: Tensor) -> Tensor:
        """Features, on the images' device.

        Autocast and TF32 are off, so that a score does not depend on how one trains. Raises `Unusable` where
        the module returns another shape than the space states.
        """
        device = images.device
        module = self.module.to(device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False), backend_of(device).full_precision_convs():
            features = module(images).float()
        if features.shape != (len(images), self.num_features):
            stated = f"[{len(images)}, {self.num_features}]"
            raise UsageError(f"space: {self.name} gave features {list(features.shape)} where {stated} was stated")
        return features

    def logits(self, features: Tensor) -> Tensor:
        """Class logits [N, num_logits] of features [N, num_features], only where `num_logits` is not 0."""
        with torch.no_grad():
            return self.module.to(features.device).logits(features)  # pyright: ignore[reportCallIssue]


def named_space(name: str, resolution: int, channels: int, path: str | Path | None = None) -> FeatureSpace:
    """The space a user names: `pixels`, or `inception` with its weights at `path`.

    `resolution` in pixels, of square images. Raises `Unusable` for another name, and for `inception` where
    its file is missing or not the one of 2015-12-05.
    """
    if name not in SPACE_NAMES:
        known = (*SPACE_NAMES, *CUSTOM_SPACES)
        raise UsageError(f"space: {name!r} is none of {', '.join(known)}; did you mean {closest_name(name, known)}?")
    if name == "values":
        raise UsageError("space: values is of numbers, and these are images: use pixels")
    return pixels(resolution, channels) if name == "pixels" else inception_2015(path)


def closest_name(name: str, names: Iterable[str]) -> str:
    """The one of `names` that was meant, if any: one that starts so, else the most similar."""
    name, names = name.lower(), list(names)
    starts = [other for other in names if other.startswith(name)]
    return (starts or difflib.get_close_matches(name, names, n=1, cutoff=0))[0]


# pixels -----------------------------------------------------------------------------------------------------


def pixels(resolution: int, channels: int) -> FeatureSpace:
    """The images themselves, scaled to [0, 1] and flattened, at their own resolution: needs no weights."""
    shape = (channels, resolution, resolution)
    described = f"pixels / 255, {shape}"
    digest, number = _sha256(described.encode()), channels * resolution**2
    return FeatureSpace("pixels", digest, number, partial(RawPixels, shape), is_raw=True)


class RawPixels(nn.Module):
    def __init__(self, shape: tuple[int, int, int]):
        super().__init__()
        self.shape = shape
        self.num_features = shape[0] * shape[1] * shape[2]

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[1:]) != self.shape:
            raise UsageError(f"space: these pixels are {self.shape}, the images {tuple(images.shape[1:])}")
        return images.flatten(1).float() / 255


def raw_values(shape: tuple[int, ...]) -> FeatureSpace:
    """Records of numbers, float32 [N, *shape], flattened and otherwise as they are."""
    described = f"values, {shape}"
    return FeatureSpace(
        "values", _sha256(described.encode()), math.prod(shape), nn.Flatten, array_shape=shape, is_raw=True
    )


# one's own --------------------------------------------------------------------------------------------------


def module_features(name: str, module: nn.Module, num_features: int, *, num_logits: int = 0) -> FeatureSpace:
    """Any module that maps uint8 [N, C, H, W] to [N, num_features]; scores are called `fd_<name>` and so on.

    The module is copied, so training it further does not change the space. With `num_logits`, it has a method
    `logits(features) -> [N, num_logits]`. Raises `Unusable` for a name that is taken or has odd characters.
    """
    frozen = copy.deepcopy(module)
    return FeatureSpace(_check_custom_name(name), state_hash(frozen), num_features, lambda: frozen, num_logits)


def space_from_module(name: str, shape: tuple[int, ...]) -> FeatureSpace:
    """The space of a user's code, `module:callable`, found from where the command is given: a module like those of
    `module_features`, or what makes one. It is tried on two images of `shape` [C, H, W]; the space has its name.

    Raises `Unusable` where it cannot be imported, made or used.
    """
    path, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(path), attribute)
        module = made if isinstance(made, nn.Module) else made()
        device = next(module.parameters(), torch.zeros(0)).device
        with torch.no_grad():
            seen = module.eval()(torch.zeros(2, *shape, dtype=torch.uint8, device=device))
            classify: Any = getattr(module, "logits", None)
            logits = classify(seen).shape[1] if classify else 0
    except (Exception, SystemExit) as error:  # whatever a module may do
        what = "a network from uint8 [N, C, H, W] to features [N, F], or what makes one"
        raise UsageError(f"space: {name}: {type(error).__name__}: {error} (it should be {what})") from error
    if not isinstance(seen, Tensor) or seen.ndim != 2 or len(seen) != 2:
        found = list(seen.shape) if isinstance(seen, Tensor) else type(seen).__name__
        raise UsageError(f"space: {name} makes {found} of 2 images, wanted [2, F]")
    return module_features(attribute.rpartition(".")[2], module, seen.shape[1], num_logits=logits)


def state_hash(module: nn.Module) -> str:
    """Digest of a module's class, and of the names and values of its state."""
    digest = hashlib.sha256(type(module).__qualname__.encode())
    for key, value in sorted(module.state_dict().items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_custom_name(name: str) -> str:
    if name in (*SPACE_NAMES, "fid") or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise UsageError(f"space: {name!r} is taken, or not of letters, digits, - and _; one that works: my-classifier")
    return name


# Inception --------------------------------------------------------------------------------------------------


def inception_path() -> Path:
    """Where the Inception file is looked for when no path is given."""
    return result_cache.cache_dir() / INCEPTION_FILE


def inception_2015(path: str | Path | None = None, *, name: str = "inception", download: bool = False) -> FeatureSpace:
    """The Inception of 2015-12-05, its weights in pytorch-fid's file; refused if the file is another.

    With a `name` of your own, any weights of the same network will do: then nothing is checked but names and
    shapes, and what is measured in the space is not called FID. Nothing is fetched unless `download` asks for
    it.

    Raises `Unusable` where the file is missing, has another digest, or cannot be fetched.
    """
    file = inception_path() if path is None else Path(path).expanduser()
    if download and not file.is_file():
        download_inception(file)
    if not file.is_file():
        raise UsageError(
            f"inception: missing {inception_source(file)}; put it there, or name its place with --inception PATH; "
            "without it, fd works in the run's own feature space"
        )
    digest = _file_sha256(file)
    if name == "inception":
        _check_digest(file, digest)
    return FeatureSpace(
        name if name == "inception" else _check_custom_name(name),
        digest[:16],
        network.NUM_FEATURES,
        partial(_load_inception, file),
        num_logits=network.NUM_LOGITS,
        resizer=f"tf1-bilinear-{network.INPUT_SIDE}",
    )


def inception_source(file: Path) -> str:
    """Where the Inception file is kept, and how to come by it."""
    return f"{file}, from {INCEPTION_URL} (its sha256 starts with {INCEPTION_SHA256})"


def download_inception(file: Path, url: str = INCEPTION_URL, timeout_s: float = 60) -> None:
    """Download the Inception file, 91 MB, to `file`: complete and with the right digest, or not at all.

    `timeout_s` bounds each wait for data. Raises `Unusable` where the address cannot be read or holds another
    file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as remote, partial_file.open("wb") as target:
            shutil.copyfileobj(remote, target)
        _check_digest(file, _file_sha256(partial_file))
        partial_file.replace(file)
    except OSError as error:
        raise UsageError(f"inception: cannot fetch {url} ({error}); the file belongs at {file}") from error
    finally:
        partial_file.unlink(missing_ok=True)


def _check_digest(file: Path, digest: str) -> None:
    if not digest.startswith(INCEPTION_SHA256):
        raise UsageError(
            f"inception: {file} is not the network of 2015-12-05: its sha256 starts with {digest[:8]}, not "
            f"{INCEPTION_SHA256}; fetch {INCEPTION_URL}, or give these weights a name of their own"
        )


def _load_inception(file: Path) -> nn.Module:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UsageError(f"inception: {file} holds no weights that can be read safely") from error
    return network.load_inception(state)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
