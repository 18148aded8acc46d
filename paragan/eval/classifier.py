"""A small classifier trained on the labelled data set itself: a feature space for images of any kind.

    space = classifier_space(images, labels, names, data_digest=digest)      # minutes once, then from the cache
    space.name, space.notes            # "resnet20", ("resnet20: 97.2 % of 179 held-out reals classified correctly",)

ResNet-20 of He et al. 2015 (arXiv 1512.03385, section 4.2): three stages of three blocks, 64 pooled features. Images
larger than 32 x 32 are downscaled to that. Training depends on the data and a seed only. Rank 0 trains and sends the
weights to all ranks; it contacts the others every 20 steps, because a group takes a long silence for a failure.
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
from paragan.core.host_copies import copy_to_device
from paragan.core.image_shape import ImageSize
from paragan.eval import result_cache
from paragan.eval.feature_stats import ImageArray
from paragan.eval.features import FeatureSpace, state_hash
from paragan.eval.sharding import SINGLE, ReduceGroup, all_ranks, broadcast_from_rank0

SPACE_NAME = "resnet20"
MAX_SIDE = 32  # pixels; larger images are downscaled
NUM_FEATURES = 64
TRAINING_VERSION = 1  # rises when training changes: the result is another space


@dataclass(frozen=True)
class ClassifierTraining:
    """Hyperparameters of the classifier: SGD with momentum and a one-cycle learning rate (Smith and Topin 2017).

    Images are randomly shifted by up to an eighth, but not flipped, because flips change digits and letters.
    """

    max_images: int = 50_000  # images to train on and hold out, evenly spaced in the data
    max_held_out: int = 5_000  # at most, and at most a tenth of the images
    max_samples: int = 64_000  # samples in training, each image up to `epochs` times
    epochs: int = 40
    batch: int = 128
    lr: float = 0.2
    weight_decay: float = 5e-4
    seed: int = 0

    def num_steps(self, count: int) -> int:
        """Return the number of steps of training on `count` images."""
        return max(1, min(self.max_samples, self.epochs * count) // self.batch)


DEFAULT_TRAINING = ClassifierTraining()


class ResNet20(nn.Module):
    """uint8 [N, C, H, W] -> pooled features [N, 64]; `logits` maps those to [N, classes]."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        widths = [(16, 16)] * 3 + [(16, 32), (32, 32), (32, 32), (32, 64), (64, 64), (64, 64)]
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(*(ResNetBlock(a, b) for a, b in widths))
        self.linear = nn.Linear(NUM_FEATURES, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = (downscale(images).float() - 127.5) / 64
        return self.blocks(F.relu(self.norm(self.conv(x)))).mean((2, 3))

    def logits(self, features: Tensor) -> Tensor:
        """Map features [N, 64] to logits [N, classes], in the dtype of the features."""
        return F.linear(features, self.linear.weight.to(features.dtype), self.linear.bias.to(features.dtype))


class ResNetBlock(nn.Module):
    """Two convolutions and a shortcut without parameters: every second pixel, channels padded with zeros."""

    def __init__(self, a: int, b: int):
        super().__init__()
        self.stride = 1 if a == b else 2
        self.padded_channels = (b - a) // 2
        self.conv1 = nn.Conv2d(a, b, 3, self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(b)
        self.conv2 = nn.Conv2d(b, b, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(b)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        padding = (0, 0, 0, 0, self.padded_channels, self.padded_channels)
        return F.relu(h + F.pad(x[:, :, :: self.stride, :: self.stride], padding))


def downscale(images: Tensor) -> Tensor:
    """Downscale uint8 [N, C, H, W] to the same shape of at most 32 x 32."""
    height, width = images.shape[2:]
    size = ImageSize(width, height).fit_within(MAX_SIDE)
    if size == (width, height):
        return images
    target = (size.height, size.width)
    small = F.interpolate(images.float(), target, mode="bilinear", antialias=True, align_corners=False)
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
    """Train a classifier and return it in evaluation mode.

    Args:
        images: uint8 [N, C, H, W].
        labels: int64 [N].
        classes: Number of classes.
        training: Hyperparameters.
        device: Where to train.
        on_step: Called after every step.
    """
    device = torch.device(device)
    with torch.random.fork_rng(devices=[]), torch.autocast(device.type, enabled=False):
        torch.manual_seed(training.seed)
        net = ResNet20(images.shape[1], classes).to(device).train()
        steps = training.num_steps(len(images))
        optimizer = torch.optim.SGD(
            net.parameters(), training.lr, 0.9, weight_decay=training.weight_decay, nesterov=True
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, training.lr, steps + 1)
        for rows in _batches(len(images), training, steps):
            x = copy_to_device(_random_shift(images[rows]), device)
            y = copy_to_device(labels[rows], device)
            loss = F.cross_entropy(net.logits(net(x)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            on_step()
    return net.eval().requires_grad_(False)


def _batches(count: int, training: ClassifierTraining, steps: int) -> Iterator[Tensor]:
    """Yield the rows of each batch: the data in a new random order in every epoch."""
    generator = torch.Generator().manual_seed(training.seed)
    queue = torch.zeros(0, dtype=torch.long)
    for _ in range(steps):
        while len(queue) < training.batch:
            queue = torch.cat([queue, torch.randperm(count, generator=generator)])
        yield queue[: training.batch]
        queue = queue[training.batch :]


def _random_shift(images: Tensor) -> Tensor:
    """Shift each image randomly by up to an eighth of its short side."""
    height, width = images.shape[2:]
    limit = max(1, min(height, width) // 8)
    padded = F.pad(images, (limit, limit, limit, limit))
    top, left = torch.randint(0, 2 * limit + 1, (2, len(images), 1))
    rows = torch.arange(height) + top  # [N, height]
    columns = torch.arange(width) + left
    index = torch.arange(len(images))[:, None, None]
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2).contiguous()


def count_correct(net: ResNet20, images: Tensor, labels: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Return [classes, 2] float64: the number of correctly classified images of each class, and of all its images."""
    device = torch.device(device)
    counts = torch.zeros(net.linear.out_features, 2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in zip(images.split(500), labels.split(500), strict=True):
            correct = net.logits(net(copy_to_device(x, device))).argmax(1).cpu() == y
            counts.index_add_(0, y, torch.stack([correct, torch.ones_like(correct)], 1).double())
    return counts


# as a feature space -----------------------------------------------------------------------------------------


def untrained_space(labels: np.ndarray | None, names: tuple[str, ...]) -> FeatureSpace:
    """Return the space before its network is trained: enough to name its metrics and to check them.

    Raises:
        UsageError: The data has fewer than two classes.
    """
    if labels is None or len(names) < 2:
        raise UsageError(
            f"space={SPACE_NAME}: is a classifier of the data's classes, and the data has fewer than two. Use pixels"
        )
    resizer = f"antialiased bilinear to at most {MAX_SIDE}"
    return FeatureSpace(
        SPACE_NAME, "", NUM_FEATURES, _raise_untrained, len(names), resizer, classes=names, preprocess=downscale
    )


def _raise_untrained() -> nn.Module:
    raise UsageError("space=resnet20: its classifier is not trained. Use classifier_space")


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
    """Return the space of a classifier of these images, from the cache or trained now by rank 0. Every rank calls this.

    Args:
        images: uint8 [N, H, W, C].
        labels: int64 [N].
        names: Names of the classes.
        data_digest: Digest of images and labels, the key in the cache.
        group: All ranks.
        device: Where to train.
        training: Hyperparameters; None: `DEFAULT_TRAINING`.

    Raises:
        UsageError: The data has fewer than two classes.
    """
    space = untrained_space(labels, names)
    training = training or DEFAULT_TRAINING
    assert labels is not None
    file = result_cache.cache_dir() / SPACE_NAME / f"{_cache_key(data_digest, training)}.safetensors"
    net = ResNet20(images.shape[3], len(names))
    accuracy = _read_cached(net, file)
    if not all_ranks(group, accuracy is not None):
        accuracy = _train_and_cache(net, file, images, labels, training, group, device)
    assert accuracy is not None
    correct, count = accuracy.tolist()
    note = f"{SPACE_NAME}: {100 * correct / count:.1f} % of {int(count)} held-out reals classified correctly"
    return dataclasses.replace(
        space, hash=state_hash(net), build=lambda: net.eval().requires_grad_(False), notes=(note,)
    )


def _cache_key(data_digest: str, training: ClassifierTraining) -> str:
    text = json.dumps([TRAINING_VERSION, data_digest, dataclasses.asdict(training)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cpu_state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous() for name, value in net.state_dict().items()}


def _read_cached(net: ResNet20, file: Path) -> Tensor | None:
    """Load the network from a file; return the numbers [2] of correct and of all held-out reals, None if it fails."""
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
    """Train on rank 0, write the cache, and send the weights to all ranks.

    If another process has written the file meanwhile, its weights are used: two classifiers would be two spaces.

    Returns:
        The numbers [2] of correctly classified and of all held-out reals.
    """
    subset = np.linspace(0, len(images) - 1, min(len(images), training.max_images)).astype(np.int64)
    held_out = np.zeros(len(subset), bool)
    held_out[:: max(10, math.ceil(len(subset) / training.max_held_out))] = True

    def train(on_step: Callable[[], None]) -> Tensor:
        if _read_cached(net, file) is None:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)  # a damaged file
        x = _load_images(images, subset)
        y = torch.from_numpy(labels[subset]).long()
        trained = train_classifier(x[~held_out], y[~held_out], net.linear.out_features, training, device, on_step)
        accuracy = count_correct(trained, x[held_out], y[held_out], device).sum(0)
        metadata = {"right": json.dumps(accuracy.tolist())}

        def write(path: Path) -> None:
            safetensors.torch.save_file(_cpu_state(trained), path, metadata)

        result_cache.store(file, write, only_if_absent=True)
        if (cached := _read_cached(net, file)) is not None:
            return cached
        net.load_state_dict(_cpu_state(trained))
        return accuracy

    accuracy = run_on_rank0(group, training.num_steps(int((~held_out).sum())), train)
    for value in net.state_dict().values():
        broadcast_from_rank0(group, value)
    return broadcast_from_rank0(group, torch.zeros(2, dtype=torch.float64) if accuracy is None else accuracy)


def run_on_rank0(group: ReduceGroup, steps: int, train: Callable[[Callable[[], None]], Tensor]) -> Tensor | None:
    """Run `train` on rank 0 and return its result there, None on the other ranks.

    A small all-reduce every 20 steps keeps the group alive, because a long silence counts as a failure.

    Args:
        group: All ranks.
        steps: Number of steps of the training.
        train: Called on rank 0 with a function that it calls after every step.
    """

    def heartbeat(step: int) -> None:
        if group.size > 1 and step % 20 == 0:
            group.all_reduce_sum(torch.zeros(1)).wait()

    if group.rank == 0:
        counter = iter(range(1, steps + 1))
        return train(lambda: heartbeat(next(counter)))
    for step in range(1, steps + 1):
        heartbeat(step)
    return None


def _load_images(images: ImageArray, rows: np.ndarray) -> Tensor:
    """Return these rows in order, downscaled, uint8 [n, C, H, W]."""
    parts = []
    for start in range(0, len(images), 1024):
        in_block = rows[(rows >= start) & (rows < start + 1024)] - start
        if len(in_block):
            part = np.ascontiguousarray(images[start : start + 1024][in_block].transpose(0, 3, 1, 2))
            parts.append(downscale(torch.from_numpy(part)))
    return torch.cat(parts)
