"""Two games of the shapes of published loops, and three plain loops that train them.

The games are a VQGAN (codebook, GroupNorm, a discriminator that begins late, a clipped gradient) and a HiFi-GAN
(weight norm, spectral norm, discriminators that return lists, feature matching, a schedule). The loops are one process
with the whole batch, DistributedDataParallel as it should be used, and `paragan.Replica`. All of them return every
tensor of the networks and of the optimizers.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn.functional import l1_loss, leaky_relu, mse_loss, pad, relu
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import paragan

BATCH = 16  # of all ranks, in all passes


class Autoencoder(nn.Module):
    """Returns the reconstruction, and the loss of the codebook."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1))
        self.codebook = nn.Embedding(8, 4)
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 8, 3, 1, 1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 1, 3, 1, 1),
        )

    def forward(self, x):
        z = self.encoder(x)
        distances = (z.movedim(1, -1)[..., None, :] - self.codebook.weight).square().sum(-1)
        code = self.codebook(distances.argmin(-1)).movedim(-1, 1)
        loss = mse_loss(code, z.detach()) + 0.25 * mse_loss(code.detach(), z)
        return self.decoder(z + (code - z).detach()), loss


class PatchDiscriminator(nn.Sequential):
    def __init__(self):
        super().__init__(
            *(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(8, 8, 4, 2, 1), nn.GroupNorm(2, 8), nn.LeakyReLU(0.2)),
            nn.Conv2d(8, 1, 1),
        )


class VQGAN:
    """G plays first. D begins at `d_start`; before it, G is trained on the reconstruction alone."""

    order = "GD"
    d_start = 10
    max_norm = 0.5
    decay = 1.0

    def __init__(self):
        self.g, self.d = Autoencoder(), nn.ModuleList([PatchDiscriminator()])

    @staticmethod
    def draw(rng, dtype):
        return (torch.randn(BATCH, 1, 8, 8, generator=rng, dtype=dtype),)

    @staticmethod
    def make_fakes(g, x):
        return g(x)[0]

    @staticmethod
    def d_loss(d, fake, x):
        return (relu(1 - d[0](x)).mean() + relu(1 + d[0](fake)).mean()) / 2

    def g_loss(self, g, d, step, x):
        reconstruction, codebook_loss = g(x)
        loss = l1_loss(reconstruction, x) + codebook_loss
        return loss if step < self.d_start else loss - 0.1 * d[0](reconstruction).mean()


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = weight_norm(nn.Conv1d(4, 8, 3, 1, 1))
        self.ups = nn.ModuleList(weight_norm(nn.ConvTranspose1d(a, b, 4, 2, 1)) for a, b in ((8, 8), (8, 4)))
        self.blocks = nn.ModuleList(weight_norm(nn.Conv1d(c, c, 3, 1, 3, dilation=3)) for c in (8, 4))
        self.last = weight_norm(nn.Conv1d(4, 1, 3, 1, 1))

    def forward(self, mel):
        h = self.first(mel)
        for up, block in zip(self.ups, self.blocks):
            h = up(leaky_relu(h, 0.1))
            h = h + block(leaky_relu(h, 0.1))
        return self.last(leaky_relu(h)).tanh()


class Subdiscriminator(nn.Module):
    """Returns scores, and features of every layer. Waves are folded to `period` columns."""

    def __init__(self, norm, period=1):
        super().__init__()
        self.period = period
        self.layers = nn.ModuleList(norm(nn.Conv2d(a, 6, (5, 1), (3, 1), (2, 0))) for a in (1, 6))
        self.last = norm(nn.Conv2d(6, 1, (3, 1), 1, (1, 0)))

    def forward(self, x):
        missing = -x.shape[-1] % self.period
        h = pad(x, (0, missing), "reflect").unflatten(-1, (-1, self.period))
        features = []
        for layer in self.layers:
            h = leaky_relu(layer(h), 0.1)
            features.append(h)
        return self.last(h).flatten(1), features


