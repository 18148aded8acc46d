"""The newer families in plain PyTorch, in the order of operations of their papers: the baseline of benchmarks.

    PlainStyleGAN2      a weight for each image, all convolved as groups; noise by torch.randn; filters as zeros between
                        pixels and a depthwise convolution; lazy R1 and path length by autograd (Karras et al. 2020)
    PlainGAT            relativistic loss on noisy levels, finite differences, torch's attention (Hyun et al. 2025)
    PlainDiffusion      the denoising loss (Karras et al. 2022, EDM)
    PlainDistillation   five steps of the critic and one of G (Yin et al. 2024, DMD2)
    PlainFeatureGAN     SNGAN whose D also sees maps of a frozen network (Kumari et al. 2022, Sauer et al. 2021)

All have torch's default Adam, contiguous float32 tensors, an average of G by a loop over its parameters, and an
opponent without gradients, as the authors' loops do. Networks are the same functions of the same parameters as
paragan's, and start from the same weights. Layers that are usually written as paragan has them are paragan's own:
linear, normalised and equalized layers, the blocks of GAT, and all of the U-net but its attention.
`max_output_difference` measures by how much outputs differ.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lib.plain_pytorch import LOSSES, grad_norm_squared, logits_of, to_plain_layers
from paragan.config.resolve import make_spec
from paragan.config.run import Run
from paragan.core.noise_map import with_noise_map
from paragan.core.types import DiscriminatorOutput
from paragan.data.dataset import Dataset
from paragan.losses.adversarial import Adversarial
from paragan.losses.denoising import Denoising
from paragan.losses.distribution_matching import DistributionMatching
from paragan.losses.noise_levels import signal_fractions
from paragan.nets import SNGAN
from paragan.nets.denoiser import Denoiser
from paragan.nets.equalized import leaky_relu
from paragan.nets.feature_discriminator import FeatureDiscriminator
from paragan.nets.fir_resample import FIRFilter
from paragan.nets.mapping_network import MappingNetwork, normalize_mean_square
from paragan.nets.minibatch_stddev import MinibatchStddev
from paragan.nets.modulated_conv import EPSILON, ModulatedConv
from paragan.nets.stylegan2 import StyleGenerator, StyleLayer
from paragan.nets.transformer import Attention
from paragan.nets.unet import RESIDUAL_GAIN, MapAttention
from paragan.train.build import Networks, build_networks

CPU = torch.device("cpu")
EMA_DECAY = 0.999


def make_same_networks(run: Run, data: Dataset) -> Networks:
    """Return the run's two networks in plain layers, with paragan's initial weights."""
    nets = dataclasses.replace(run.nets, fused_resampling=False) if isinstance(run.nets, SNGAN) else run.nets
    plain_run = dataclasses.replace(run, nets=nets, device=dataclasses.replace(run.device, channels_last=False))
    networks = build_networks(plain_run, make_spec(run.data, data), CPU)
    for net in (networks.g, networks.d):
        to_plain_layers(net)
        for module in net.modules():
            module.__class__ = PLAIN_FAMILY_LAYERS.get(type(module), type(module))
    return networks


@torch.no_grad()
def max_output_difference(run: Run, data: Dataset) -> float:
    """Return the largest difference between the outputs of both pairs, relative to the largest output.

    All parameters are moved from their first values, since some layers start at 0.
    """
    spec = make_spec(run.data, data)
    outputs: list[tuple[Tensor, Tensor]] = []
    for networks in (build_networks(run, spec, CPU), make_same_networks(run, data)):
        torch.manual_seed(0)
        z = torch.randn(8, run.nets.latent)
        x = torch.rand(8, *spec.shape) * 2 - 1
        y = torch.arange(8) % spec.classes if spec.classes else None
        for p in (*networks.g.parameters(), *networks.d.parameters()):
            p.add_(0.05 * torch.randn(p.shape))
        g, d = networks.g.eval(), networks.d.eval()
        images = g.denoise(x, x.flatten(1).std(1), y) if isinstance(g, Denoiser) else g(z, y)
        outputs.append((images, logits_of(d(x, y))))
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-9)) for a, b in zip(*outputs))


# Loops ----------------------------------------------------------------------------------------------------


class PlainFamily:
    """Base of the loops: networks, optimizers, and a data set that is a float tensor.

    rounds   : how many have been played
    trains_d : whether D takes steps
    """

    trains_d = True

    def __init__(self, run: Run, data: Dataset):
        self.run = run
        self.objective = cast(Any, run.objective)
        self.rounds = 0
        networks = make_same_networks(run, data)
        self.g: Any = networks.g.train()
        self.d: Any = networks.d.train()
        self.ema = copy.deepcopy(self.g)
        self.g_optimizer = make_adam(self.g, run.g.optimizer)
        self.d_optimizer = make_adam(self.d, run.d.optimizer)
        self.images = torch.from_numpy(data.images).permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()
        self.labels = torch.from_numpy(data.labels)

    def step(self) -> None:
        """Play a round: `d_steps` steps of D, then one of G on the last reals."""
        for _ in range(self.run.d_steps):
            rows = torch.randint(len(self.images), (self.run.batch,))
            real, y = self.images[rows], self.labels[rows]
            if self.trains_d:
                self.train_only(self.d)
                self.update(self.d_optimizer, self.d, self.d_loss(real, y), self.run.d.max_norm)
        self.train_only(self.g)
        self.update(self.g_optimizer, self.g, self.g_loss(real.detach(), y), self.run.g.max_norm)
        self.update_average()
        self.rounds += 1

    def d_loss(self, real: Tensor, y: Tensor) -> Tensor:
        """Return D's loss on a batch of reals and one of fakes."""
        raise NotImplementedError

    def g_loss(self, real: Tensor, y: Tensor) -> Tensor:
        """Return G's loss."""
        raise NotImplementedError

    def train_only(self, net: nn.Module) -> None:
        """Compute gradients for one network."""
        for other in (self.g, self.d):
            other.requires_grad_(other is net)

    def update(self, optimizer: torch.optim.Optimizer, net: nn.Module, loss: Tensor, max_norm: float | None) -> None:
        """Take a step of an optimizer."""
        optimizer.zero_grad()
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()

    @torch.no_grad()
    def update_average(self) -> None:
        """Move the average of G."""
        for average, p in zip(self.ema.parameters(), self.g.parameters()):
            average.mul_(EMA_DECAY).add_(p, alpha=1 - EMA_DECAY)

    def sample_inputs(self, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Return latents and labels for `count` fakes, or for a batch."""
        count = count or self.run.batch
        return torch.randn(count, self.run.nets.latent), self.labels[torch.randint(len(self.labels), (count,))]


def make_adam(net: nn.Module, config: Any) -> torch.optim.Optimizer:
    """Return torch's Adam in its default implementation."""
    return torch.optim.Adam(net.parameters(), config.lr, config.betas, config.eps)


class PlainStyleGAN2(PlainFamily):
    """StyleGAN2's loop. Penalties are part of the step in which they are due, as in paragan."""

    def __init__(self, run: Run, data: Dataset):
        super().__init__(run, data)
        assert isinstance(run.objective, Adversarial)
        self.mean_length = torch.zeros(())

    def d_loss(self, real: Tensor, y: Tensor) -> Tensor:
        objective: Adversarial = self.objective
        z, fake_y = self.sample_inputs()
        with torch.no_grad():
            fake = self.g(z, fake_y)
        has_r1 = self.rounds % objective.r1_every == 0
        real.requires_grad_(has_r1)
        on_real = self.d(real, y)
        loss = F.softplus(-on_real).mean() + F.softplus(self.d(fake, fake_y)).mean()
        if has_r1:
            loss = loss + objective.r1 / 2 * objective.r1_every * grad_norm_squared(on_real, real)
        return loss

    def g_loss(self, real: Tensor, y: Tensor) -> Tensor:
        objective: Adversarial = self.objective
        z, fake_y = self.sample_inputs()
        loss = F.softplus(-self.d(self.g(z, fake_y), fake_y)).mean()
        if self.rounds % objective.path_length_every == 0:
            loss = loss + objective.path_length * objective.path_length_every * self.path_length_penalty()
        return loss

    def path_length_penalty(self) -> Tensor:
        """Return E (|J^T n| - a)^2 on half a batch, with a the running mean of |J^T n|."""
        ws = self.g.styles(*self.sample_inputs(self.run.batch // 2))
        images = self.g.synthesis(ws)
        noise = torch.randn_like(images) / math.sqrt(images.shape[2] * images.shape[3])
        (gradient,) = torch.autograd.grad((images * noise).sum(), ws, create_graph=True)
        lengths = gradient.square().sum(2).mean(1).sqrt()
        self.mean_length = torch.lerp(lengths.detach().mean(), self.mean_length, self.objective.path_length_decay)
        return (lengths - self.mean_length).square().mean()


class PlainGAT(PlainFamily):
    """GAT's loop: D sees the images of all levels at once."""

    def d_loss(self, real: Tensor, y: Tensor) -> Tensor:
        z, fake_y = self.sample_inputs()
        with torch.no_grad():
            fake_levels = self.g(z, fake_y).levels
        real, fake = self.to_noisy_levels(self.repeat_levels(real)), self.to_noisy_levels(fake_levels)
        on_real, on_fake = self.d(real, y), self.d(fake, fake_y)
        loss = LOSSES["relativistic"][0](on_real, on_fake).mean()
        r1, r2 = self.squared_slope(real, y, on_real), self.squared_slope(fake, fake_y, on_fake)
        return loss + self.objective.r1 / 2 * r1 + self.objective.r2 / 2 * r2

    def g_loss(self, real: Tensor, y: Tensor) -> Tensor:
        z, fake_y = self.sample_inputs()
        on_fake = self.d(self.to_noisy_levels(self.g(z, fake_y).levels), fake_y)
        with torch.no_grad():
            on_real = self.d(self.to_noisy_levels(self.repeat_levels(real)), y)
        return LOSSES["relativistic"][1](on_real, on_fake).mean()

    def repeat_levels(self, real: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, K, C, H, W]."""
        return real[:, None].expand(-1, self.objective.noise_levels, -1, -1, -1)

    def to_noisy_levels(self, levels: Tensor) -> Tensor:
        """Augment images [N, K, C, H, W], and add noise by level: [N, K C, H, W]."""
        levels = augment_plainly(levels)
        signal = signal_fractions(levels.shape[1], self.objective.least_signal)[:, None, None, None]
        return (signal * levels + (1 - signal.square()).sqrt() * torch.randn_like(levels)).flatten(1, 2)

    def squared_slope(self, x: Tensor, y: Tensor, logits: Tensor) -> Tensor:
        """Return E |(D(x + s n) - D(x)) / s|^2."""
        sigma = self.objective.difference_sigma
        return ((self.d(x + sigma * torch.randn_like(x), y) - logits) / sigma).square().mean()


class PlainDiffusion(PlainFamily):
    """EDM's loop: one network, which learns to remove noise."""

    trains_d = False

    def g_loss(self, real: Tensor, y: Tensor) -> Tensor:
        objective: Denoising = self.objective
        sigma = (objective.p_mean + objective.p_std * torch.randn(len(real))).exp()
        noisy = real + sigma[:, None, None, None] * torch.randn_like(real)
        return denoising_loss(self.g.denoise(noisy, sigma, y), real, sigma, self.g.sigma_data)


class PlainDistillation(PlainFamily):
    """DMD2's loop. The critic is D, a denoiser with a head; the teacher starts from random weights."""

    def __init__(self, run: Run, data: Dataset):
        super().__init__(run, data)
        self.teacher: Any = make_same_networks(run, data).g.eval().requires_grad_(False)

    def d_loss(self, real: Tensor, y: Tensor) -> Tensor:
        objective: DistributionMatching = self.objective
        z, fake_y = self.sample_inputs()
        with torch.no_grad():
            fake = self.g(z, fake_y)
        sigma = (objective.p_mean + objective.p_std * torch.randn(len(real))).exp()
        on_fake, _ = self.run_critic(fake, sigma, fake_y)
        on_real, _ = self.run_critic(real, sigma, y)
        gan_loss = F.softplus(on_fake.logits).mean() + F.softplus(-on_real.logits).mean()
        denoising = denoising_loss(on_fake.features[0], fake, sigma, self.teacher.sigma_data)
        return denoising + objective.d_adversarial * gan_loss

    def g_loss(self, real: Tensor, y: Tensor) -> Tensor:
        z, fake_y = self.sample_inputs()
        fake = self.g(z, fake_y)
        part = 0.02 + 0.96 * torch.rand(len(fake))
        largest, least = self.teacher.sigma_max ** (1 / 7), self.teacher.sigma_min ** (1 / 7)
        sigma = (largest + part * (least - largest)) ** 7
        on_fake, noisy = self.run_critic(fake, sigma, fake_y)
        with torch.no_grad():
            by_teacher = self.teacher.denoise(noisy, sigma, fake_y)
            distance = (fake - by_teacher).abs().mean((1, 2, 3), keepdim=True)
            gradient = (on_fake.features[0] - by_teacher) / distance
        matching = 0.5 * F.mse_loss(fake, (fake - gradient).detach())  # whose gradient is `gradient`
        return matching + self.objective.adversarial * F.softplus(-on_fake.logits).mean()

    def run_critic(self, images: Tensor, sigma: Tensor, y: Tensor) -> tuple[DiscriminatorOutput, Tensor]:
        """Return what the critic says of images with noise, and these."""
        noisy = images + sigma[:, None, None, None] * torch.randn_like(images)
        return self.d(with_noise_map(noisy, sigma), y), noisy


class PlainFeatureGAN(PlainFamily):
    """SNGAN with hinge losses, summed over D's own network and those on the maps of a frozen one."""

    def d_loss(self, real: Tensor, y: Tensor) -> Tensor:
        z, fake_y = self.sample_inputs()
        with torch.no_grad():
            fake = self.g(z, fake_y)
        pairs = zip(self.d.all_logits(real, y), self.d.all_logits(fake, fake_y))
        return torch.stack([LOSSES["hinge"][0](on_real, on_fake).mean() for on_real, on_fake in pairs]).sum()

    def g_loss(self, real: Tensor, y: Tensor) -> Tensor:
        z, fake_y = self.sample_inputs()
        return torch.stack([-on_fake.mean() for on_fake in self.d.all_logits(self.g(z, fake_y), fake_y)]).sum()


def denoising_loss(denoised: Tensor, images: Tensor, sigma: Tensor, sigma_data: float) -> Tensor:
    """Return EDM's weighted squared error."""
    weight = (sigma.square() + sigma_data**2) / (sigma * sigma_data).square()
    return (weight[:, None, None, None] * (denoised - images).square()).mean()


def augment_plainly(x: Tensor) -> Tensor:
    """Change colours, shift and cut out as Zhao et al. 2020 (DiffAugment), the same for the levels of an image.

    Args:
        x: [N, K, C, H, W].
    """
    n, _, _, height, width = x.shape
    per_image = (n, 1, 1, 1, 1)
    x = x + torch.rand(per_image) - 0.5
    mean = x.mean(2, keepdim=True)
    x = mean + (x - mean) * 2 * torch.rand(per_image)
    mean = x.mean((2, 3, 4), keepdim=True)
    x = mean + (x - mean) * (0.5 + torch.rand(per_image))

    rows, columns = torch.arange(height)[None, :, None], torch.arange(width)[None, None, :]
    down, right = (torch.randint(-size // 8, size // 8 + 1, (n, 1, 1)) for size in (height, width))
    padded = F.pad(x.flatten(1, 2), (1, 1, 1, 1)).permute(0, 2, 3, 1)
    source_rows = (rows + down + 1).clamp(0, height + 1)
    source_columns = (columns + right + 1).clamp(0, width + 1)
    x = padded[torch.arange(n)[:, None, None], source_rows, source_columns].permute(0, 3, 1, 2).view(x.shape)

    top, left = (torch.randint(size + 1, (n, 1, 1)) - size // 4 for size in (height, width))
    in_rows = (rows >= top) & (rows < top + height // 2)
    in_columns = (columns >= left) & (columns < left + width // 2)
    return x * ~(in_rows & in_columns)[:, None, None]


# Layers ---------------------------------------------------------------------------------------------------


class PlainFIRFilter(FIRFilter):
    """Zeros between pixels, then a depthwise convolution."""

    def upsample(self, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        spread = F.pad(x[:, :, :, None, :, None], (0, 1, 0, 0, 0, 1)).reshape(n, channels, 2 * height, 2 * width)
        return 4 * self._smooth(F.pad(spread, (2, 1, 2, 1)), stride=1, padding=0)

    def _smooth(self, x: Tensor, stride: int, padding: int) -> Tensor:
        channels = x.shape[1]
        return F.conv2d(x, self.kernel.expand(channels, 1, 4, 4), None, stride, padding, groups=channels)


class PlainModulatedConv(ModulatedConv):
    """A weight for each image; the images of a batch are the groups of one convolution."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        n, _, height, width = x.shape
        style = self.affine(w) * self.style_gain
        weight = self.weight * style[:, None, :, None, None]
        if self.demodulate:
            weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + EPSILON).rsqrt()
        x = x.reshape(1, -1, height, width)
        if self.fir is not None:
            y = F.conv_transpose2d(x, weight.transpose(1, 2).flatten(0, 1), stride=2, groups=n)
            return self.fir.smooth(4 * y.view(n, -1, *y.shape[2:]), padding=1)
        y = F.conv2d(x, weight.flatten(0, 1), padding=weight.shape[-1] // 2, groups=n)
        return y.view(n, -1, height, width)


class PlainStyleLayer(StyleLayer):
    """Noise by torch.randn in training; else that of paragan, so that outputs can be compared."""

    def forward(self, x: Tensor, w: Tensor, keys: Tensor | None) -> Tensor:
        if not self.training:
            return super().forward(x, w, keys)
        assert self.noise_strength is not None
        y = self.conv(x, w)
        y = y + torch.randn(len(y), 1, *y.shape[2:]) * self.noise_strength
        return leaky_relu(y + self.bias[:, None, None])


class PlainStyleGenerator(StyleGenerator):
    """Styles of a second latent by torch's own random numbers in training, from one layer on for all of a batch."""

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        return self.synthesis(self.styles(z, y)) if self.training else super().forward(z, y)

    def styles(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        ws = self.mapping(z, y)[:, None].repeat(1, self.num_styles, 1)
        if self.training and self.style_mixing:
            others = self.mapping(torch.randn_like(z), y)[:, None].repeat(1, self.num_styles, 1)
            first = int(torch.randint(1, self.num_styles, ())) if torch.rand(()) < self.style_mixing else None
            ws = ws if first is None else torch.cat([ws[:, :first], others[:, first:]], 1)
        return ws


class PlainMappingNetwork(MappingNetwork):
    """The mean style moves in the forward pass."""

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        x = normalize_mean_square(z)
        if self.embedding is not None:
            x = torch.cat([x, normalize_mean_square(self.embedding(y))], 1)
        for layer in self.layers:
            x = leaky_relu(layer(x))
        if self.training:
            self.average.mean.lerp_(x.detach().mean(0), 1 - self.average.decay)
        return x


class PlainMinibatchStddev(MinibatchStddev):
    """Groups of all images of a batch, far apart as published."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        group = next(size for size in range(min(self.group, len(x)), 0, -1) if len(x) % size == 0)
        maps = x.unflatten(0, (group, -1))
        deviation = (maps.var(0, correction=0) + 1e-8).sqrt().mean((1, 2, 3), keepdim=True)
        return torch.cat([x, deviation.repeat(group, 1, *x.shape[2:])], 1)


class PlainAttention(Attention):
    """torch's attention."""

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.inputs(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys = self._rotate(self.query_norm(queries)), self._rotate(self.key_norm(keys))
        attended = F.scaled_dot_product_attention(queries, keys, values)
        return self.output(attended.transpose(1, 2).flatten(2))


class PlainMapAttention(MapAttention):
    """torch's attention."""

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.inputs(self.norm(x)).flatten(2).mT[:, None].chunk(3, dim=3)
        attended = F.scaled_dot_product_attention(queries, keys, values)
        return (x + self.output(attended[:, 0].mT.unflatten(2, x.shape[2:]))) * RESIDUAL_GAIN


class PlainFeatureDiscriminator(FeatureDiscriminator):
    """A list of logits: of the network on images, and of those on maps."""

    def all_logits(self, x: Tensor, y: Tensor) -> list[Tensor]:
        assert self.base is not None
        return [logits_of(self.base(x, y)), *(head(m, y) for head, m in zip(self.heads, self.maps(x)))]


PLAIN_FAMILY_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    FIRFilter: PlainFIRFilter,
    ModulatedConv: PlainModulatedConv,
    StyleLayer: PlainStyleLayer,
    StyleGenerator: PlainStyleGenerator,
    MappingNetwork: PlainMappingNetwork,
    MinibatchStddev: PlainMinibatchStddev,
    Attention: PlainAttention,
    MapAttention: PlainMapAttention,
    FeatureDiscriminator: PlainFeatureDiscriminator,
}
