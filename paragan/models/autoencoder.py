"""Frozen autoencoders: the images of a data set become latents, and generated latents become images.

    autoencoder = load_autoencoder("runs/00000-tokenizer-...", "--encoder")     # or module:Class
    decoder = load_decoder(dataset.encoding)                                    # with the normalisation of the data

An autoencoder is an `nn.Module` with `to_latents(images [N, C, H, W] in [-1, 1]) -> [N, c, h, w]` and `from_latents`,
which undoes it. It runs in evaluation mode.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.frozen_features import make_frozen
from paragan.core.image_encoding import ImageEncoding, is_user_code
from paragan.core.schema import from_dict
from paragan.data.dataset import Dataset
from paragan.models.load_generator import build_generator, resolve_nets, wrap_config_errors
from paragan.models.model_files import find_model_dir, is_per_label, read_consistent
from paragan.models.sampler import to_float32, to_uint8
from paragan.nets import Spec

DECODED_ROWS = 32  # of a pass: images are larger than their latents


@dataclass(frozen=True)
class LoadedAutoencoder:
    """A frozen autoencoder on the CPU.

    reference   : what it was loaded from
    net         : the module
    image_shape : (C, H, W) of the images that it was trained on; () if that is not recorded
    fingerprint : of its weights
    """

    reference: str
    net: nn.Module
    image_shape: tuple[int, ...]
    fingerprint: str


def load_autoencoder(reference: str, field: str) -> LoadedAutoencoder:
    """Load an autoencoder.

    Args:
        reference: a run folder or a model folder; or `module:Class` of the user, which is called without arguments.
        field: the option that names it, for errors.

    Raises:
        UsageError: there is none, or it is no autoencoder.
    """
    if is_user_code(reference):
        net = make_frozen(field, reference)
        image_shape: tuple[int, ...] = ()
    else:
        try:
            net, image_shape = _load_folder(Path(reference))
        except UsageError as error:
            reason = str(error).removeprefix(f"{reference}: ")
            raise UsageError(f"{field}={reference}: {reason}") from error
    if not all(callable(getattr(net, name, None)) for name in ("to_latents", "from_latents")):
        raise UsageError(
            f"{field}={reference}: {type(net).__name__} has no to_latents and from_latents. Use a run of "
            "`paragan train tokenizer`, or module:Class of an nn.Module that has them"
        )
    return LoadedAutoencoder(reference, net.eval().requires_grad_(False), image_shape, state_fingerprint(net))


def _load_folder(path: Path) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the generator of a model folder, and the shape of its images."""
    folder = find_model_dir(path)
    if is_per_label(folder):
        raise UsageError(f"{folder}: has a generator for each label. Use a run of `paragan train tokenizer`")
    snapshot = read_consistent(folder, ["model"])
    with wrap_config_errors(folder):
        spec = from_dict(Spec, snapshot.config["spec"])
    nets = resolve_nets(snapshot.config.get("net"), None, folder)
    with torch.random.fork_rng():  # a run may load it at any moment, and must draw the same after it
        return build_generator(snapshot, nets, spec), spec.shape


def state_fingerprint(net: nn.Module) -> str:
    """Return 16 hex digits of the sha256 over the weights and buffers of a network on the CPU."""
    digest = hashlib.sha256()
    for name, value in sorted(net.state_dict().items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}\0".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class LatentDecoder(nn.Module):
    """Normalised latents [N, c, h, w] -> images [N, C, H, W] float32 around [-1, 1].

    Args:
        autoencoder: has `from_latents`.
        encoding: the normalisation of the latents.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, autoencoder: nn.Module, encoding: ImageEncoding):
        super().__init__()
        self.autoencoder = autoencoder
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(encoding, name))[:, None, None])

    def forward(self, latents: Tensor) -> Tensor:
        net: Any = self.autoencoder
        return net.from_latents(latents.float() * self.std + self.mean).float()

    @torch.no_grad()
    def to_pixels(self, latents: Tensor) -> Tensor:
        """Return images uint8 [N, C, H, W] on the device of the latents, to which the decoder moves."""
        self.to(latents.device)
        return torch.cat([to_uint8(self(rows)) for rows in latents.split(DECODED_ROWS)])


@functools.lru_cache(maxsize=1)
def load_decoder(encoding: ImageEncoding) -> LatentDecoder:
    """Return the decoder of a data set of latents, on the CPU until it is used. The last one is cached.

    Raises:
        UsageError: it is missing, or is not the autoencoder that made the latents.
    """
    autoencoder = load_autoencoder(encoding.decoder, "data.decoder")
    if autoencoder.fingerprint != encoding.fingerprint:
        raise UsageError(
            f"data.decoder={encoding.decoder}: has other weights ({autoencoder.fingerprint}) than the autoencoder of "
            f"the latents ({encoding.fingerprint}). Use --data.decoder=PATH of a copy of it, or encode the images again"
        )
    return LatentDecoder(autoencoder.net, encoding)


def output_converter(dataset: Dataset) -> Callable[[Tensor], Tensor]:
    """Return what makes samples of the output of a generator that is trained on a data set: uint8, or numbers.

    Raises:
        UsageError: the decoder of latents cannot be loaded.
    """
    if dataset.encoding:
        return load_decoder(dataset.encoding).to_pixels
    return to_float32 if dataset.is_array else to_uint8


def encoding_from_config(config: dict[str, Any], decoder: str, folder: Path) -> ImageEncoding | None:
    """Return what decodes the output of a model; None if it makes images or numbers.

    Args:
        config: the content of its config.json.
        decoder: the autoencoder, if it lies elsewhere than where it was, or is the user's own.
        folder: of the model, for errors.

    Raises:
        UsageError: the record cannot be read, or names code of the user.
    """
    if "encoding" not in config:
        if decoder:
            raise UsageError(f"data.decoder={decoder}: {folder} makes no latents. Leave it out")
        return None
    with wrap_config_errors(folder):
        encoding = from_dict(ImageEncoding, config["encoding"] | ({"decoder": decoder} if decoder else {}))
    if is_user_code(encoding.decoder) and not decoder:
        raise UsageError(
            f"{folder}: makes latents of your own {encoding.decoder}, which files never run. Use "
            f"--data.decoder={encoding.decoder}"
        )
    return encoding