class MultiDiscriminator(nn.Module):
    """Returns lists: of scores of reals and fakes, and of their features, as those of HiFi-GAN."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, real, fake):
        on_real, on_fake = ([part(x) for part in self.parts] for x in (real, fake))
        (real_scores, real_features), (fake_scores, fake_features) = zip(*on_real), zip(*on_fake)
        return list(real_scores), list(fake_scores), list(real_features), list(fake_features)


class HiFiGAN:
    """D plays first, two discriminators under one optimizer; learning rates decay."""

    order = "DG"
    d_start = 0
    max_norm = None
    decay = 0.9

    def __init__(self):
        self.g = Vocoder()
        self.d = nn.ModuleList(
            [
                MultiDiscriminator(*(Subdiscriminator(weight_norm, period) for period in (2, 3))),
                MultiDiscriminator(Subdiscriminator(spectral_norm), Subdiscriminator(weight_norm)),
            ]
        )

    @staticmethod
    def draw(rng, dtype):
        return tuple(torch.randn(BATCH, *shape, generator=rng, dtype=dtype) for shape in ((4, 8), (1, 32)))

    @staticmethod
    def make_fakes(g, mel, wave):
        return g(mel)

    @staticmethod
    def d_loss(d, fake, mel, wave):
        outputs = [part(wave, fake) for part in d]
        pairs = [pair for on_real, on_fake, _, _ in outputs for pair in zip(on_real, on_fake)]
        return sum((1 - on_real).square().mean() + on_fake.square().mean() for on_real, on_fake in pairs)

    @staticmethod
    def g_loss(g, d, step, mel, wave):
        fake = g(mel)
        loss = 4 * l1_loss(fake, wave)
        for part in d:
            _, on_fake, real_features, fake_features = part(wave, fake)
            loss = loss + sum((1 - scores).square().mean() for scores in on_fake)
            for real, made in zip(real_features, fake_features):
                loss = loss + 2 * sum(l1_loss(b, a) for a, b in zip(real, made))
        return loss


GAMES = {"VQGAN": VQGAN, "HiFi-GAN": HiFiGAN}


class Game:
    """A game with its optimizers and data; what the three loops share."""

    def __init__(self, name, dtype):
        torch.manual_seed(0)
        self.rules, self.dtype = GAMES[name](), dtype
        self.nets = {"G": self.rules.g.to(dtype), "D": self.rules.d.to(dtype)}
        self.optimizers = {
            side: torch.optim.AdamW(net.parameters(), 1e-3, (0.8, 0.99), fused=True) for side, net in self.nets.items()
        }
        self.schedulers = {
            side: torch.optim.lr_scheduler.ExponentialLR(optimizer, self.rules.decay)
            for side, optimizer in self.optimizers.items()
        }

    def turns(self, step):
        """Return the sides that play in this step, in their order."""
        return [side for side in self.rules.order if side == "G" or step >= self.rules.d_start]

    def batch(self, step, rank=0, ranks=1, passes=1):
        """Return this rank's part of a batch, pass by pass."""
        whole = self.rules.draw(torch.Generator().manual_seed(step), self.dtype)
        own = [tensor.chunk(ranks)[rank].chunk(passes) for tensor in whole]
        return list(zip(*own))

    def loss(self, side, step, tensors, g, d):
        if side == "G":
            return self.rules.g_loss(g, d, step, *tensors)
        with torch.no_grad():
            fake = self.rules.make_fakes(g, *tensors)
        return self.rules.d_loss(d, fake, *tensors)

    def end_epoch(self, step):
        if step % 10 == 9:
            for side in self.turns(step):
                self.schedulers[side].step()

    def tensors(self):
        """Return every tensor of the networks and of the optimizers."""
        named = {}
        for side, net in self.nets.items():
            named |= {f"{side} {name}": tensor.detach().clone() for name, tensor in net.state_dict().items()}
            for i, state in self.optimizers[side].state_dict()["state"].items():
                named |= {f"{side} {name} of {i}": value.clone() for name, value in state.items()}
        return named


def freeze_other(game, side):
    for other, net in game.nets.items():
        net.requires_grad_(other == side)


def clip_and_step(game, side):
    if game.rules.max_norm:
        nn.utils.clip_grad_norm_(game.nets[side].parameters(), game.rules.max_norm)
    game.optimizers[side].step()


def train_alone(name, dtype, steps, ranks, passes):
    """Train in one process, on the batches of all ranks together. Passes have the samples that they have on ranks:
    spectral norm iterates in each.
    """
    game = Game(name, dtype)
    for step in range(steps):
        for side in game.turns(step):
            freeze_other(game, side)
            game.optimizers[side].zero_grad()
            for parts in zip(*(game.batch(step, rank, ranks, passes) for rank in range(ranks))):
                tensors = [torch.cat(part) for part in zip(*parts)]
                (game.loss(side, step, tensors, *game.nets.values()) / passes).backward()
            clip_and_step(game, side)
        game.end_epoch(step)
    return game.tensors()


def train_ddp(name, dtype, steps, world, passes):
    """Train under DistributedDataParallel: the network whose turn it is through its wrapper, the other one frozen."""
    game = Game(name, dtype)
    modules = {"G": [game.nets["G"]], "D": game.nets["D"]}
    wrapped = {
        side: [DistributedDataParallel(net, forward_sync_buffers=False) for net in nets]
        for side, nets in modules.items()
    }
    for step in range(steps):
        for side in game.turns(step):
            freeze_other(game, side)
            game.optimizers[side].zero_grad()
            g, d = (wrapped["G"][0], game.nets["D"]) if side == "G" else (game.nets["G"], wrapped["D"])
            *first, last = game.batch(step, world.rank, world.size, passes)
            with contextlib.ExitStack() as accumulating:
                for ddp in wrapped[side]:
                    accumulating.enter_context(ddp.no_sync())
                for tensors in first:
                    (game.loss(side, step, tensors, g, d) / passes).backward()
            (game.loss(side, step, last, g, d) / passes).backward()
            clip_and_step(game, side)
        game.end_epoch(step)
    return game.tensors()


def train_replica(name, dtype, steps, world, passes):
    """Train under `paragan.Replica`."""
    game = Game(name, dtype)
    max_norm = game.rules.max_norm
    modules = {"G": game.nets["G"], "D": list(game.nets["D"])}
    replicas = {
        side: paragan.Replica(modules[side], game.optimizers[side], max_norm=max_norm, world=world) for side in "GD"
    }
    for step in range(steps):
        for side in game.turns(step):
            with replicas[side].turn(backwards=passes):
                for tensors in game.batch(step, world.rank, world.size, passes):
                    (game.loss(side, step, tensors, *game.nets.values()) / passes).backward()
        game.end_epoch(step)
    return game.tensors()
