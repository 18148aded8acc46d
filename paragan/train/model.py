"""The model: the averaged generator as safetensors and json, and sampling from it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from ..config import build, plain
from ..errors import Unusable
from ..game.player import Player
from ..nets import Nets, Spec
from ..rng import CPU, generator

FORMAT = 1
STANDING_IMAGES = 1024


@dataclass(frozen=True)
class Prior:
    """How often each label occurs in the data; () in an unconditional game."""

    shares: tuple[float, ...]

    @staticmethod
    def of(labels: np.ndarray | None, classes: int) -> Prior:
        if labels is None or classes == 0:
            return Prior(())
        return Prior(tuple(float(n) / len(labels) for n in np.bincount(labels, minlength=classes)))

    def label(self, seed: int, index: int) -> int:
        """The label of sample `index`, drawn with the chances of the data."""
        chance = generator(seed, "sample label", position=index).random()
        return min(int(np.searchsorted(np.cumsum(self.shares), chance, side="right")), len(self.shares) - 1)


@dataclass(frozen=True)
class Sampler:
    """Images from a generator: image i depends on (seed, i) alone, not on what is sampled with it."""

    g: nn.Module
    latent: int
    prior: Prior
    device: torch.device = CPU
    batch: int = 256

    def labels(self, indices: Sequence[int], seed: int) -> np.ndarray | None:
        """[n] int64 labels drawn from the prior."""
        return np.array([self.prior.label(seed, i) for i in indices], np.int64) if self.prior.shares else None

    @torch.no_grad()
    def images(
        self, indices: Sequence[int], labels: np.ndarray | None, seed: int = 0, truncation: float = 1.0
    ) -> Tensor:
        """[n, C, H, W] uint8 on the CPU. truncation: latents beyond this size are drawn again (1: all kept).

        The truncation trick of BigGAN (Brock et al. 2019): values over the threshold are drawn again; below 1
        the threshold is 2 psi standard deviations.
        """
        made = []
        for start in range(0, len(indices), self.batch):
            part = indices[start : start + self.batch]
            z = torch.from_numpy(np.stack([latent(seed, i, self.latent, truncation) for i in part])).to(self.device)
            y = None
            if labels is not None:
                y = torch.from_numpy(np.asarray(labels[start : start + self.batch], np.int64)).to(self.device)
            made.append(to_uint8(self.g(z, y)).cpu())
        return torch.cat(made)


def latent(seed: int, index: int, size: int, truncation: float = 1.0) -> np.ndarray:
    """[size] float32 normal; with truncation < 1 cut off at 2 * truncation standard deviations."""
    rng = generator(seed, "sample latent", position=index)
    z = rng.standard_normal(size, dtype=np.float32)
    if truncation < 1:
        while (beyond := np.abs(z) > 2 * truncation).any():
            z[beyond] = rng.standard_normal(int(beyond.sum()), dtype=np.float32)
    return z


def to_uint8(images: Tensor) -> Tensor:
    """[-1, 1] float -> [0, 255] uint8, the inverse of what the lanes feed."""
    return images.float().add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)


@contextlib.contextmanager
def standing(player: Player, latent_size: int, labels: np.ndarray | None, seed: int) -> Iterator[nn.Module]:
    """The averaged network with batch statistics of its own ("standing", Brock et al. 2019), in eval mode.

    The running statistics belong to the parameters that move; those of the average are measured anew on
    1,024 images, in groups of a lane, a function of the seed. Afterwards everything is as it was.
    """
    layers = [layer for layer in player.coupled if isinstance(layer, nn.Module) and hasattr(layer, "running_mean")]
    with player.averaged() as net, torch.no_grad():
        kept = [(buffer, buffer.clone()) for buffer in net.buffers()]
        modes = [(part, part.training) for part in net.modules()]
        try:
            _measure(net, layers, player.lane_batch, latent_size, labels, seed)
            net.eval()
            yield net
        finally:
            for part, training in modes:
                part.training = training
            for buffer, value in kept:
                buffer.copy_(value)


def _measure(
    net: nn.Module, layers: list[Any], per_group: int | None, size: int, labels: np.ndarray | None, seed: int
) -> None:
    if not per_group or not layers:
        return
    device = next(net.parameters()).device
    former = [(layer.momentum, layer.lane_batch) for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum, layer.tracking, layer.lane_batch = None, True, per_group
    for batch in range(-(-STANDING_IMAGES // per_group)):
        rng = generator(seed, "standing", position=batch)
        z = torch.from_numpy(rng.standard_normal((per_group, size), dtype=np.float32)).to(device)
        y = None if labels is None else torch.from_numpy(labels[rng.integers(len(labels), size=per_group)]).to(device)
        net(z, y)
        for layer in layers:
            layer.settle()
    for layer, (momentum, lane_batch) in zip(layers, former):
        layer.momentum, layer.tracking, layer.lane_batch = momentum, False, lane_batch


# Files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A generator that was loaded, with what it knows about itself."""

    sampler: Sampler
    spec: Spec
    config: dict[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.config["classes"])


