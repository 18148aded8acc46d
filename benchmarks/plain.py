"""GAN training in plain PyTorch, as people write it: what paragan is measured against.

`Naive` is the loop of tutorials and of most repositories; SNGAN's networks are written as theirs are. They are
the same functions of the same parameters as paragan's (`load_state_dict` works across, and `same_function`
tells by how much outputs differ), so both sides train the same thing.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, relu, softplus
from torch.nn.utils.parametrizations import spectral_norm

from paragan.data.images import Images
from paragan.nets import SNGAN
from paragan.nets.norm import ConditionalBatchNorm2d, LaneBatchNorm2d
from paragan.train.run import Pair, Run, build_nets, spec_of

# name: (D's loss on real and fake logits, G's loss on fake logits)
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "hinge": (lambda real, fake: relu(1 - real) + relu(1 + fake), lambda fake: -fake),
    "nonsaturating": (lambda real, fake: softplus(-real) + softplus(fake), lambda fake: softplus(-fake)),
}


def r1(logits: Tensor, images: Tensor) -> Tensor:
    """E |grad_x D(x)|^2, from logits of images that want a gradient."""
    (slope,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return slope.flatten(1).square().sum(1).mean()


def same_pair(run: Run, images: Images) -> Pair:
    """The run's two networks as people write them, with paragan's initial weights."""
    spec, ours = spec_of(run, images), build_nets(run, spec_of(run, images), torch.device("cpu"))
    if not isinstance(run.nets, SNGAN):
        return Pair(norms(ours.g), norms(ours.d), ours.latent)  # nothing else in them is unusual
    nets, size = run.nets, (spec.channels, spec.classes)
    g, d = Generator(nets.width, nets.latent, *size), Discriminator(nets.d_width or nets.width // 2, *size)
    pair = Pair(g, d, nets.latent)
    pair.g.load_state_dict(ours.g.state_dict())
    pair.d.load_state_dict(ours.d.state_dict())
    return pair


@torch.no_grad()
def same_function(run: Run, images: Images) -> float:
    """The largest difference between the outputs of both pairs, over the largest output."""
    spec = spec_of(run, images)
    ours, plain = build_nets(run, spec, torch.device("cpu")), same_pair(run, images)
    z = torch.randn(8, run.nets.latent)
    y = torch.randint(spec.classes, (8,)) if spec.classes else None
    x = torch.rand(8, spec.channels, spec.resolution, spec.resolution) * 2 - 1
    made = [(a(b, y), c(b, y)) for a, c, b in ((ours.g.eval(), plain.g.eval(), z), (ours.d.eval(), plain.d.eval(), x))]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in made)


class Naive:
    """One loop over two networks, as tutorials write it.

    D is not frozen in G's turn, D's turn builds G's graph and cuts it with detach, spectral norm iterates at
    every forward, the optimizers are torch's default Adam, the average is a Python loop over parameters. The
    data cost nothing: rows of a float tensor on the device.
    """

    def __init__(self, run: Run, images: Images, device: torch.device | str = "cpu", bf16: bool = False):
        self.run, self.device, self.bf16 = run, torch.device(device), bf16
        pair = same_pair(run, images)
        self.g, self.d = pair.g.to(device).train(), pair.d.to(device).train()
        g, d = run.g.optimizer, run.d.optimizer
        self.g_optimizer = torch.optim.Adam(self.g.parameters(), lr=g.lr, betas=g.betas)
        self.d_optimizer = torch.optim.Adam(self.d.parameters(), lr=d.lr, betas=d.betas)
        self.average = copy.deepcopy(self.g)
        self.d_loss, self.g_loss = LOSSES[run.objective.loss]
        self.images = (
            torch.from_numpy(images.images).permute(0, 3, 1, 2).to(device).float().div(127.5).sub(1).contiguous()
        )
        self.labels = None if images.labels is None else torch.from_numpy(images.labels).to(device)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    def rows(self) -> Tensor:
        return torch.randint(len(self.images), (self.run.batch,), device=self.device)

    def latent(self) -> tuple[Tensor, Tensor | None]:
        z = torch.randn(self.run.batch, self.run.nets.latent, device=self.device)
        return z, None if self.labels is None else self.labels[self.rows()]

    def step(self) -> None:
        rows = self.rows()
        self.move_d(self.images[rows], None if self.labels is None else self.labels[rows])
        self.move_g()

    def move_d(self, real: Tensor, y: Tensor | None) -> None:
        self.d_optimizer.zero_grad()
        real.requires_grad_(self.run.objective.r1 > 0)
        with self.autocast():
            z, fake_y = self.latent()
            fake = self.g(z, fake_y)
            on_real, on_fake = self.d(real, y), self.d(fake.detach(), fake_y)
            loss = self.d_loss(on_real, on_fake).mean()
            if self.run.objective.r1:
                loss = loss + self.run.objective.r1 / 2 * r1(on_real, real)
        loss.backward()
        self.d_optimizer.step()

    def move_g(self) -> None:
        self.g_optimizer.zero_grad()
        with self.autocast():
            z, y = self.latent()
            loss = self.g_loss(self.d(self.g(z, y), y)).mean()
        loss.backward()
        self.g_optimizer.step()
        with torch.no_grad():
            for averaged, p in zip(self.average.parameters(), self.g.parameters()):
                averaged.mul_(0.999).add_(p, alpha=0.001)


class Norm(nn.BatchNorm2d):
    """torch's batch norm, called with labels that it ignores."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x)


