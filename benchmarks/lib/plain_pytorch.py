"""GAN training in plain PyTorch, as it is usually written: the baseline of the benchmarks.

`PlainTrainer` is the loop of tutorials and of most repositories. Networks are computed as published implementations do
it: convolutions at the high resolution, torch's batch norm over the batch, attention by two products and a softmax,
power iteration in every forward pass. They are the same functions of the same parameters as paragan's, and start from
the same weights; `max_output_difference` measures by how much outputs differ.
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

LossTerm = Callable[[Tensor, Tensor], Tensor]  # of real and fake logits
# name: (D's loss, G's loss)
LOSSES: dict[str, tuple[LossTerm, LossTerm]] = {
    "hinge": (lambda real, fake: relu(1 - real) + relu(1 + fake), lambda real, fake: -fake),
    "nonsaturating": (lambda real, fake: softplus(-real) + softplus(fake), lambda real, fake: softplus(-fake)),
    "relativistic": (lambda real, fake: softplus(fake - real), lambda real, fake: softplus(real - fake)),
}


def grad_norm_squared(logits: Tensor, images: Tensor) -> Tensor:
    """Return E |grad_x D(x)|^2, from the logits of images that require a gradient: R1 of reals, R2 of fakes."""
    (gradient,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return gradient.flatten(1).square().sum(1).mean()


def contrastive_loss(output: DiscriminatorOutput, labels: Tensor, temperature: float) -> Tensor:
    """Return ContraGAN's 2C loss: every image against its label's proxy and against all other images."""
    assert output.embedding is not None
    assert output.proxies is not None
    to_proxy = (output.embedding * output.proxies).sum(1, keepdim=True)  # [N, 1]
    others = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    same_label = (labels[:, None] == labels[None]) & others
    to_images = output.embedding @ output.embedding.T
    all_pairs = torch.cat([to_proxy, to_images.masked_fill(~others, -torch.inf)], 1) / temperature
    positive_pairs = torch.cat([to_proxy, to_images.masked_fill(~same_label, -torch.inf)], 1) / temperature
    return (all_pairs.logsumexp(1) - positive_pairs.logsumexp(1)).mean()


def make_same_networks(run: Run, images: Dataset) -> Networks:
    """Return the run's two networks in plain layers, with paragan's initial weights."""
    nets = run.nets if isinstance(run.nets, DCGAN | R3GAN) else dataclasses.replace(run.nets, fused_resampling=False)
    plain_run = dataclasses.replace(run, nets=nets, device=dataclasses.replace(run.device, channels_last=False))
    pair = build_networks(plain_run, make_spec(run.data, images), torch.device("cpu"))
    return Networks(to_plain_layers(pair.g), to_plain_layers(pair.d), pair.latent)


@torch.no_grad()
def max_output_difference(run: Run, images: Dataset) -> float:
    """Return the largest difference between the outputs of both pairs, relative to the largest output."""
    spec = make_spec(run.data, images)
    networks = build_networks(run, spec, torch.device("cpu"))
    plain = make_same_networks(run, images)
    z = torch.randn(8, run.nets.latent)
    y = torch.randint(spec.classes, (8,)) if spec.classes else None
    x = torch.rand(8, *spec.shape) * 2 - 1
    sides = (networks.g.eval(), plain.g.eval(), z), (networks.d.eval(), plain.d.eval(), x)
    outputs = [(logits_of(net(x, y)), logits_of(plain_net(x, y))) for net, plain_net, x in sides]
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in outputs)


def logits_of(output: Tensor | DiscriminatorOutput) -> Tensor:
    """Return D's logits, or G's images as they are."""
    return output.logits if isinstance(output, DiscriminatorOutput) else output


class PlainTrainer:
    """Train a GAN in a plain PyTorch loop, as tutorials write it.

    D is not frozen in G's turn, D's turn builds G's graph and cuts it with detach, spectral norm iterates in every
    forward pass, the optimizers are torch's default Adam, the EMA is a Python loop over parameters. Its data are free:
    rows of a float tensor on the device.
    """

    def __init__(self, run: Run, images: Dataset, device: torch.device | str = "cpu", bf16: bool = False):
        self.run, self.device, self.bf16 = run, torch.device(device), bf16
        pair = make_same_networks(run, images)
        self.g, self.d = pair.g.to(device).train(), pair.d.to(device).train()
        g, d = run.g.optimizer, run.d.optimizer
        self.g_optimizer = torch.optim.Adam(self.g.parameters(), lr=g.lr, betas=g.betas)
        self.d_optimizer = torch.optim.Adam(self.d.parameters(), lr=d.lr, betas=d.betas)
        self.ema = copy.deepcopy(self.g)
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
        """Play a round: `d_steps` steps of D, then one of G."""
        for _ in range(self.run.d_steps):
            rows = self.next_batch()
            reals = self.images[rows], None if self.labels is None else self.labels[rows]
            self.step_d(*reals)
        self.step_g(*reals)

    def step_d(self, real: Tensor, y: Tensor | None) -> None:
        self.d_optimizer.zero_grad()
        objective = self.run.objective
        real.requires_grad_(objective.r1 > 0)
        with self.autocast():
            z, fake_y = self.sample_latent()
            fake = self.g(z, fake_y).detach().requires_grad_(objective.r2 > 0)
            real_output, fake_output = self.d(real, y), self.d(fake, fake_y)
            on_real, on_fake = logits_of(real_output), logits_of(fake_output)
            loss = self.d_loss(on_real, on_fake).mean() + self.class_loss(real_output, y)
            if objective.r1:
                loss = loss + objective.r1 / 2 * grad_norm_squared(on_real, real)
            if objective.r2:
                loss = loss + objective.r2 / 2 * grad_norm_squared(on_fake, fake)
        loss.backward()
        self.d_optimizer.step()

    def step_g(self, real: Tensor, real_y: Tensor | None) -> None:
        self.g_optimizer.zero_grad()
        with self.autocast():
            z, y = self.sample_latent()
            output = self.d(self.g(z, y), y)
            on_fake = logits_of(output)
            on_real = logits_of(self.d(real.detach(), real_y)) if self.run.objective.is_paired else on_fake
            loss = self.g_loss(on_real, on_fake).mean() + self.class_loss(output, y)
        loss.backward()
        self.g_optimizer.step()
        with torch.no_grad():
            for ema, p in zip(self.ema.parameters(), self.g.parameters()):
                ema.mul_(0.999).add_(p, alpha=0.001)

    def class_loss(self, output: Tensor | DiscriminatorOutput, y: Tensor | None) -> Tensor | float:
        """Return what D's head for labels adds to a loss."""
        objective = self.run.objective
        if not isinstance(output, DiscriminatorOutput) or y is None:
            return 0.0
        if objective.contrastive:
            return objective.contrastive * contrastive_loss(output, y, objective.temperature)
        assert output.class_logits is not None
        return objective.classifier * cross_entropy(output.class_logits, y)


