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

from paragan.core.errors import UsageError
from paragan.eval import result_cache
from paragan.eval.feature_stats import ImageArray
from paragan.eval.features import FeatureSpace, state_hash
from paragan.eval.sharding import SINGLE, ReduceGroup, all_ranks, broadcast_from_rank0

SPACE_NAME = "resnet20"
MAX_SIDE = 32  # pixels, the most it sees
NUM_FEATURES = 64
TRAINING_VERSION = 1  # of what training does: another one is another space


@dataclass(frozen=True)
class ClassifierTraining:
    """How a classifier is trained: SGD with momentum, a rate that rises and falls (Smith and Topin 2017), images
    shifted by up to an eighth. Not mirrored, since digits and letters are not the same then."""

    max_images: int = 50_000  # images it is trained on, evenly chosen
    max_held_out: int = 5_000  # at most, and a tenth
    max_samples: int = 64_000  # images shown, each up to `epochs` times
    epochs: int = 40
    batch: int = 128
    lr: float = 0.2
    weight_decay: float = 5e-4
    seed: int = 0

    def num_steps(self, count: int) -> int:
        return max(1, min(self.max_samples, self.epochs * count) // self.batch)


DEFAULT_TRAINING = ClassifierTraining()


class ResNet20(nn.Module):
    """uint8 [N, C, R, R] -> pooled features [N, 64]; `logits` maps those to [N, classes]."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        widths = [(16, 16)] * 3 + [(16, 32), (32, 32), (32, 32), (32, 64), (64, 64), (64, 64)]
        self.conv, self.norm = nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*(ResNetBlock(a, b) for a, b in widths))
        self.linear = nn.Linear(NUM_FEATURES, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = (downscale(images).float() - 127.5) / 64
        return self.blocks(F.relu(self.norm(self.conv(x)))).mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """[N, 64] -> [N, classes], in the precision of the features."""
        return F.linear(features, self.linear.weight.to(features.dtype), self.linear.bias.to(features.dtype))


class ResNetBlock(nn.Module):
    """Two convolutions and a shortcut without parameters: every second pixel, channels padded with zeros."""

    def __init__(self, a: int, b: int):
        super().__init__()
        self.stride, self.padded_channels = (1, 0) if a == b else (2, (b - a) // 2)
        self.conv1, self.norm1 = nn.Conv2d(a, b, 3, self.stride, padding=1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.norm2 = nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padded_channels, self.padded_channels))
        return F.relu(h + short)


def downscale(images: Tensor) -> Tensor:
    """uint8 [N, C, R, R] -> the same, of at most 32 x 32."""
    if images.shape[-1] <= MAX_SIDE:
        return images
    small = F.interpolate(images.float(), (MAX_SIDE, MAX_SIDE), mode="bilinear", antialias=True, align_corners=False)
    return small.round().clamp(0, 255).to(torch.uint8)


# training ---------------------------------------------------------------------------------------------------


def train_classifier(
    images: Tensor,
    labels: Tensor,
    classes: int,
    training: ClassifierTraining = DEFAULT_TRAINING,
    device: torch.device | str = "cpu",
    on_step: Callable[[], None] = lambda: None,
) -> ResNet20:
    """A classifier of uint8 [N, C, R, R] with int64 labels [N], in evaluation mode. each: called after every step."""
    with torch.random.fork_rng(devices=[]), torch.autocast(torch.device(device).type, enabled=False):
        torch.manual_seed(training.seed)
        net = ResNet20(images.shape[1], classes).to(device).train()
        steps = training.num_steps(len(images))
        optimizer = torch.optim.SGD(
            net.parameters(), training.lr, 0.9, weight_decay=training.weight_decay, nesterov=True
        )
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, training.lr, steps + 1)
        for rows in _batches(len(images), training, steps):
            x, y = _random_shift(images[rows]).to(device), labels[rows].to(device)
            loss = F.cross_entropy(net.logits(net(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
            on_step()
    return net.eval().requires_grad_(False)


def _batches(count: int, training: ClassifierTraining, steps: int) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(training.seed)
    waiting = torch.zeros(0, dtype=torch.long)
    for _ in range(steps):
        while len(waiting) < training.batch:
            waiting = torch.cat([waiting, torch.randperm(count, generator=draw)])
        rows, waiting = waiting[: training.batch], waiting[training.batch :]
        yield rows


def _random_shift(images: Tensor) -> Tensor:
    """Each moved by up to an eighth of its side, at random."""
    side = images.shape[-1]
    by = max(1, side // 8)
    padded = F.pad(images, (by, by, by, by))
    top, left = torch.randint(0, 2 * by + 1, (2, len(images), 1))
    rows, columns = torch.arange(side) + top, torch.arange(side) + left  # [N, side]
    number = torch.arange(len(images))[:, None, None]
    return padded.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2).contiguous()


def count_correct(net: ResNet20, images: Tensor, labels: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """[classes, 2] float64: images told right, and all."""
    tally = torch.zeros(net.linear.out_features, 2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in zip(images.split(500), labels.split(500), strict=True):
            right = net.logits(net(x.to(device))).argmax(1).cpu() == y
            tally.index_add_(0, y, torch.stack([right, torch.ones_like(right)], 1).double())
    return tally


# as a feature space -----------------------------------------------------------------------------------------


def untrained_space(labels: np.ndarray | None, names: tuple[str, ...]) -> FeatureSpace:
    """The space before its network is trained: what it is called, and what is defined in it. Raises `Unusable`
    without two classes."""
    if labels is None or len(names) < 2:
        raise UsageError(
            f"space: {SPACE_NAME} is a classifier of the data's labels, and they have no two classes: use pixels"
        )
    resizer = f"antialiased bilinear to at most {MAX_SIDE}"
    return FeatureSpace(
        SPACE_NAME, "", NUM_FEATURES, _raise_untrained, len(names), resizer, classes=names, preprocess=downscale
    )


def _raise_untrained() -> nn.Module:
    raise UsageError("space: resnet20 has to be trained first")


def classifier_space(
    images: ImageArray,
    labels: np.ndarray | None,
    names: tuple[str, ...],
    *,
    data_digest: str,
    group: ReduceGroup = SINGLE,
    device: torch.device | str = "cpu",
    training: ClassifierTraining | None = None,
) -> FeatureSpace:
    """The space of a classifier of these images, uint8 [N, R, R, C]: from the cache, or trained now by rank 0 and
    kept. known_as: a digest of the images. Every rank calls this. Raises `Unusable` without two classes."""
    outlined, training = untrained_space(labels, names), training or DEFAULT_TRAINING
    assert labels is not None
    channels, key = images.shape[3], _cache_key(data_digest, training)
    file = result_cache.cache_dir() / SPACE_NAME / f"{key}.safetensors"
    net, right = ResNet20(channels, len(names)), torch.zeros(2, dtype=torch.float64)
    if not all_ranks(group, (found := _read_cached(net, file)) is not None):
        found = _train_and_cache(net, file, images, labels, training, group, device)
    assert found is not None
    right += found
    note = f"{SPACE_NAME}: {100 * right[0] / right[1]:.1f} % of {int(right[1])} held-out reals told right"
    return dataclasses.replace(
        outlined, hash=state_hash(net), build=lambda: net.eval().requires_grad_(False), notes=(note,)
    )


def _cache_key(data_digest: str, training: ClassifierTraining) -> str:
    told = json.dumps([TRAINING_VERSION, data_digest, dataclasses.asdict(training)])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _cpu_state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in net.state_dict().items()}


def _read_cached(net: ResNet20, file: Path) -> Tensor | None:
    """Fill the network from a file; [2] held-out reals told right, and all. None where that cannot be done."""
    try:
        with safetensors.safe_open(file, "pt") as stored:
            net.load_state_dict({name: stored.get_tensor(name) for name in stored.keys()})  # noqa: SIM118 - no mapping
            return torch.tensor(json.loads(stored.metadata()["right"]), dtype=torch.float64)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, safetensors.SafetensorError):
        return None


def _train_and_cache(
    net: ResNet20,
    file: Path,
    images: ImageArray,
    labels: np.ndarray,
    training: ClassifierTraining,
    group: ReduceGroup,
    device: torch.device | str,
) -> Tensor:
    """Train on rank 0, keep it, and let all have the same weights; [2] held-out reals told right, and all. What another
    process kept meanwhile is taken instead: two classifiers would be two spaces."""
    chosen = np.linspace(0, len(images) - 1, min(len(images), training.max_images)).astype(np.int64)
    out = np.zeros(len(chosen), bool)
    out[:: max(10, math.ceil(len(chosen) / training.max_held_out))] = True

    def train(on_step: Callable[[], None]) -> Tensor:
        if _read_cached(net, file) is None:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)  # it is damaged
        x, y = _load_images(images, chosen), torch.from_numpy(labels[chosen]).long()
        own = train_classifier(x[~out], y[~out], net.linear.out_features, training, device, on_step)
        right = count_correct(own, x[out], y[out], device).sum(0)
        told = {"right": json.dumps(right.tolist())}
        result_cache.store(
            file, lambda aside: safetensors.torch.save_file(_cpu_state(own), aside, told), only_if_absent=True
        )
        if (kept := _read_cached(net, file)) is not None:
            return kept
        net.load_state_dict(_cpu_state(own))
        return right

    right = run_on_rank0(group, training.num_steps(int((~out).sum())), train)
    for value in net.state_dict().values():
        broadcast_from_rank0(group, value)
    return broadcast_from_rank0(group, torch.zeros(2, dtype=torch.float64) if right is None else right)


def run_on_rank0(group: ReduceGroup, steps: int, train: Callable[[Callable[[], None]], Tensor]) -> Tensor | None:
    """What rank 0 makes in so many steps, each of which it reports; None on the others. They are told now and then that
    it goes on, for a group takes silence for a failure."""

    def heartbeat(step: int) -> None:
        if group.size > 1 and step % 20 == 0:
            group.all_reduce_sum(torch.zeros(1)).wait()

    if group.rank == 0:
        ticks = iter(range(1, steps + 1))
        return train(lambda: heartbeat(next(ticks)))
    for step in range(1, steps + 1):
        heartbeat(step)
    return None


def _load_images(images: ImageArray, rows: np.ndarray) -> Tensor:
    """uint8 [n, C, R, R], R at most 32, of these rows in order."""
    parts = []
    for low in range(0, len(images), 1024):
        mine = rows[(rows >= low) & (rows < low + 1024)] - low
        if len(mine):
            part = np.ascontiguousarray(images[low : low + 1024][mine].transpose(0, 3, 1, 2))
            parts.append(downscale(torch.from_numpy(part)))
    return torch.cat(parts)
