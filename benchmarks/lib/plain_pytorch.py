"""GAN training in plain PyTorch, as people write it: what paragan is measured against.

`Naive` is the loop of tutorials and of most repositories; networks are computed as published implementations do it:
convolutions at the high resolution, torch's batch norm over the batch, attention by two products and a softmax, power
iteration in every forward pass. They are the same functions of the same parameters as paragan's, and begin from the
same weights; `same_function` tells by how much outputs differ.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu, softplus

from paragan.config.resolve import make_spec
from paragan.config.run import Run
from paragan.core.types import DiscriminatorOutput
from paragan.data.dataset import Dataset
from paragan.nets import DCGAN, R3GAN
from paragan.nets.attention import SelfAttention
from paragan.nets.grouped_conv import GroupedConv
from paragan.nets.lane_batch_norm import ConditionalBatchNorm2d, LaneBatchNorm2d, LinearConditionalBatchNorm2d
from paragan.train.build import Networks, build_networks

# name: (D's loss, G's loss), of real and fake logits
LossTerm = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[LossTerm, LossTerm]] = {
    "hinge": (lambda real, fake: relu(1 - real) + relu(1 + fake), lambda real, fake: -fake),
    "nonsaturating": (lambda real, fake: softplus(-real) + softplus(fake), lambda real, fake: softplus(-fake)),
    "relativistic": (lambda real, fake: softplus(fake - real), lambda real, fake: softplus(real - fake)),
}


def grad_norm_squared(logits: Tensor, images: Tensor) -> Tensor:
    """E |grad_x D(x)|^2, from logits of images that want a gradient: R1 of reals, R2 of fakes."""
    (slope,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return slope.flatten(1).square().sum(1).mean()


def contrastive_loss(verdict: DiscriminatorOutput, labels: Tensor, temperature: float) -> Tensor:
    """ContraGAN's 2C loss: every image against its label's proxy and against all other images."""
    assert verdict.embedding is not None
    assert verdict.proxies is not None
    to_proxy = (verdict.embedding * verdict.proxies).sum(1, keepdim=True)  # [N, 1]
    others = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    alike = (labels[:, None] == labels[None]) & others
    to_images = verdict.embedding @ verdict.embedding.T
    every = torch.cat([to_proxy, to_images.masked_fill(~others, -torch.inf)], 1) / temperature
    same = torch.cat([to_proxy, to_images.masked_fill(~alike, -torch.inf)], 1) / temperature
    return (every.logsumexp(1) - same.logsumexp(1)).mean()


def make_same_networks(run: Run, images: Dataset) -> Networks:
    """The run's two networks as people write them, with paragan's initial weights."""
    nets = run.nets if isinstance(run.nets, DCGAN | R3GAN) else dataclasses.replace(run.nets, fused_resampling=False)
    written = dataclasses.replace(run, nets=nets, device=dataclasses.replace(run.device, channels_last=False))
    pair = build_networks(written, make_spec(run, images), torch.device("cpu"))
    return Networks(to_plain_layers(pair.g), to_plain_layers(pair.d), pair.latent)


@torch.no_grad()
def max_output_difference(run: Run, images: Dataset) -> float:
    """The largest difference between the outputs of both pairs, over the largest output."""
    spec = make_spec(run, images)
    ours, plain = build_networks(run, spec, torch.device("cpu")), make_same_networks(run, images)
    z = torch.randn(8, run.nets.latent)
    y = torch.randint(spec.classes, (8,)) if spec.classes else None
    x = torch.rand(8, spec.channels, spec.resolution, spec.resolution) * 2 - 1
    sides = (ours.g.eval(), plain.g.eval(), z), (ours.d.eval(), plain.d.eval(), x)
    made = [(logits_of(a(b, y)), logits_of(c(b, y))) for a, c, b in sides]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in made)


def logits_of(verdict: Tensor | DiscriminatorOutput) -> Tensor:
    return verdict.logits if isinstance(verdict, DiscriminatorOutput) else verdict


class PlainTrainer:
    """One loop over two networks, as tutorials write it.

    D is not frozen in G's turn, D's turn builds G's graph and cuts it with detach, spectral norm iterates at
    every forward, the optimizers are torch's default Adam, the average is a Python loop over parameters. The
    data cost nothing: rows of a float tensor on the device.
    """

    def __init__(self, run: Run, images: Dataset, device: torch.device | str = "cpu", bf16: bool = False):
        self.run, self.device, self.bf16 = run, torch.device(device), bf16
        pair = make_same_networks(run, images)
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

    def next_batch(self) -> Tensor:
        return torch.randint(len(self.images), (self.run.batch,), device=self.device)

    def sample_latent(self) -> tuple[Tensor, Tensor | None]:
        z = torch.randn(self.run.batch, self.run.nets.latent, device=self.device)
        return z, None if self.labels is None else self.labels[self.next_batch()]

    def step(self) -> None:
        """A round: D so many times, then G."""
        for _ in range(self.run.d_steps):
            rows = self.next_batch()
            reals = self.images[rows], None if self.labels is None else self.labels[rows]
            self.step_d(*reals)
        self.step_g(*reals)

    def step_d(self, real: Tensor, y: Tensor | None) -> None:
        self.d_optimizer.zero_grad()
        wanted = self.run.objective
        real.requires_grad_(wanted.r1 > 0)
        with self.autocast():
            z, fake_y = self.sample_latent()
            fake = self.g(z, fake_y).detach().requires_grad_(wanted.r2 > 0)
            of_real, of_fake = self.d(real, y), self.d(fake, fake_y)
            on_real, on_fake = logits_of(of_real), logits_of(of_fake)
            loss = self.d_loss(on_real, on_fake).mean() + self.class_loss(of_real, y)
            if wanted.r1:
                loss = loss + wanted.r1 / 2 * grad_norm_squared(on_real, real)
            if wanted.r2:
                loss = loss + wanted.r2 / 2 * grad_norm_squared(on_fake, fake)
        loss.backward()
        self.d_optimizer.step()

    def step_g(self, real: Tensor, real_y: Tensor | None) -> None:
        self.g_optimizer.zero_grad()
        with self.autocast():
            z, y = self.sample_latent()
            verdict = self.d(self.g(z, y), y)
            on_fake = logits_of(verdict)
            on_real = logits_of(self.d(real.detach(), real_y)) if self.run.objective.is_paired else on_fake
            loss = self.g_loss(on_real, on_fake).mean() + self.class_loss(verdict, y)
        loss.backward()
        self.g_optimizer.step()
        with torch.no_grad():
            for averaged, p in zip(self.average.parameters(), self.g.parameters()):
                averaged.mul_(0.999).add_(p, alpha=0.001)

    def class_loss(self, verdict: Tensor | DiscriminatorOutput, y: Tensor | None) -> Tensor | float:
        """What D's head for labels adds to a loss."""
        wanted = self.run.objective
        if not isinstance(verdict, DiscriminatorOutput) or y is None:
            return 0.0
        if wanted.contrastive:
            return wanted.contrastive * contrastive_loss(verdict, y, wanted.temperature)
        assert verdict.class_logits is not None
        return wanted.classifier * cross_entropy(verdict.class_logits, y)