def save_model(folder: Path, g: nn.Module, d: nn.Module, config: dict[str, Any]) -> None:
    """Write model.safetensors, discriminator.safetensors and config.json, each aside and renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, net in (("model", g), ("discriminator", d)):
        tensors = {key: value.detach().cpu().contiguous() for key, value in net.state_dict().items()}
        _replace(folder / f"{name}.safetensors", safetensors.torch.save(tensors))
    _replace(folder / "config.json", json.dumps({"format": FORMAT, **config}, indent=1).encode())


def _replace(path: Path, data: bytes) -> None:
    aside = path.with_name(f".{path.name}.writing")
    with aside.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    aside.rename(path)


def model_config(net: Any, spec: Spec, prior: Prior, classes: Sequence[str], **more: Any) -> dict[str, Any]:
    """What config.json says: enough to build the network again and to sample from it."""
    about = {"net": plain(net), "spec": plain(spec), "prior": list(prior.shares), "classes": list(classes)}
    return about | more


def load_model(path: str | Path, device: torch.device = CPU) -> Model:
    """A generator from a run folder, its model folder, or model.safetensors. Runs no code from the files."""
    folder = _model_folder(Path(path))
    try:
        config = json.loads((folder / "config.json").read_text())
        if config["format"] > FORMAT:
            raise Unusable(f"{folder} has model format {config['format']}; this paragan reads up to {FORMAT}")
        spec = build(Spec, config["spec"])
        net_config = build(Nets, config["net"])  # pyright: ignore
        prior = Prior(tuple(float(share) for share in config["prior"]))
        if len(prior.shares) != spec.classes or not all(0 <= share <= 1 for share in prior.shares):
            raise ValueError("prior does not fit the classes")
        if not all(isinstance(name, str) for name in config["classes"]):
            raise ValueError("classes are no names")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unusable(f"{folder}/config.json cannot be read: {error}") from error
    g = net_config.generator(spec)
    load_weights(g, folder / "model.safetensors")
    sampler = Sampler(g.to(device).eval(), net_config.latent, prior, device)
    return Model(sampler, spec, config)


def load_weights(net: nn.Module, path: Path) -> None:
    """Fill a network from safetensors. Unusable lists the first names that do not fit."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise Unusable(f"{path} cannot be read as safetensors: {error}") from error
    own = net.state_dict()
    wrong = [n for n in own if n not in tensors] + [n for n in tensors if n not in own]
    wrong += [n for n in own if n in tensors and own[n].shape != tensors[n].shape]
    if wrong:
        raise Unusable(f"{path} holds another architecture; the first names that differ: {', '.join(wrong[:3])}")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])


def _model_folder(path: Path) -> Path:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise Unusable(f"{path} is no safetensors file (pickles are refused: loading one can run code)")
        path = path.parent
    for folder in (path, path / "model"):
        if (folder / "model.safetensors").exists():
            return folder
    if not path.exists():
        raise Unusable(f"{path} does not exist; give a run folder, as `paragan train` prints it")
    raise Unusable(
        f"{path} holds no model yet (model/model.safetensors): `paragan train` writes one with each checkpoint"
    )


def folder_to_start_from(path: Path) -> Path:
    """The model folder that --init-from names."""
    for folder in (path, path / "model", path.parent):
        if (folder / "model.safetensors").exists():
            return folder
    raise Unusable(f"--init-from {path}: there is no model.safetensors; give a run folder or its model folder")


def read_labels(text: str, model: Model, count: int) -> np.ndarray:
    """'3,7' or class names -> [count] int64, in turn."""
    classes = model.classes
    if not classes:
        raise Unusable("--labels: this model was trained without classes; leave --labels out")
    chosen: list[int] = []
    for word in text.split(","):
        if word in classes:
            chosen.append(classes.index(word))
        elif word.isdigit() and int(word) < len(classes):
            chosen.append(int(word))
        else:
            raise Unusable(
                f"--labels: there is no class {word!r}; classes are 0 to {len(classes) - 1}: {', '.join(classes[:20])}"
            )
    return np.array(chosen, np.int64)[np.arange(count) % len(chosen)]
