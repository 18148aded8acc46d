"""Autoencoders, upscalers and vocoders in plain PyTorch, as they are usually trained: the baseline of benchmarks.

Each loop has the order of operations of a published one: `PlainTokenizer` that of VQGAN and LlamaGen, `PlainUpscaler`
that of Real-ESRGAN, `PlainVocoder` that of HiFi-GAN. Networks are computed as published implementations do it:
convolutions at the high resolution, a codebook that moves within the forward pass, weight norm in every call. They are
the same functions of the same parameters as paragan's, and start from the same weights; `max_output_difference`
measures by how much outputs differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.lib.plain_pytorch import LOSSES, logits_of
from paragan.config.resolve import make_spec
from paragan.config.run import Run
from paragan.core.frozen_features import load_frozen
from paragan.core.rng import LaneRng
from paragan.core.spectrograms import LEAST_MEL, LEAST_POWER, MelConfig, mel_filters
from paragan.core.types import Batch, DiscriminatorOutput, primary_array
from paragan.data.dataset import Dataset
from paragan.losses.reconstruction import Reconstruction
from paragan.nets.codebook import LAPLACE, QuantizerOutput, VectorQuantizer, to_rows
from paragan.nets.ensemble import DiscriminatorEnsemble
from paragan.nets.hifigan import LAST_SLOPE, LEAKY_RELU_SLOPE, DilatedBlock, HiFiGANGenerator
from paragan.nets.resample import DownConv, UpConv
from paragan.nets.super_resolution import ResidualUpscaler, SuperResolution
from paragan.nets.vocoder import HiFiGAN
from paragan.nets.vq_autoencoder import GroupNormBlock
from paragan.nets.wave_discriminators import FeatureStack, PeriodDiscriminator
from paragan.train.build import Networks, build_networks

CPU = torch.device("cpu")
EMA_DECAY = 0.999
BLUR_SIZE = 7  # of the kernels of a degradation, pixels
RESIZE_MODES = ("area", "bicubic")


def make_same_networks(run: Run, data: Dataset) -> Networks:
    """Return the run's two networks in plain layers, with paragan's initial weights."""
    plain_run = dataclasses.replace(run, device=dataclasses.replace(run.device, channels_last=False))
    networks = build_networks(plain_run, make_spec(run.data, data), CPU)
    for net in (networks.g, networks.d):
        to_plain_reconstruction_layers(net)
    return networks


@torch.no_grad()
def max_output_difference(run: Run, data: Dataset) -> float:
    """Return the largest difference between the outputs of both pairs, relative to the largest output."""
    ours = build_networks(run, make_spec(run.data, data), CPU)
    plain = make_same_networks(run, data)
    for networks in (ours, plain):
        if isinstance(networks.g, ResidualUpscaler):  # this weight is 0 at first
            nn.init.constant_(networks.g.image.weight, 0.01)
        for net in (networks.g, networks.d):
            net.eval()
    x = to_float(data, 8)
    assert ours.conditioning_input
    c = ours.conditioning_input(Batch(x, None, LaneRng(0, 0, (0,), len(x))))
    outputs = (
        (primary_array(ours.g(c, None)), primary_array(plain.g(c, None))),
        tuple(logits_of(d(x, None)).sort(1).values for d in (ours.d, plain.d)),  # patches may have another order
    )
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in outputs)


def to_float(data: Dataset, count: int | None = None) -> Tensor:
    """Return the first `count` rows as networks see them: images [N, C, H, W] in [-1, 1], or arrays as they are."""
    assert isinstance(data.images, np.ndarray)
    rows = torch.from_numpy(data.images[:count])
    if data.is_array:
        return rows
    return rows.permute(0, 3, 1, 2).float().div(127.5).sub(1).contiguous()


# The loops ------------------------------------------------------------------------------------------------


class PlainReconstruction:
    """Base of the loops: networks, torch's default optimizers, and a data set that is a float tensor on the device."""

    def __init__(self, run: Run, data: Dataset, bf16: bool = False):
        assert isinstance(run.objective, Reconstruction)
        self.run = run
        self.bf16 = bf16
        self.objective: Reconstruction = run.objective
        networks = make_same_networks(run, data)
        self.g, self.d = networks.g.train(), networks.d.train()
        self.g_optimizer = make_optimizer(self.g, run.g.optimizer)
        self.d_optimizer = make_optimizer(self.d, run.d.optimizer)
        self.averages = [p.detach().clone() for p in self.g.parameters()]
        self.rows = to_float(data)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast("cpu", torch.bfloat16) if self.bf16 else contextlib.nullcontext()

    def step(self) -> None:
        """Take one step of each network on a random batch."""
        self.train_on(self.rows[torch.randint(len(self.rows), (self.run.batch,))])

    def train_on(self, real: Tensor) -> None:
        """Take one step of each network."""
        raise NotImplementedError

    @torch.no_grad()
    def update_averages(self) -> None:
        for average, p in zip(self.averages, self.g.parameters()):
            average.mul_(EMA_DECAY).add_(p, alpha=1 - EMA_DECAY)


