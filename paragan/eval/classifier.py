"""A small classifier that is trained on the labelled images at hand: a feature space for images of any kind.

    space = trained(images, labels, names, known_as=fingerprint)      # minutes, once; then from the cache
    space.name, space.notes            # "resnet20", ("resnet20: 97.2 % of 179 held-out reals told right",)

ResNet-20 of He et al. 2015 (arXiv 1512.03385, section 4.2): three stages of three blocks, 64 pooled features. It
sees images of at most 32 x 32; larger ones are shrunk. Its training is a function of the data and a seed.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.core.errors import Unusable
from paragan.eval import result_cache
from paragan.eval.feature_stats import Rows
from paragan.eval.features import FeatureSpace, state_hash
from paragan.eval.sharding import ALONE, Summing, everywhere, of_first

NAME = "resnet20"
SIDE = 32  # pixels, the most it sees
NUM_FEATURES = 64
VERSION = 1  # of what training does: another one is another space


@dataclass(frozen=True)
class Training:
    """How a classifier is trained: SGD with momentum, a rate that rises and falls (Smith and Topin 2017), images
    shifted by up to an eighth. Not mirrored, since digits and letters are not the same then."""

    most: int = 50_000  # images it is trained on, evenly chosen
    held_out: int = 5_000  # at most, and a tenth
    shown: int = 64_000  # images shown, each up to `epochs` times
    epochs: int = 40
    batch: int = 128
    rate: float = 0.2
    weight_decay: float = 5e-4
    seed: int = 0

    def steps(self, count: int) -> int:
        return max(1, min(self.shown, self.epochs * count) // self.batch)


TRAINING = Training()


class ResNet20(nn.Module):
    """uint8 [N, C, R, R] -> pooled features [N, 64]; `logits` maps those to [N, classes]."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        widths = [(16, 16)] * 3 + [(16, 32), (32, 32), (32, 32), (32, 64), (64, 64), (64, 64)]
        self.conv, self.norm = nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*(Residual(a, b) for a, b in widths))
        self.linear = nn.Linear(NUM_FEATURES, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = (shrunk(images).float() - 127.5) / 64
        return self.blocks(F.relu(self.norm(self.conv(x)))).mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """[N, 64] -> [N, classes], in the precision of the features."""
        return F.linear(features, self.linear.weight.to(features.dtype), self.linear.bias.to(features.dtype))


class Residual(nn.Module):
    """Two convolutions and a shortcut without parameters: every second pixel, channels padded with zeros."""

    def __init__(self, a: int, b: int):
        super().__init__()
        self.stride, self.more = (1, 0) if a == b else (2, (b - a) // 2)
        self.conv1, self.norm1 = nn.Conv2d(a, b, 3, self.stride, padding=1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.norm2 = nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more, self.more))
        return F.relu(h + short)


def shrunk(images: Tensor) -> Tensor:
    """uint8 [N, C, R, R] -> the same, of at most 32 x 32."""
    if images.shape[-1] <= SIDE:
        return images
    small = F.interpolate(images.float(), (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
    return small.round().clamp(0, 255).to(torch.uint8)


# training ---------------------------------------------------------------------------------------------------


def fit(
    images: Tensor,
    labels: Tensor,
    classes: int,
    how: Training = TRAINING,
    device: torch.device | str = "cpu",
    each: Callable[[], None] = lambda: None,
) -> ResNet20:
    """A classifier of uint8 [N, C, R, R] with int64 labels [N], in evaluation mode. each: called after every step."""
    with torch.random.fork_rng(devices=[]), torch.autocast(torch.device(device).type, enabled=False):
        torch.manual_seed(how.seed)
        net = ResNet20(images.shape[1], classes).to(device).train()
        steps = how.steps(len(images))
        optimizer = torch.optim.SGD(net.parameters(), how.rate, 0.9, weight_decay=how.weight_decay, nesterov=True)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, how.rate, steps + 1)
        for rows in _batches(len(images), how, steps):
            x, y = _shifted(images[rows]).to(device), labels[rows].to(device)
            loss = F.cross_entropy(net.logits(net(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
            each()
    return net.eval().requires_grad_(False)


def _batches(count: int, how: Training, steps: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(how.seed)
    waiting = torch.zeros(0, dtype=torch.long)
    for _ in range(steps):
        while len(waiting) < how.batch:
            waiting = torch.cat([waiting, torch.randperm(count, generator=draw)])
        rows, waiting = waiting[: how.batch], waiting[how.batch :]
        yield rows


def _shifted(images: Tensor) -> Tensor:
    """Each moved by up to an eighth of its side, at random."""
    side = images.shape[-1]
    by = max(1, side // 8)
    padded = F.pad(images, (by, by, by, by))
    top, left = torch.randint(0, 2 * by + 1, (2, len(images), 1))
    rows, columns = torch.arange(side) + top, torch.arange(side) + left  # [N, side]
    number = torch.arange(len(images))[:, None, None]
    return padded.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2).contiguous()


def hits(net: ResNet20, images: Tensor, labels: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """[classes, 2] float64: images told right, and all."""
    tally = torch.zeros(net.linear.out_features, 2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in zip(images.split(500), labels.split(500), strict=True):
            right = net.logits(net(x.to(device))).argmax(1).cpu() == y
            tally.index_add_(0, y, torch.stack([right, torch.ones_like(right)], 1).double())
    return tally


# as a feature space -----------------------------------------------------------------------------------------


def outline(labels: np.ndarray | None, names: tuple[str, ...]) -> FeatureSpace:
    """The space before its network is trained: what it is called, and what is defined in it. Raises `Unusable`
    without two classes."""
    if labels is None or len(names) < 2:
        raise Unusable(f"space: {NAME} is a classifier of the data's labels, and they have no two classes: use pixels")
    resizer = f"antialiased bilinear to at most {SIDE}"
    return FeatureSpace(NAME, "", NUM_FEATURES, _untrained, len(names), resizer, classes=names, seen=shrunk)


def _untrained() -> nn.Module:
    raise Unusable("space: resnet20 has to be trained first")


def trained(
    images: Rows,
    labels: np.ndarray | None,
    names: tuple[str, ...],
    *,
    known_as: str,
    group: Summing = ALONE,
    device: torch.device | str = "cpu",
    how: Training | None = None,
) -> FeatureSpace:
    """The space of a classifier of these images, uint8 [N, R, R, C]: from the cache, or trained now by rank 0 and
    kept. known_as: a digest of the images. Every rank calls this. Raises `Unusable` without two classes."""
    outlined, how = outline(labels, names), how or TRAINING
    assert labels is not None
    channels, key = images.shape[3], _key(known_as, how)
    file = result_cache.folder() / NAME / f"{key}.safetensors"
    net, right = ResNet20(channels, len(names)), torch.zeros(2, dtype=torch.float64)
    if not everywhere(group, (found := _read(net, file)) is not None):
        found = _made(net, file, images, labels, how, group, device)
    assert found is not None
    right += found
    note = f"{NAME}: {100 * right[0] / right[1]:.1f} % of {int(right[1])} held-out reals told right"
    return dataclasses.replace(
        outlined, hash=state_hash(net), build=lambda: net.eval().requires_grad_(False), notes=(note,)
    )


def _key(known_as: str, how: Training) -> str:
    told = json.dumps([VERSION, known_as, dataclasses.asdict(how)])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in net.state_dict().items()}


def _read(net: ResNet20, file: Path) -> Tensor | None:
    """Fill the network from a file; [2] held-out reals told right, and all. None where that cannot be done."""
    try:
        with safetensors.safe_open(file, "pt") as stored:
            net.load_state_dict({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118 - no mapping
            return torch.tensor(json.loads(stored.metadata()["right"]), dtype=torch.float64)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError):
        return None


def _made(
    net: ResNet20,
    file: Path,
    images: Rows,
    labels: np.ndarray,
    how: Training,
    group: Summing,
    device: torch.device | str,
) -> Tensor:
    """Train on rank 0, keep it, and let all have the same weights; [2] held-out reals told right, and all. What another
    process kept meanwhile is taken instead: two classifiers would be two spaces."""
    chosen = np.linspace(0, len(images) - 1, min(len(images), how.most)).astype(np.int64)
    out = np.zeros(len(chosen), bool)
    out[:: max(10, math.ceil(len(chosen) / how.held_out))] = True

    def train(each: Callable[[], None]) -> Tensor:
        if _read(net, file) is None:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)  # it is damaged
        x, y = _pictures(images, chosen), torch.from_numpy(labels[chosen]).long()
        own = fit(x[~out], y[~out], net.linear.out_features, how, device, each)
        right = hits(own, x[out], y[out], device).sum(0)
        told = {"right": json.dumps(right.tolist())}
        result_cache.put(file, lambda aside: safetensors.torch.save_file(_state(own), aside, told), once=True)
        if (kept := _read(net, file)) is not None:
            return kept
        net.load_state_dict(_state(own))
        return right

    right = by_first(group, how.steps(int((~out).sum())), train)
    for value in net.state_dict().values():
        of_first(group, value)
    return of_first(group, torch.zeros(2, dtype=torch.float64) if right is None else right)


def by_first(group: Summing, steps: int, train: Callable[[Callable[[], None]], Tensor]) -> Tensor | None:
    """What rank 0 makes in so many steps, each of which it reports; None on the others. They are told now and then that
    it goes on, for a group takes silence for a failure."""

    def still_here(step: int) -> None:
        if group.size > 1 and step % 20 == 0:
            group.sum(torch.zeros(1)).wait()

    if group.rank == 0:
        ticks = iter(range(1, steps + 1))
        return train(lambda: still_here(next(ticks)))
    for step in range(1, steps + 1):
        still_here(step)
    return None


def _pictures(images: Rows, chosen: np.ndarray) -> Tensor:
    """uint8 [n, C, R, R], R at most 32, of these rows in order."""
    parts = []
    for low in range(0, len(images), 1024):
        mine = chosen[(chosen >= low) & (chosen < low + 1024)] - low
        if len(mine):
            part = np.ascontiguousarray(images[low : low + 1024][mine].transpose(0, 3, 1, 2))
            parts.append(shrunk(torch.from_numpy(part)))
    return torch.cat(parts)