class PlainBatchNorm(nn.BatchNorm2d):
    """torch's batch norm, which ignores the labels."""

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
    """Attention by two products and a softmax."""

    def forward(self, x: Tensor) -> Tensor:
        theta = self.theta(x)
        phi = max_pool2d(self.phi(x), 2)
        g = max_pool2d(self.g(x), 2)
        weights = torch.bmm(theta.flatten(2).transpose(1, 2), phi.flatten(2)).softmax(-1)  # [N, HW, HW / 4]
        attended = torch.bmm(g.flatten(2), weights.transpose(1, 2)).view(len(x), -1, *x.shape[2:])
        return x + self.gamma * self.o(attended)


PLAIN_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    LaneBatchNorm2d: PlainBatchNorm,
    ConditionalBatchNorm2d: PlainConditionalBatchNorm,
    LinearConditionalBatchNorm2d: PlainLinearConditionalBatchNorm,
    SelfAttention: PlainSelfAttention,
    GroupedConv: nn.Conv2d,
}


def to_plain_layers(net: nn.Module) -> nn.Module:
    """Replace the layers of a paragan network by plain ones, in place; parameters keep their values."""
    for module in net.modules():
        if type(module) in PLAIN_LAYERS:
            module.__class__ = PLAIN_LAYERS[type(module)]
    return net