def make_optimizer(net: nn.Module, config) -> torch.optim.Optimizer:
    """Return torch's Adam or AdamW with its default implementation."""
    if config.weight_decay:
        return torch.optim.AdamW(net.parameters(), config.lr, config.betas, weight_decay=config.weight_decay)
    return torch.optim.Adam(net.parameters(), config.lr, config.betas)


class PlainTokenizer(PlainReconstruction):
    """VQGAN's loop, with one forward pass of G as in LlamaGen: G's step, then D's on the detached images.

    D is not frozen in G's step. The adaptive weight takes two backward passes to G's last layer.
    """

    adaptive_weight: Tensor

    def train_on(self, real: Tensor) -> None:
        objective = self.objective
        d_loss, g_loss = LOSSES[objective.adversarial.loss]
        self.g_optimizer.zero_grad()
        with self.autocast():
            output = self.g(real)
            distance = objective.l1 * (real - output.images).abs().mean()
            if objective.perceptual:
                network = load_frozen("objective.perceptual_features", objective.perceptual_features, CPU)
                maps = zip(network(output.images), network(real))
                distance = distance + objective.perceptual * sum_of_means((a - b).abs() for a, b in maps)
            on_fake = logits_of(self.d(output.images))
            adversarial = g_loss(on_fake, on_fake).mean()
            self.adaptive_weight = self.compute_adaptive_weight(distance, adversarial)
            loss = distance + self.adaptive_weight * objective.adversarial_weight * adversarial
            loss = loss + objective.outputs["commitment"] * output.commitment
        loss.backward()
        self.g_optimizer.step()
        self.update_averages()

        self.d_optimizer.zero_grad()
        with self.autocast():
            on_real, on_fake = logits_of(self.d(real.detach())), logits_of(self.d(output.images.detach()))
            loss = d_loss(on_real, on_fake).mean()
        loss.backward()
        self.d_optimizer.step()

    def compute_adaptive_weight(self, distance: Tensor, adversarial: Tensor) -> Tensor:
        last_layer = self.g.last_layer
        assert isinstance(last_layer, Tensor)
        (of_distance,) = torch.autograd.grad(distance, last_layer, retain_graph=True)
        (of_adversarial,) = torch.autograd.grad(adversarial, last_layer, retain_graph=True)
        weight = of_distance.norm() / (of_adversarial.norm() + 1e-4)
        return weight.clamp(0, self.objective.max_adaptive_weight).detach()


