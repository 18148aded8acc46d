"""Feature spaces: maps from images to the vectors that scores are computed from.

    space = named_space("pixels", resolution=32, channels=3)
    space(images)                        # uint8 [N, 3, 32, 32] -> float32 [N, 3072]

A space is a description; its network is built at first use, so naming or checking a space costs nothing. Its name and
hash are part of every score's protocol.
"""

import copy
import difflib
import hashlib
import math
import os
import pickle
import re
import shutil
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
from paragan.core.image_shape import ImageSize
from paragan.core.user_imports import import_attribute
from paragan.eval import inception as network
from paragan.eval import result_cache

INCEPTION_FILE = "pt_inception-2015-12-05-6726825d.pth"
INCEPTION_URL = f"https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/{INCEPTION_FILE}"
INCEPTION_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
SPACE_NAMES = ("pixels", "inception", "values")
CUSTOM_SPACES = ("resnet20", "module:callable")  # see `classifier_space` and `space_from_module`


def _identity(images: Tensor) -> Tensor:
    return images


@dataclass(frozen=True)
class FeatureSpace:
    """A named map from images (or records of numbers) to vectors, uint8 [N, C, H, W] -> float32 [N, num_features].

    A space with a classifier has logits: its module has a method `logits(features) -> [N, num_logits]`.
    """

    name: str
    hash: str  # of the network
    num_features: int
    build: Callable[[], nn.Module] = field(repr=False, compare=False)  # makes the network
    num_logits: int = 0  # 0: no classifier
    resizer: str = "none"  # how images are resized to the network's resolution, for the protocol
    array_shape: tuple[int, ...] = ()  # of the input float32 [N, *array_shape], if it is no image
    classes: tuple[str, ...] = ()  # names of the logits, if these are the classes of the data
    is_user_code: bool = False  # the hash is of its weights, not of what it does with them
    is_raw: bool = False  # features are the numbers of the image itself
    preprocess: Callable[[Tensor], Tensor] = field(default=_identity, repr=False, compare=False)  # uint8 -> uint8
    notes: tuple[str, ...] = field(default=(), compare=False)  # added to every score

    @property
    def is_inception(self) -> bool:
        """Whether this is the Inception network of 2015-12-05; only there a Fréchet distance is called FID."""
        return self.name == "inception" and self.hash == INCEPTION_SHA256[:16]

    @cached_property
    def module(self) -> nn.Module:
        """The network, built once, in evaluation mode and without gradients."""
        return self.build().eval().requires_grad_(False)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the features of images, on their device.

        Autocast and TF32 are off, so that a score does not depend on the precision of training.

        Raises:
            UsageError: The network returns another shape than [N, num_features].
        """
        device = images.device
        module = self.module.to(device)
        with torch.no_grad(), torch.autocast(device.type, enabled=False), backend_of(device).full_precision_convs():
            features = module(images).float()
        if features.shape != (len(images), self.num_features):
            raise UsageError(
                f"space={self.name}: returned features {list(features.shape)}, "
                f"expected [{len(images)}, {self.num_features}]"
            )
        return features

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits [N, num_logits] of features [N, num_features]. Only if `num_logits` is not 0."""
        with torch.no_grad():
            return self.module.to(features.device).logits(features)  # pyright: ignore[reportCallIssue]


def named_space(name: str, resolution: int | str, channels: int, path: str | Path | None = None) -> FeatureSpace:
    """Return the space of a name.

    Args:
        name: "pixels" or "inception".
        resolution: Side of square images, pixels, or "WIDTHxHEIGHT".
        channels: Channels of the images.
        path: File of the Inception weights; None: `inception_path()`.

    Raises:
        UsageError: There is no such space, it is not for so many channels, or the Inception file is missing or another
            file.
    """
    if name not in SPACE_NAMES:
        known = (*SPACE_NAMES, *CUSTOM_SPACES)
        raise UsageError(
            f"space={name}: is none of {', '.join(known)}; did you mean {closest_name(name, SPACE_NAMES)}?"
        )
    if name == "values":
        raise UsageError("space=values: is for arrays of numbers, and the data are images. Use pixels")
    if name == "pixels":
        return pixels(resolution, channels)
    if channels not in (1, 3):
        raise UsageError(
            f"space={name}: is for grey and RGB images, and these have {channels} channels. Use pixels, or "
            "module:callable for a network of your own"
        )
    return inception_2015(path)


def closest_name(name: str, names: Iterable[str]) -> str:
    """Return the first of `names` that starts with `name`, else the most similar one."""
    name = name.lower()
    candidates = list(names)
    with_prefix = [other for other in candidates if other.startswith(name)]
    return (with_prefix or difflib.get_close_matches(name, candidates, n=1, cutoff=0))[0]


# pixels -----------------------------------------------------------------------------------------------------


def pixels(resolution: int | str, channels: int) -> FeatureSpace:
    """Return the space of the images themselves, scaled to [0, 1] and flattened. It needs no weights."""
    size = ImageSize.of(resolution)
    shape = (channels, size.height, size.width)
    digest = _sha256(f"pixels / 255, {shape}".encode())
    return FeatureSpace("pixels", digest, channels * size.pixels, partial(RawPixels, shape), is_raw=True)


class RawPixels(nn.Module):
    """uint8 [N, C, H, W] -> float32 [N, C * H * W] in [0, 1]."""

    def __init__(self, shape: tuple[int, int, int]):
        super().__init__()
        self.shape = shape
        self.num_features = shape[0] * shape[1] * shape[2]

    def forward(self, images: Tensor) -> Tensor:
        if tuple(images.shape[1:]) != self.shape:
            raise UsageError(f"space=pixels: is for images {self.shape}, and these are {tuple(images.shape[1:])}")
        return images.flatten(1).float() / 255


