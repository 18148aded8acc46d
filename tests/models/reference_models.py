"""BigGAN-PyTorch's and StudioGAN's networks in small: state dicts with their names and shapes, random numbers in them,
and plain forward passes that read nothing else. Written from the published structure, to judge what is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

G_IN_MULTIPLES = {  # multiples of the width: what goes into G's blocks
    32: [4, 4, 4],
    64: [16, 8, 4, 2],
    128: [16, 16, 8, 4, 2],
}
G_OUT_MULTIPLES = {32: [4, 4, 4], 64: [8, 4, 2, 1], 128: [16, 8, 4, 2, 1]}
D_OUT_MULTIPLES = {64: [1, 2, 4, 8, 16], 128: [1, 2, 4, 8, 16, 16]}
D_DOWNSAMPLES = {32: [True, True, False, False], 64: [True] * 4 + [False], 128: [True] * 5 + [False]}


@dataclass(frozen=True)
class ReferenceConfig:
    """library, resolution, width, classes, latent; kind: shared (BigGAN), own (an embedding in each norm) or none.

    head: of D, PD, 2C or AC in StudioGAN's words; attention: after which block of each, -1 none; spectral: of G
    """

    library: str
    resolution: int
    width: int
    classes: int
    latent: int
    conditioning: str = "shared"
    head: str = "PD"
    attention: tuple[int, int] = (1, 0)
    spectral: bool = True
    shared_width: int = 5
    embedding_width: int = 6

    @property
    def is_biggan(self) -> bool:
        return self.library == "biggan-pytorch"

    @property
    def eps(self) -> float:
        return 1e-5 if self.is_biggan else 1e-4


class StateDictWriter:
    """Writes a state dict."""

    def __init__(self, config: ReferenceConfig, seed: int):
        self.config, self.state, self.rng = config, {}, torch.Generator().manual_seed(seed)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng)

    def add_weight(self, name: str, *shape: int, spectral: bool, bias: bool = True) -> None:
        w = self.randn(*shape) / math.prod(shape[1:]) ** 0.5
        if spectral:
            rows, matrix = w.shape[0], w.flatten(1)
            u = F.normalize(self.randn(rows), dim=0)
            if self.config.is_biggan:
                self.state |= {f"{name}.weight": w, f"{name}.u0": u[None], f"{name}.sv0": torch.ones(1)}
            else:
                v = F.normalize(matrix.T @ u, dim=0)
                u = F.normalize(matrix @ v, dim=0)
                self.state |= {f"{name}.weight_orig": w, f"{name}.weight_u": u, f"{name}.weight_v": v}
        else:
            self.state[f"{name}.weight"] = w
        if bias:
            self.state[f"{name}.bias"] = self.randn(shape[0]) / 5

    def add_bn_stats(self, name: str, channels: int) -> None:
        mean, var = ("stored_mean", "stored_var") if self.config.is_biggan else ("running_mean", "running_var")
        self.state |= {f"{name}.{mean}": self.randn(channels) / 3, f"{name}.{var}": self.randn(channels).square() + 0.5}
        if not self.config.is_biggan:
            self.state[f"{name}.num_batches_tracked"] = torch.tensor(17)

    def add_norm(self, name: str, channels: int, condition_width: int) -> None:
        of = self.config
        if of.conditioning == "none":
            self.state |= {f"{name}.weight": 1 + self.randn(channels) / 3, f"{name}.bias": self.randn(channels) / 3}
            self.add_bn_stats(name, channels)
            return
        gain, bias = ("gain", "bias") if of.is_biggan or of.conditioning == "shared" else ("embed0", "embed1")
        for part in (gain, bias):
            shape = (channels, condition_width) if of.conditioning == "shared" else (of.classes, channels)
            spectral = of.spectral and not (of.is_biggan and of.conditioning == "own")  # embeddings of its G have none
            self.add_weight(f"{name}.{part}", *shape, spectral=spectral, bias=False)
        self.add_bn_stats(name if of.is_biggan else f"{name}.bn", channels)

    def add_attention(self, name: str, c: int, spectral: bool) -> None:
        parts = (
            ["theta", "phi", "g", "o"]
            if self.config.is_biggan
            else [f"conv1x1_{p}" for p in ("theta", "phi", "g", "attn")]
        )
        for part, (a, b) in zip(parts, [(c, c // 8), (c, c // 8), (c, c // 2), (c // 2, c)]):
            self.add_weight(f"{name}.{part}", b, a, 1, 1, spectral=spectral, bias=False)
        self.state[f"{name}.{'gamma' if self.config.is_biggan else 'sigma'}"] = (
            self.randn(*([] if self.config.is_biggan else [1])) + 1
        )

    def add_convs(self, name: str, a: int, b: int, hidden: int, shortcut: bool, spectral: bool) -> None:
        first, second, third = (
            ("conv1", "conv2", "conv_sc") if self.config.is_biggan else ("conv2d1", "conv2d2", "conv2d0")
        )
        self.add_weight(f"{name}.{first}", hidden, a, 3, 3, spectral=spectral)
        self.add_weight(f"{name}.{second}", b, hidden, 3, 3, spectral=spectral)
        if shortcut:
            self.add_weight(f"{name}.{third}", b, a, 1, 1, spectral=spectral)


def block_names(config: ReferenceConfig, blocks: int, attention: int) -> list[tuple[str, str]]:
    """(name of a block, name of the attention after it or "")."""
    names, at = [], 0
    for i in range(blocks):
        has_attention = i == attention
        if config.is_biggan:
            names.append((f"blocks.{i}.0", f"blocks.{i}.1" if has_attention else ""))
        else:
            names.append((f"blocks.{at}.0", f"blocks.{at + 1}.0" if has_attention else ""))
            at += 1 + has_attention
    return names


def make_generator_state(config: ReferenceConfig, seed: int = 0) -> dict[str, Tensor]:
    """The state dict of a generator."""
    n, ins, outs = StateDictWriter(config, seed), G_IN_MULTIPLES[config.resolution], G_OUT_MULTIPLES[config.resolution]
    chunk = config.latent // (len(ins) + 1) if config.conditioning == "shared" else config.latent
    if config.conditioning == "shared":
        n.state["shared.weight"] = n.randn(config.classes, config.shared_width)
    n.add_weight(
        "linear" if config.is_biggan else "linear0", ins[0] * config.width * 16, chunk, spectral=config.spectral
    )
    for (block, attention), a, b in zip(block_names(config, len(ins), config.attention[0]), ins, outs):
        a, b = a * config.width, b * config.width
        n.add_convs(block, a, b, b, True, config.spectral)
        n.add_norm(f"{block}.bn1", a, config.shared_width + chunk)
        n.add_norm(f"{block}.bn2", b, config.shared_width + chunk)
        if attention:
            n.add_attention(attention, b, config.spectral)
    last, (norm, image) = (
        outs[-1] * config.width,
        ("output_layer.0", "output_layer.2") if config.is_biggan else ("bn4", "conv2d5"),
    )
    n.state[f"{norm}.{'gain' if config.is_biggan else 'weight'}"] = 1 + n.randn(last) / 3
    n.state[f"{norm}.bias"] = n.randn(last) / 3
    n.add_bn_stats(norm, last)
    n.add_weight(image, 3, last, 3, 3, spectral=config.spectral)
    return n.state


def make_discriminator_state(config: ReferenceConfig, seed: int = 1) -> dict[str, Tensor]:
    """The state dict of a discriminator, spectrally normalised."""
    n, outs = StateDictWriter(config, seed), d_widths(config)
    ins = [3, *outs[:-1]]
    for i, ((block, attention), a, b) in enumerate(zip(block_names(config, len(outs), config.attention[1]), ins, outs)):
        n.add_convs(block, a, b, b, a != b or D_DOWNSAMPLES[config.resolution][i], True)
        if attention:
            n.add_attention(attention, b, True)
    f = outs[-1]
    n.add_weight("linear" if config.is_biggan else "linear1", 1, f, spectral=True)
    if config.classes and config.head == "PD":
        n.add_weight("embed" if config.is_biggan else "embedding", config.classes, f, spectral=True, bias=False)
    if config.head == "2C":
        n.add_weight("linear2", config.embedding_width, f, spectral=True)
        n.add_weight("embedding", config.classes, config.embedding_width, spectral=True, bias=False)
    if config.head == "AC":
        n.add_weight("linear2", config.classes, f, spectral=True, bias=False)
    return n.state


def d_widths(config: ReferenceConfig) -> list[int]:
    if config.resolution == 32:
        return [config.width * (4 if config.is_biggan else 2)] * 4
    return [config.width * times for times in D_OUT_MULTIPLES[config.resolution]]


# Forward passes ---------------------------------------------------------------------------------------


def effective_weight(s: dict[str, Tensor], name: str) -> Tensor:
    """The weight a layer multiplies by, as each library computes it in eval mode."""
    if f"{name}.u0" in s:
        w = s[f"{name}.weight"].flatten(1)
        v = F.normalize(s[f"{name}.u0"] @ w, eps=1e-12)
        u = F.normalize(v @ w.T, eps=1e-12)
        return s[f"{name}.weight"] / (v @ w.T @ u.T).squeeze()
    if f"{name}.weight_orig" in s:
        w = s[f"{name}.weight_orig"]
        return w / torch.dot(s[f"{name}.weight_u"], torch.mv(w.flatten(1), s[f"{name}.weight_v"]))
    return s[f"{name}.weight"]


def conv(s: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    w = effective_weight(s, name)
    return F.conv2d(x, w, s.get(f"{name}.bias"), padding=w.shape[2] // 2)


def linear(s: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, effective_weight(s, name), s.get(f"{name}.bias"))


def normalize(s: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    mean, var = ("stored_mean", "stored_var") if f"{name}.stored_mean" in s else ("running_mean", "running_var")
    mean, var = s[f"{name}.{mean}"][:, None, None], s[f"{name}.{var}"][:, None, None]
    return (x - mean) / (var + eps).sqrt()


def conditional_batch_norm(
    config: ReferenceConfig, s: dict[str, Tensor], name: str, x: Tensor, y: Tensor, c: Tensor | None
) -> Tensor:
    if config.conditioning == "none":
        x = normalize(s, name, x, config.eps)
        return x * s[f"{name}.weight"][:, None, None] + s[f"{name}.bias"][:, None, None]
    x = normalize(s, name if config.is_biggan else f"{name}.bn", x, config.eps)
    gain, bias = ("gain", "bias") if config.is_biggan or config.conditioning == "shared" else ("embed0", "embed1")
    if config.conditioning == "shared":
        gain, bias = linear(s, f"{name}.{gain}", c), linear(s, f"{name}.{bias}", c)
    else:
        gain, bias = effective_weight(s, f"{name}.{gain}")[y], effective_weight(s, f"{name}.{bias}")[y]
    return x * (1 + gain)[..., None, None] + bias[..., None, None]


def self_attention(config: ReferenceConfig, s: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    parts = ["theta", "phi", "g", "o"] if config.is_biggan else [f"conv1x1_{p}" for p in ("theta", "phi", "g", "attn")]
    theta, phi, g = (conv(s, f"{name}.{part}", x) for part in parts[:3])
    phi, g = F.max_pool2d(phi, 2).flatten(2), F.max_pool2d(g, 2).flatten(2)
    beta = torch.softmax(theta.flatten(2).mT @ phi, -1)
    attended = conv(s, f"{name}.{parts[3]}", (g @ beta.mT).unflatten(2, x.shape[2:]))
    return x + s[f"{name}.{'gamma' if config.is_biggan else 'sigma'}"] * attended


def generate(config: ReferenceConfig, s: dict[str, Tensor], z: Tensor, y: Tensor) -> Tensor:
    """[N, 3, R, R] of a generator."""
    blocks = len(G_IN_MULTIPLES[config.resolution])
    if config.conditioning == "shared":
        z, *rest = z.split(config.latent // (blocks + 1), 1)
        each = [torch.cat([s["shared.weight"][y], part], 1) for part in rest]
    else:
        each = [None] * blocks
    first, second, third = ("conv1", "conv2", "conv_sc") if config.is_biggan else ("conv2d1", "conv2d2", "conv2d0")
    h = linear(s, "linear" if config.is_biggan else "linear0", z).view(len(z), -1, 4, 4)
    for (block, attention), c in zip(block_names(config, blocks, config.attention[0]), each):
        x = F.interpolate(h, scale_factor=2)
        h = F.interpolate(F.relu(conditional_batch_norm(config, s, f"{block}.bn1", h, y, c)), scale_factor=2)
        h = F.relu(conditional_batch_norm(config, s, f"{block}.bn2", conv(s, f"{block}.{first}", h), y, c))
        h = conv(s, f"{block}.{second}", h) + conv(s, f"{block}.{third}", x)
        h = self_attention(config, s, attention, h) if attention else h
    norm, gain, image = (
        ("output_layer.0", "gain", "output_layer.2") if config.is_biggan else ("bn4", "weight", "conv2d5")
    )
    h = normalize(s, norm, h, config.eps) * s[f"{norm}.{gain}"][:, None, None] + s[f"{norm}.bias"][:, None, None]
    return torch.tanh(conv(s, image, F.relu(h)))


def d_features(config: ReferenceConfig, s: dict[str, Tensor], x: Tensor) -> Tensor:
    """[N, F] of a discriminator. StudioGAN's ReLU works in place, so that its shortcuts see it."""
    first, second, third = ("conv1", "conv2", "conv_sc") if config.is_biggan else ("conv2d1", "conv2d2", "conv2d0")
    h = x
    for i, (block, attention) in enumerate(block_names(config, len(d_widths(config)), config.attention[1])):
        down = D_DOWNSAMPLES[config.resolution][i]
        activated = F.relu(h) if i else h
        x = h if config.is_biggan or not i else activated
        h = conv(s, f"{block}.{second}", F.relu(conv(s, f"{block}.{first}", activated)))
        if any(name.startswith(f"{block}.{third}.") for name in s):
            x = conv(s, f"{block}.{third}", x)
        h = F.avg_pool2d(h, 2) + F.avg_pool2d(x, 2) if down else h + x
        h = self_attention(config, s, attention, h) if attention else h
    return F.relu(h).sum((2, 3))


def discriminate(config: ReferenceConfig, s: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What a discriminator says."""
    f = d_features(config, s, x)
    outputs = {"logits": linear(s, "linear" if config.is_biggan else "linear1", f)[:, 0]}
    if config.classes and config.head == "PD":
        outputs["logits"] = outputs["logits"] + (
            effective_weight(s, "embed" if config.is_biggan else "embedding")[y] * f
        ).sum(1)
    if config.head == "2C":
        outputs["embedding"] = F.normalize(linear(s, "linear2", f))
        outputs["proxies"] = F.normalize(effective_weight(s, "embedding")[y])
    if config.head == "AC":
        outputs["class_logits"] = linear(s, "linear2", f)
    return outputs