def conditional(channels: int, classes: int) -> nn.Module:
    return ConditionalNorm(channels, classes) if classes else Norm(channels)


class ConditionalNorm(nn.Module):
    """Batch norm with a gain and a bias per class."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.norm = Norm(channels, affine=False)
        self.gain, self.bias = nn.Embedding(classes, channels), nn.Embedding(classes, channels)
        nn.init.ones_(self.gain.weight)
        nn.init.zeros_(self.bias.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.gain(y)[:, :, None, None] * self.norm(x) + self.bias(y)[:, :, None, None]


def norms(net: nn.Module) -> nn.Module:
    """A paragan network with torch's batch norm in place of batch norm by lane; parameters stay as they are."""
    for module in net.modules():
        if type(module) is LaneBatchNorm2d:
            module.__class__ = Norm
        elif type(module) is ConditionalBatchNorm2d:
            module.__class__ = ConditionalNorm
    return net


# SNGAN, as its repositories write it ------------------------------------------------------------------------


class Up(nn.Module):
    """Residual block of the generator: upsample, then convolve at the high resolution."""

    def __init__(self, a: int, b: int, classes: int):
        super().__init__()
        self.norm1, self.norm2 = conditional(a, classes), conditional(b, classes)
        self.conv1, self.conv2 = nn.Conv2d(a, b, 3, padding=1), nn.Conv2d(b, b, 3, padding=1)
        self.shortcut = nn.Conv2d(a, b, 1)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        h = self.conv1(self.up(relu(self.norm1(x, y))))
        h = self.conv2(relu(self.norm2(h, y)))
        return h + self.shortcut(self.up(x))


class Down(nn.Module):
    """Residual block of the discriminator: convolve at the high resolution, then pool."""

    def __init__(self, first: bool, a: int, b: int, down: bool):
        super().__init__()
        self.first, self.down = first, down
        self.conv1 = spectral_norm(nn.Conv2d(a, b, 3, padding=1))
        self.conv2 = spectral_norm(nn.Conv2d(b, b, 3, padding=1))
        self.shortcut = spectral_norm(nn.Conv2d(a, b, 1)) if down or a != b else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(relu(self.conv1(x if self.first else relu(x))))
        x = self.shortcut(x)
        return avg_pool2d(h, 2) + avg_pool2d(x, 2) if self.down else h + x


class Generator(nn.Module):
    """SNGAN's generator at 32 px: z [N, latent], y [N] -> [N, C, 32, 32]."""

    def __init__(self, width: int, latent: int, channels: int, classes: int):
        super().__init__()
        self.start = nn.Linear(latent, width * 4 * 4)
        self.blocks = nn.ModuleList([Up(width, width, classes) for _ in range(3)])
        self.norm = Norm(width)
        self.image = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.start(z).view(len(z), -1, 4, 4)
        for block in self.blocks:
            h = block(h, y)
        return torch.tanh(self.image(relu(self.norm(h))))


class Head(nn.Module):
    """Linear, plus the projection of the class."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.linear = spectral_norm(nn.Linear(width, 1))
        self.embedding = spectral_norm(nn.Embedding(classes, width)) if classes else None

    def forward(self, h: Tensor, y: Tensor | None) -> Tensor:
        logits = self.linear(h)[:, 0]
        return logits if self.embedding is None else logits + (self.embedding(y) * h).sum(1)


class Discriminator(nn.Module):
    """SNGAN's discriminator at 32 px: images, y [N] -> logits [N]."""

    def __init__(self, width: int, channels: int, classes: int):
        super().__init__()
        blocks = [Down(True, channels, width, True), Down(False, width, width, True)]
        self.blocks = nn.Sequential(*blocks, *(Down(False, width, width, False) for _ in range(2)))
        self.head = Head(width, classes)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.head(relu(self.blocks(x)).sum((2, 3)), y)