def raw_values(shape: tuple[int, ...]) -> FeatureSpace:
    """Return the space of arrays of numbers, float32 [N, *shape], flattened."""
    digest = _sha256(f"values, {shape}".encode())
    return FeatureSpace("values", digest, math.prod(shape), nn.Flatten, array_shape=shape, is_raw=True)


# user code --------------------------------------------------------------------------------------------------


def module_features(name: str, module: nn.Module, num_features: int, *, num_logits: int = 0) -> FeatureSpace:
    """Return the space of a module; its scores are called `fd_<name>` and so on.

    Args:
        name: Name of the space: letters, digits, - and _.
        module: Maps uint8 [N, C, H, W] to [N, num_features]. It is copied, so training it further does not change the
            space.
        num_features: Length of the features.
        num_logits: If not 0, the module has a method `logits(features) -> [N, num_logits]`.

    Raises:
        UsageError: The name is taken or has other characters.
    """
    frozen = copy.deepcopy(module)
    return FeatureSpace(
        _check_custom_name(name), state_hash(frozen), num_features, lambda: frozen, num_logits, is_user_code=True
    )


def space_from_module(name: str, shape: tuple[int, ...]) -> FeatureSpace:
    """Return the space of user code, called like its attribute. It is tried on two black images.

    Args:
        name: "module:attribute", importable from the current directory: a module as in `module_features`, or a function
            that returns one.
        shape: Shape of an image, (C, H, W).

    Raises:
        UsageError: It cannot be imported, built or called, or returns no features.
    """
    expected = "a network from uint8 [N, C, H, W] to features [N, F], or a function that returns one"
    try:
        value = import_attribute(name)
        module = value if isinstance(value, nn.Module) else value()
        device = next(module.parameters(), torch.zeros(0)).device
        with torch.no_grad():
            features = module.eval()(torch.zeros(2, *shape, dtype=torch.uint8, device=device))
            classify: Any = getattr(module, "logits", None)
            num_logits = classify(features).shape[1] if classify else 0
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise UsageError(f"space={name}: {type(error).__name__}: {error}. Use {expected}") from error
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        actual = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise UsageError(f"space={name}: returned {actual} for 2 images, expected [2, F]. Use {expected}")
    return module_features(name.rpartition(":")[2], module, features.shape[1], num_logits=num_logits)


def state_hash(module: nn.Module) -> str:
    """Return a digest of a module's class name and of the names and values of its state dict."""
    digest = hashlib.sha256(type(module).__qualname__.encode())
    for key, value in sorted(module.state_dict().items()):
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _check_custom_name(name: str) -> str:
    if name in (*SPACE_NAMES, "fid") or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise UsageError(
            f"space={name}: is taken, or has other characters than letters, digits, - and _. Use my-classifier"
        )
    return name


# Inception --------------------------------------------------------------------------------------------------


def inception_path() -> Path:
    """Return the default path of the Inception file."""
    return result_cache.cache_dir() / INCEPTION_FILE


def inception_2015(path: str | Path | None = None, *, name: str = "inception", download: bool = False) -> FeatureSpace:
    """Return the space of the Inception network of 2015-12-05, with the weights of pytorch-fid's file.

    Args:
        path: The file; None: `inception_path()`.
        name: Another name allows any weights of the same network: then only names and shapes are checked, and scores in
            the space are not called FID.
        download: Download the file if it is missing.

    Raises:
        UsageError: The file is missing, has another digest, or cannot be downloaded.
    """
    file = inception_path() if path is None else Path(path).expanduser()
    if download and not file.is_file():
        download_inception(file)
    if not file.is_file():
        raise UsageError(
            f"--inception: missing {inception_source(file)}. Put it there, or name another place by "
            "--inception PATH, or score fd, which needs no file"
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
    """Return the path and the source of the Inception file, for messages."""
    return f"{file}, from {INCEPTION_URL} (its sha256 starts with {INCEPTION_SHA256[:8]})"


def download_inception(file: Path, url: str = INCEPTION_URL, timeout_s: float = 60) -> None:
    """Download the Inception file, 91 MB. `file` appears only if it is complete and has the right digest.

    Args:
        file: Where to put it.
        url: Address.
        timeout_s: Limit of each wait for data.

    Raises:
        UsageError: The address cannot be read, or holds another file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial_file = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as remote, partial_file.open("wb") as target:
            shutil.copyfileobj(remote, target)
        _check_digest(file, _file_sha256(partial_file))
        partial_file.replace(file)
    except OSError as error:
        raise UsageError(f"--inception: cannot download {url} ({error}). Put the file at {file}") from error
    finally:
        partial_file.unlink(missing_ok=True)


def _check_digest(file: Path, digest: str) -> None:
    if digest != INCEPTION_SHA256:
        raise UsageError(
            f"--inception={file}: is not the network of 2015-12-05: its sha256 starts with {digest[:8]}, and must be "
            f"{INCEPTION_SHA256}. Use {INCEPTION_URL}, or in Python `inception_2015(path, name=NAME)` for these weights"
        )


def _load_inception(file: Path) -> nn.Module:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UsageError(
            f"--inception={file}: holds no weights that can be read safely. Use {INCEPTION_URL}"
        ) from error
    return network.load_inception(state)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