class PlainUpscaler(PlainReconstruction):
    """Real-ESRGAN's loop: G's step with D frozen, then D's with a backward pass for reals and one for fakes."""

    def train_on(self, real: Tensor) -> None:
        nets = self.run.nets
        assert isinstance(nets, SuperResolution)
        self.train_on_pair(degrade_plainly(real, nets.scale, nets.max_blur, nets.max_noise), real)

    def train_on_pair(self, low: Tensor, real: Tensor) -> None:
        """Take one step of each network, given the degraded images too."""
        objective = self.objective
        self.d.requires_grad_(False)
        self.g_optimizer.zero_grad()
        with self.autocast():
            fake = self.g(low)
            loss = objective.l1 * F.l1_loss(fake, real)
            loss = loss + objective.adversarial_weight * F.softplus(-logits_of(self.d(fake))).mean()
        loss.backward()
        self.g_optimizer.step()

        self.d.requires_grad_(True)
        self.d_optimizer.zero_grad()
        with self.autocast():
            loss = F.softplus(-logits_of(self.d(real))).mean()
        loss.backward()
        with self.autocast():
            loss = F.softplus(logits_of(self.d(fake.detach().clone()))).mean()
        loss.backward()
        self.d_optimizer.step()
        self.update_averages()


def degrade_plainly(images: Tensor, scale: int, max_blur: float, max_noise: float) -> Tensor:
    """Return blurred, reduced and noisy images: a depthwise convolution with a kernel for each image, one resizing for
    the whole batch, and noise."""
    n, channels, height, width = images.shape
    sigma = (torch.rand(n, 1) * max_blur * scale).clamp(min=0.01)
    line = torch.exp(-(torch.arange(BLUR_SIZE) - BLUR_SIZE // 2).square() / (2 * sigma.square()))
    kernel = line[:, :, None] * line[:, None, :]
    kernel = kernel / kernel.sum((1, 2), keepdim=True)
    kernel = kernel[:, None].expand(n, channels, BLUR_SIZE, BLUR_SIZE).reshape(n * channels, 1, BLUR_SIZE, BLUR_SIZE)
    padded = F.pad(images, [BLUR_SIZE // 2] * 4, mode="reflect")
    blurred = F.conv2d(padded.flatten(0, 1)[None], kernel, groups=n * channels).view_as(images)
    mode = RESIZE_MODES[int(torch.randint(len(RESIZE_MODES), ()))]
    small = F.interpolate(blurred, size=(height // scale, width // scale), mode=mode)
    return (small + torch.rand(n, 1, 1, 1) * max_noise * torch.randn_like(small)).clamp(-1, 1)


class PlainVocoder(PlainReconstruction):
    """HiFi-GAN's loop: G's waves, D's step on reals and detached fakes, then G's.

    Each discriminator is called on reals and on fakes apart. In G's step D is not frozen, and features of reals keep
    their graph. There is no average of G.
    """

    def __init__(self, run: Run, data: Dataset, bf16: bool = False):
        super().__init__(run, data, bf16)
        assert isinstance(run.nets, HiFiGAN)
        self.input_mel = PlainMel(run.nets.mel)
        self.loss_mel = PlainMel(self.objective.spectrogram)

    def train_on(self, real: Tensor) -> None:
        objective = self.objective
        mel, real_mel = self.input_mel(real), self.loss_mel(real)
        with self.autocast():
            fake = self.g(mel)
            fake_mel = self.loss_mel(fake)
            self.d_optimizer.zero_grad()
            pairs = self.run_discriminators(real, fake.detach())
            squares = [(1 - on_real.logits).square().mean() for on_real, _ in pairs]
            squares += [on_fake.logits.square().mean() for _, on_fake in pairs]
            loss = torch.stack(squares).sum() / 2
        loss.backward()
        self.d_optimizer.step()

        self.g_optimizer.zero_grad()
        with self.autocast():
            loss = objective.mel * F.l1_loss(real_mel, fake_mel)
            pairs = self.run_discriminators(real, fake)
            maps = [pair for a, b in pairs for pair in zip(a.features, b.features)]
            loss = loss + objective.feature_matching * sum_of_means((a - b).abs() for a, b in maps)
            loss = loss + sum_of_means((1 - on_fake.logits).square() for _, on_fake in pairs) / 2
        loss.backward()
        self.g_optimizer.step()

    def run_discriminators(self, real: Tensor, fake: Tensor) -> Sequence[tuple[DiscriminatorOutput, ...]]:
        """Return the outputs of each discriminator on reals and on fakes."""
        assert isinstance(self.d, DiscriminatorEnsemble)
        return [(discriminator(real), discriminator(fake)) for discriminator in self.d.discriminators]


class PlainMel:
    """Logarithmic mel spectrograms [N, mels, frames] of waves [N, 1, T]."""

    def __init__(self, config: MelConfig):
        self.config = config
        self.filters = mel_filters(config).float()
        self.window = torch.hann_window(config.n_fft)

    def __call__(self, wave: Tensor) -> Tensor:
        size, hop = self.config.n_fft, self.config.hop
        padded = F.pad(wave.float(), ((size - hop) // 2, (size - hop) // 2), mode="reflect").squeeze(1)
        spectrum = torch.stft(padded, size, hop, window=self.window, center=False, return_complex=True)
        magnitude = torch.sqrt(torch.view_as_real(spectrum).pow(2).sum(-1) + LEAST_POWER)
        return torch.log(torch.clamp(torch.matmul(self.filters, magnitude), min=LEAST_MEL))


def sum_of_means(values: Iterable[Tensor]) -> Tensor:
    """Return the sum of the means of tensors."""
    return torch.stack([value.mean() for value in values]).sum()


# Layers ---------------------------------------------------------------------------------------------------


class PlainQuantizer(VectorQuantizer):
    """The nearest code by the expanded distance; the codebook moves within the forward pass, by a one-hot product."""

    def forward(self, z: Tensor) -> QuantizerOutput:
        with torch.autocast(z.device.type, enabled=False):
            z = z.float()
            rows = to_rows(z)
            distances = rows.pow(2).sum(1, keepdim=True) + self.codebook.pow(2).sum(1) - 2 * rows @ self.codebook.T
            indices = distances.argmin(1)
            one_hot = F.one_hot(indices, len(self.codebook)).float()
            values = (one_hot @ self.codebook).view(len(z), *z.shape[2:], -1).movedim(-1, 1)
            if self.training:
                self._move_codebook(one_hot, rows)
            commitment = (values.detach() - z).pow(2).mean()
            codes = indices.view(len(z), *z.shape[2:])
            return QuantizerOutput(z + (values - z).detach(), codes, commitment)

    @torch.no_grad()
    def _move_codebook(self, one_hot: Tensor, rows: Tensor) -> None:
        self.cluster_size.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)
        self.embed_sum.mul_(self.decay).add_(one_hot.T @ rows, alpha=1 - self.decay)
        total = self.cluster_size.sum()
        smoothed = (self.cluster_size + LAPLACE) / (total + len(self.codebook) * LAPLACE) * total
        self.codebook.copy_(self.embed_sum / smoothed[:, None])


class PlainSwish(nn.SiLU):
    """x * sigmoid(x), in two operations."""

    def forward(self, input: Tensor) -> Tensor:
        return input * torch.sigmoid(input)


class PlainGroupNormBlock(GroupNormBlock):
    """The same block, with swish in two operations."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        h = self.conv1(h * torch.sigmoid(h))
        h = self.norm2(h)
        return x + self.conv2(h * torch.sigmoid(h))


class PlainWaveGenerator(HiFiGANGenerator):
    """The same layers on maps [N, C, T]."""

    def forward(self, mel: Tensor, y: Tensor | None = None) -> Tensor:
        h = F.leaky_relu(self.stages(self.first(mel)), LAST_SLOPE)
        with torch.autocast(mel.device.type, enabled=False):
            return torch.tanh(self.last(h.to(mel.dtype)))


class PlainConv1d(nn.Conv2d):
    """A convolution of one row, by torch's one-dimensional one."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv1d(input, self.weight, self.bias, self.stride[1], self.padding[1], self.dilation[1])


class PlainConvTranspose1d(nn.ConvTranspose2d):
    """A transposed convolution of one row, by torch's one-dimensional one."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        padding = self.padding[1]
        assert isinstance(padding, int)
        return F.conv_transpose1d(input, self.weight, self.bias, self.stride[1], padding, self.output_padding[1])


class PlainPeriodDiscriminator(PeriodDiscriminator):
    """The same layers, with time along columns."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> DiscriminatorOutput:
        padded = F.pad(x, (0, -x.shape[2] % self.period), mode="reflect")
        return self.stack(padded.view(len(x), 1, -1, self.period))


class PlainColumnConv(nn.Conv2d):
    """A convolution along columns, with the stride and padding of one along rows."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight, self.bias, self.stride[::-1], self.padding[::-1])


class PlainDilatedBlock(DilatedBlock):
    """The same block, with activations out of place."""

    def forward(self, x: Tensor) -> Tensor:
        for i, dilated in enumerate(self.dilated):
            h = dilated(F.leaky_relu(x, LEAKY_RELU_SLOPE))
            if self.plain:
                h = self.plain[i](F.leaky_relu(h, LEAKY_RELU_SLOPE))
            x = h + x
        return x


class PlainFeatureStack(FeatureStack):
    """The same layers, with activations out of place."""

    def forward(self, x: Tensor) -> DiscriminatorOutput:
        features: list[Tensor] = []
        for conv in self.convs:
            x = F.leaky_relu(conv(x), self.slope)
            features.append(x)
        return DiscriminatorOutput(self.last(x).flatten(1), features=tuple(features))


PLAIN_LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    VectorQuantizer: PlainQuantizer,
    nn.SiLU: PlainSwish,
    GroupNormBlock: PlainGroupNormBlock,
    HiFiGANGenerator: PlainWaveGenerator,
    PeriodDiscriminator: PlainPeriodDiscriminator,
    DilatedBlock: PlainDilatedBlock,
    FeatureStack: PlainFeatureStack,
}

PLAIN_WAVE_CONVS: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {
    (HiFiGANGenerator, nn.Conv2d): PlainConv1d,
    (HiFiGANGenerator, nn.ConvTranspose2d): PlainConvTranspose1d,
    (PeriodDiscriminator, nn.Conv2d): PlainColumnConv,
}


def set_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Let a layer compute as another class of the same parameters does."""
    module.__class__ = kind


@torch.enable_grad()  # else removing a parametrization leaves a buffer
def to_plain_reconstruction_layers(net: nn.Module) -> None:
    """Replace the layers of a paragan network by plain ones, in place; parameters keep their values."""
    with_weight_norm = [module for module in net.modules() if parametrize.is_parametrized(module, "weight")]
    for module in with_weight_norm:
        parametrize.remove_parametrizations(module, "weight")
    for module in list(net.modules()):
        if isinstance(module, UpConv | DownConv):
            module.fused_resampling = False
        elif isinstance(module, HiFiGANGenerator | PeriodDiscriminator):
            is_generator = isinstance(module, HiFiGANGenerator)
            for conv in module.modules():
                if isinstance(conv, nn.Conv2d | nn.ConvTranspose2d):
                    weight = conv.weight.detach()
                    conv.weight = nn.Parameter(weight.squeeze(2) if is_generator else weight.mT.contiguous())
                    set_class(conv, PLAIN_WAVE_CONVS[type(module), type(conv)])
        if type(module) in PLAIN_LAYERS:
            set_class(module, PLAIN_LAYERS[type(module)])
    for module in with_weight_norm:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            torch.nn.utils.weight_norm(module)  # computes the weight in every call


PLAIN_LOOPS: dict[str, type[PlainReconstruction]] = {
    "tokenizer": PlainTokenizer,
    "super-resolution": PlainUpscaler,
    "vocoder": PlainVocoder,
}