class PlainBatchNorm(nn.BatchNorm2d):
    """torch's batch norm, called with labels that it ignores."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x)


class PlainConditionalBatchNorm(ConditionalBatchNorm2d):
    """A gain and a bias per class."""

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self.gain(y)[:, :, None, None] * self.norm(x) + self.bias(y)[:, :, None, None]


class PlainLinearConditionalBatchNorm(LinearConditionalBatchNorm2d):
    """A gain and a bias from a vector."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return (1 + self.gain(c))[:, :, None, None] * self.norm(x) + self.bias(c)[:, :, None, None]


class PlainSelfAttention(SelfAttention):
    """By two products and a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        theta, phi, g = self.theta(x), max_pool2d(self.phi(x), 2), max_pool2d(self.g(x), 2)
        shares = torch.bmm(theta.flatten(2).transpose(1, 2), phi.flatten(2)).softmax(-1)  # [N, HW, HW / 4]
        seen = torch.bmm(g.flatten(2), shares.transpose(1, 2)).view(len(x), -1, *x.shape[2:])
        return x + self.gamma * self.o(seen)


PLAIN_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    LaneBatchNorm2d: PlainBatchNorm,
    ConditionalBatchNorm2d: PlainConditionalBatchNorm,
    LinearConditionalBatchNorm2d: PlainLinearConditionalBatchNorm,
    SelfAttention: PlainSelfAttention,
    GroupedConv: nn.Conv2d,
}


def to_plain_layers(net: nn.Module) -> nn.Module:
    """A paragan network whose layers compute as people write them; parameters stay as they are."""
    for module in net.modules():
        if type(module) in PLAIN_LAYERS:
            module.__class__ = PLAIN_LAYERS[type(module)]
    return net
