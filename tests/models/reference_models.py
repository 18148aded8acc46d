"""BigGAN-PyTorch's and StudioGAN's networks in small: state dicts with their names and shapes, random numbers in them,
and plain forward passes that read nothing else. Written from the published structure, to judge what is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IN = {  # multiples of the width: what goes into G's blocks
    32: [4, 4, 4],
    64: [16, 8, 4, 2],
    128: [16, 16, 8, 4, 2],
}
OUT = {32: [4, 4, 4], 64: [8, 4, 2, 1], 128: [16, 8, 4, 2, 1]}
D_OUT = {64: [1, 2, 4, 8, 16], 128: [1, 2, 4, 8, 16, 16]}
D_DOWN = {32: [True, True, False, False], 64: [True] * 4 + [False], 128: [True] * 5 + [False]}


@dataclass(frozen=True)
class Theirs:
    """library, resolution, width, classes, latent; kind: shared (BigGAN), own (an embedding in each norm) or none.

    head: of D, PD, 2C or AC in StudioGAN's words; attention: after which block of each, -1 none; spectral: of G
    """

    library: str
    size: int
    width: int
    classes: int
    latent: int
    kind: str = "shared"
    head: str = "PD"
    attention: tuple[int, int] = (1, 0)
    spectral: bool = True
    shared: int = 5
    length: int = 6

    @property
    def big(self) -> bool:
        return self.library == "biggan-pytorch"

    @property
    def eps(self) -> float:
        return 1e-5 if self.big else 1e-4


class Names:
    """Writes a state dict."""

    def __init__(self, of: Theirs, seed: int):
        self.of, self.state, self.rng = of, {}, torch.Generator().manual_seed(seed)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.rng)

    def weight(self, name: str, *shape: int, spectral: bool, bias: bool = True) -> None:
        w = self.draw(*shape) / math.prod(shape[1:]) ** 0.5
        if spectral:
            rows, matrix = w.shape[0], w.flatten(1)
            u = F.normalize(self.draw(rows), dim=0)
            if self.of.big:
                self.state |= {f"{name}.weight": w, f"{name}.u0": u[None], f"{name}.sv0": torch.ones(1)}
            else:
                v = F.normalize(matrix.T @ u, dim=0)
                u = F.normalize(matrix @ v, dim=0)
                self.state |= {f"{name}.weight_orig": w, f"{name}.weight_u": u, f"{name}.weight_v": v}
        else:
            self.state[f"{name}.weight"] = w
        if bias:
            self.state[f"{name}.bias"] = self.draw(shape[0]) / 5

    def stats(self, name: str, channels: int) -> None:
        mean, var = ("stored_mean", "stored_var") if self.of.big else ("running_mean", "running_var")
        self.state |= {f"{name}.{mean}": self.draw(channels) / 3, f"{name}.{var}": self.draw(channels).square() + 0.5}
        if not self.of.big:
            self.state[f"{name}.num_batches_tracked"] = torch.tensor(17)

    def norm(self, name: str, channels: int, seen: int) -> None:
        of = self.of
        if of.kind == "none":
            self.state |= {f"{name}.weight": 1 + self.draw(channels) / 3, f"{name}.bias": self.draw(channels) / 3}
            self.stats(name, channels)
            return
        gain, bias = ("gain", "bias") if of.big or of.kind == "shared" else ("embed0", "embed1")
        for part in (gain, bias):
            shape = (channels, seen) if of.kind == "shared" else (of.classes, channels)
            spectral = of.spectral and not (of.big and of.kind == "own")  # embeddings of its G have none
            self.weight(f"{name}.{part}", *shape, spectral=spectral, bias=False)
        self.stats(name if of.big else f"{name}.bn", channels)

    def attend(self, name: str, c: int, spectral: bool) -> None:
        parts = ["theta", "phi", "g", "o"] if self.of.big else [f"conv1x1_{p}" for p in ("theta", "phi", "g", "attn")]
        for part, (a, b) in zip(parts, [(c, c // 8), (c, c // 8), (c, c // 2), (c // 2, c)]):
            self.weight(f"{name}.{part}", b, a, 1, 1, spectral=spectral, bias=False)
        self.state[f"{name}.{'gamma' if self.of.big else 'sigma'}"] = self.draw(*([] if self.of.big else [1])) + 1

    def convs(self, name: str, a: int, b: int, inside: int, shortcut: bool, spectral: bool) -> None:
        first, second, third = ("conv1", "conv2", "conv_sc") if self.of.big else ("conv2d1", "conv2d2", "conv2d0")
        self.weight(f"{name}.{first}", inside, a, 3, 3, spectral=spectral)
        self.weight(f"{name}.{second}", b, inside, 3, 3, spectral=spectral)
        if shortcut:
            self.weight(f"{name}.{third}", b, a, 1, 1, spectral=spectral)


def places(of: Theirs, blocks: int, attention: int) -> list[tuple[str, str]]:
    """(name of a block, name of the attention after it or "")."""
    found, at = [], 0
    for i in range(blocks):
        here = i == attention
        if of.big:
            found.append((f"blocks.{i}.0", f"blocks.{i}.1" if here else ""))
        else:
            found.append((f"blocks.{at}.0", f"blocks.{at + 1}.0" if here else ""))
            at += 1 + here
    return found


def generator(of: Theirs, seed: int = 0) -> dict[str, Tensor]:
    """The state dict of a generator."""
    n, ins, outs = Names(of, seed), IN[of.size], OUT[of.size]
    chunk = of.latent // (len(ins) + 1) if of.kind == "shared" else of.latent
    if of.kind == "shared":
        n.state["shared.weight"] = n.draw(of.classes, of.shared)
    n.weight("linear" if of.big else "linear0", ins[0] * of.width * 16, chunk, spectral=of.spectral)
    for (block, attention), a, b in zip(places(of, len(ins), of.attention[0]), ins, outs):
        a, b = a * of.width, b * of.width
        n.convs(block, a, b, b, True, of.spectral)
        n.norm(f"{block}.bn1", a, of.shared + chunk)
        n.norm(f"{block}.bn2", b, of.shared + chunk)
        if attention:
            n.attend(attention, b, of.spectral)
    last, (norm, image) = outs[-1] * of.width, ("output_layer.0", "output_layer.2") if of.big else ("bn4", "conv2d5")
    n.state[f"{norm}.{'gain' if of.big else 'weight'}"] = 1 + n.draw(last) / 3
    n.state[f"{norm}.bias"] = n.draw(last) / 3
    n.stats(norm, last)
    n.weight(image, 3, last, 3, 3, spectral=of.spectral)
    return n.state


def discriminator(of: Theirs, seed: int = 1) -> dict[str, Tensor]:
    """The state dict of a discriminator, spectrally normalised."""
    n, outs = Names(of, seed), widths(of)
    ins = [3, *outs[:-1]]
    for i, ((block, attention), a, b) in enumerate(zip(places(of, len(outs), of.attention[1]), ins, outs)):
        n.convs(block, a, b, b, a != b or D_DOWN[of.size][i], True)
        if attention:
            n.attend(attention, b, True)
    f = outs[-1]
    n.weight("linear" if of.big else "linear1", 1, f, spectral=True)
    if of.classes and of.head == "PD":
        n.weight("embed" if of.big else "embedding", of.classes, f, spectral=True, bias=False)
    if of.head == "2C":
        n.weight("linear2", of.length, f, spectral=True)
        n.weight("embedding", of.classes, of.length, spectral=True, bias=False)
    if of.head == "AC":
        n.weight("linear2", of.classes, f, spectral=True, bias=False)
    return n.state


def widths(of: Theirs) -> list[int]:
    if of.size == 32:
        return [of.width * (4 if of.big else 2)] * 4
    return [of.width * times for times in D_OUT[of.size]]


# Forward passes ---------------------------------------------------------------------------------------


def matrix(s: dict[str, Tensor], name: str) -> Tensor:
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
    w = matrix(s, name)
    return F.conv2d(x, w, s.get(f"{name}.bias"), padding=w.shape[2] // 2)


def linear(s: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, matrix(s, name), s.get(f"{name}.bias"))


def moments(s: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    mean, var = ("stored_mean", "stored_var") if f"{name}.stored_mean" in s else ("running_mean", "running_var")
    mean, var = s[f"{name}.{mean}"][:, None, None], s[f"{name}.{var}"][:, None, None]
    return (x - mean) / (var + eps).sqrt()


def normed(of: Theirs, s: dict[str, Tensor], name: str, x: Tensor, y: Tensor, c: Tensor | None) -> Tensor:
    if of.kind == "none":
        x = moments(s, name, x, of.eps)
        return x * s[f"{name}.weight"][:, None, None] + s[f"{name}.bias"][:, None, None]
    x = moments(s, name if of.big else f"{name}.bn", x, of.eps)
    gain, bias = ("gain", "bias") if of.big or of.kind == "shared" else ("embed0", "embed1")
    if of.kind == "shared":
        gain, bias = linear(s, f"{name}.{gain}", c), linear(s, f"{name}.{bias}", c)
    else:
        gain, bias = matrix(s, f"{name}.{gain}")[y], matrix(s, f"{name}.{bias}")[y]
    return x * (1 + gain)[..., None, None] + bias[..., None, None]


def attended(of: Theirs, s: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    parts = ["theta", "phi", "g", "o"] if of.big else [f"conv1x1_{p}" for p in ("theta", "phi", "g", "attn")]
    theta, phi, g = (conv(s, f"{name}.{part}", x) for part in parts[:3])
    phi, g = F.max_pool2d(phi, 2).flatten(2), F.max_pool2d(g, 2).flatten(2)
    beta = torch.softmax(theta.flatten(2).mT @ phi, -1)
    seen = conv(s, f"{name}.{parts[3]}", (g @ beta.mT).unflatten(2, x.shape[2:]))
    return x + s[f"{name}.{'gamma' if of.big else 'sigma'}"] * seen


def images(of: Theirs, s: dict[str, Tensor], z: Tensor, y: Tensor) -> Tensor:
    """[N, 3, R, R] of a generator."""
    blocks = len(IN[of.size])
    if of.kind == "shared":
        z, *rest = z.split(of.latent // (blocks + 1), 1)
        each = [torch.cat([s["shared.weight"][y], part], 1) for part in rest]
    else:
        each = [None] * blocks
    first, second, third = ("conv1", "conv2", "conv_sc") if of.big else ("conv2d1", "conv2d2", "conv2d0")
    h = linear(s, "linear" if of.big else "linear0", z).view(len(z), -1, 4, 4)
    for (block, attention), c in zip(places(of, blocks, of.attention[0]), each):
        x = F.interpolate(h, scale_factor=2)
        h = F.interpolate(F.relu(normed(of, s, f"{block}.bn1", h, y, c)), scale_factor=2)
        h = F.relu(normed(of, s, f"{block}.bn2", conv(s, f"{block}.{first}", h), y, c))
        h = conv(s, f"{block}.{second}", h) + conv(s, f"{block}.{third}", x)
        h = attended(of, s, attention, h) if attention else h
    norm, gain, image = ("output_layer.0", "gain", "output_layer.2") if of.big else ("bn4", "weight", "conv2d5")
    h = moments(s, norm, h, of.eps) * s[f"{norm}.{gain}"][:, None, None] + s[f"{norm}.bias"][:, None, None]
    return torch.tanh(conv(s, image, F.relu(h)))


def features(of: Theirs, s: dict[str, Tensor], x: Tensor) -> Tensor:
    """[N, F] of a discriminator. StudioGAN's ReLU works in place, so that its shortcuts see it."""
    first, second, third = ("conv1", "conv2", "conv_sc") if of.big else ("conv2d1", "conv2d2", "conv2d0")
    h = x
    for i, (block, attention) in enumerate(places(of, len(widths(of)), of.attention[1])):
        down = D_DOWN[of.size][i]
        seen = F.relu(h) if i else h
        x = h if of.big or not i else seen
        h = conv(s, f"{block}.{second}", F.relu(conv(s, f"{block}.{first}", seen)))
        if any(name.startswith(f"{block}.{third}.") for name in s):
            x = conv(s, f"{block}.{third}", x)
        h = F.avg_pool2d(h, 2) + F.avg_pool2d(x, 2) if down else h + x
        h = attended(of, s, attention, h) if attention else h
    return F.relu(h).sum((2, 3))


def verdict(of: Theirs, s: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What a discriminator says."""
    f = features(of, s, x)
    said = {"logits": linear(s, "linear" if of.big else "linear1", f)[:, 0]}
    if of.classes and of.head == "PD":
        said["logits"] = said["logits"] + (matrix(s, "embed" if of.big else "embedding")[y] * f).sum(1)
    if of.head == "2C":
        said["embedding"] = F.normalize(linear(s, "linear2", f))
        said["proxies"] = F.normalize(matrix(s, "embedding")[y])
    if of.head == "AC":
        said["classes"] = linear(s, "linear2", f)
    return said
