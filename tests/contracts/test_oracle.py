"""One rank with the synchronous strategy equals a plain PyTorch loop, bit for bit."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import relu, softplus

import tiny_run
from paragan.config.resolve import resolve
from paragan.train.build import Networks
from paragan.train.loop import play_round
from paragan.train.per_label.jobs import make_jobs
from paragan.train.session import build_session


class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.start = nn.Embedding(10, 8), nn.Linear(16, 16 * 16)
        self.norm, self.up = nn.BatchNorm2d(16), nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.last = nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, z, y):
        h = self.start(torch.cat([z, self.embed(y)], 1)).view(-1, 16, 4, 4)
        return self.last(relu(self.up(relu(self.norm(h))))).tanh()


class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 4, 2, 1)
        self.logit, self.embed = nn.Linear(256, 1), nn.Embedding(10, 256)

    def forward(self, x, y):
        h = softplus(self.second(softplus(self.first(x)))).flatten(1)
        return self.logit(h).squeeze(1) + (h * self.embed(y)).sum(1)


def nets(run) -> Networks:
    torch.manual_seed(3)
    layout = torch.channels_last if run.device.channels_last else torch.contiguous_format
    return Networks(G().to(memory_format=layout), D().to(memory_format=layout), 8)


def slopes(logits, x):
    return torch.autograd.grad(logits.sum(), x, create_graph=True)[0].flatten(1).square().sum(1)


def penalty(run, d, real, fake, on_real, draw):
    if run.objective.r1:
        return run.objective.r1 / 2 * slopes(on_real, real[0]).mean()
    if run.objective.gp:
        x = torch.lerp(real[0], fake[0], draw.uniform("gradient penalty", 1, 1, 1)).requires_grad_(True)
        return run.objective.gp * ((slopes(d(x, real[1]), x) + 1e-12).sqrt() - 1).square().mean()
    return 0


D_LOSSES = {
    "hinge": lambda real, fake: relu(1 - real) + relu(1 + fake),
    "wasserstein": lambda real, fake: fake - real,
    "relativistic": lambda real, fake: softplus(fake - real),
}


def plain_loop(run, rounds):
    """Train in plain PyTorch: two networks and two optimizers; only data and latents come from paragan."""
    s = tiny_run.make_session(run)  # for its lanes only
    pair = nets(run)
    g, d = pair.g, pair.d
    adam = lambda side, net: torch.optim.Adam(  # noqa: E731
        net.parameters(), side.optimizer.lr, side.optimizer.betas, foreach=False, fused=side.optimizer.fused
    )
    g_opt, d_opt = adam(run.g, g), adam(run.d, d)
    average = copy.deepcopy(g)

    def fakes(batch, turn, momentum):
        g.norm.momentum = momentum  # running statistics follow only G's turns
        z = batch.rng.normal(f"latent/{turn}", 8)
        y = batch.rng.choice(f"label/{turn}", s.game.labels)
        return g(z, y), y

    def d_loss(batch):
        real = (batch.images.clone().requires_grad_(bool(run.objective.r1)), batch.labels)
        with torch.no_grad():
            fake = fakes(batch, "D", 0.0)
        if run.objective.r2:
            fake[0].requires_grad_(True)
        if run.device.concat_real_fake is True:
            on_real, on_fake = d(*(torch.cat(both) for both in zip(real, fake))).chunk(2)
        else:
            on_real, on_fake = d(*real), d(*fake)
        loss = D_LOSSES[run.objective.loss](on_real, on_fake).mean() + penalty(run, d, real, fake, on_real, batch.rng)
        return loss + run.objective.r2 / 2 * slopes(on_fake, fake[0]).mean() if run.objective.r2 else loss

    def g_loss(batch):
        fake = d(*fakes(batch, "G", 0.1))
        return softplus(d(batch.images, batch.labels) - fake) if run.objective.loss == "relativistic" else -fake

    for step in range(rounds):
        for i in range(run.d_steps):
            (batch,) = s.lanes.next_micro_batches()
            simultaneous = run.strategy.order == "simultaneous" and i == run.d_steps - 1
            if simultaneous:
                g_grads = torch.autograd.grad(g_loss(batch).mean(), list(g.parameters()))
            d_opt.zero_grad()
            d_loss(batch).backward()
            d_opt.step()
            if run.objective.clip:
                for p in d.parameters():
                    p.data.clamp_(-run.objective.clip, run.objective.clip)
        if not simultaneous:
            g_grads = torch.autograd.grad(g_loss(batch).mean(), list(g.parameters()))
        for p, grad in zip(g.parameters(), g_grads, strict=True):
            p.grad = grad
        g_opt.step()
        weight = 1 - run.ema.decay((step + 1) * run.round_images, run.round_images)
        with torch.no_grad():
            for p, q in zip(average.parameters(), g.parameters(), strict=True):
                p.lerp_(q, weight)
    state = {f"{name}/{k}": v for name, net in (("G", g), ("D", d)) for k, v in net.state_dict().items()}
    return state, dict(average.named_parameters())


def library_state(run, rounds):
    images = tiny_run.make_dataset()
    run = resolve(run, images)
    s = build_session(run, tiny_run.World.solo(), images, nets(run))
    for _ in range(rounds):
        play_round(s)
    state = tiny_run.session_state(s)
    g = s.game.g
    with g.using_ema():
        average = {k: v.detach().clone() for k, v in g.net.named_parameters()}
    return state, average


CLIPPED = ("objective.loss=wasserstein", "objective.clip=0.01", "nets.spectral=false")
CASES = {
    "alternating": (),
    "simultaneous": ("strategy.order=simultaneous",),
    "three steps of D": ("d_steps=3",),
    "r1": ("objective.r1=1",),
    "r1 simultaneous": ("objective.r1=1", "strategy.order=simultaneous"),
    "gradient penalty": ("objective.gp=10",),
    "weights clipped": (*CLIPPED, "d_steps=5"),
    "weights clipped, simultaneous": (*CLIPPED, "d_steps=2", "strategy.order=simultaneous"),
    "relativistic, r1 and r2": ("objective.loss=relativistic", "objective.r1=1", "objective.r2=1"),
    "relativistic, simultaneous": ("objective.loss=relativistic", "strategy.order=simultaneous"),
    "reals and fakes in one call": ("device.concat_real_fake=true", "d_steps=2"),
    "contiguous": ("device.channels_last=false", "objective.r1=1"),
}


@pytest.mark.parametrize("fused", [False, True], ids=["plain optimizer", "fused optimizer"])
@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_one_rank_equals_a_plain_loop(settings, fused):
    adam = [f"{side}.optimizer.fused={str(fused).lower()}" for side in ("g", "d")]
    run = tiny_run.make_run(*settings, *adam, lanes=1)
    (a, a_average), (b, b_average) = library_state(run, 8), plain_loop(run, 8)
    for name, value in b.items():
        if not name.endswith("num_batches_tracked"):  # a plain loop counts forwards, a run counts steps
            compare(a[name], value, name, fused)
    for name, value in b_average.items():
        compare(a_average[name], value, f"average of {name}", fused)
    assert a["G/norm.num_batches_tracked"] == 8


def compare(a, b, name, fused):
    if "running" in name:  # torch's kernel accumulates moments in float64, which is not possible here
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)
    elif fused:  # torch's fused kernel rounds the ends of one long vector differently than those of many small tensors
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6, msg=name)
    else:
        assert torch.equal(a, b), f"{name}: {(a - b).abs().max()}"


def mlp(*sizes):
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.Softplus())]
    return nn.Sequential(*layers[:-1])


class Unconditional(nn.Module):
    """An MLP that ignores the label. shape: of its output."""

    def __init__(self, shape, *sizes):
        super().__init__()
        self.shape, self.body = shape, mlp(*sizes)

    def forward(self, x, y=None):
        assert y is None
        return self.body(x.flatten(1)).view(len(x), *self.shape)


def w_cgan(label, reals, latents, run, rounds):
    """Train one label of parallel W-CGAN as in its paper, in one process."""
    g, d = two_nets(run.seed + label)
    adam = lambda net: torch.optim.Adam(net.parameters(), 2e-3, (0.5, 0.9), foreach=False, fused=False)  # noqa: E731
    g_up, d_up = adam(g), adam(d)
    for _ in range(rounds):
        for _ in range(run.d_steps):
            d_up.zero_grad()
            x = next(reals)
            z = latents("D")
            (d(g(z).detach()) - d(x)).mean().backward()
            d_up.step()
            for p in d.parameters():
                p.data.clamp_(-0.01, 0.01)
        g_up.zero_grad()
        (-d(g(latents("G")))).mean().backward()
        g_up.step()
    return g.state_dict() | d.state_dict()


def two_nets(seed):
    torch.manual_seed(seed)
    return Unconditional((1, 8, 8), 8, 32, 64), Unconditional((), 64, 32, 1)


def test_per_label_run_equals_one_plain_loop_per_label():
    """Every label is trained on its images only, independently of the other labels."""
    settings = ("objective.loss=wasserstein", "objective.clip=0.01", "d_steps=3", "strategy=per-label", "kimg=4")
    adam = [f"{side}.optimizer.fused=false" for side in "gd"]
    images = tiny_run.make_dataset()
    run = resolve(tiny_run.make_run(*settings, *adam, lanes=1), images)
    for job in make_jobs(run, images, Path())[:3]:
        mine = images.only_class(job.label)
        assert len(mine.images) == (images.labels == job.label).sum()
        s = build_session(job.run, tiny_run.World.solo(), mine, Networks(*two_nets(job.run.seed), 8))
        batches = list[object]()
        reals = (batches.append(s.lanes.next_micro_batches()[0]) or batches[-1].images for _ in iter(int, 1))
        latents = lambda turn, batches=batches: batches[-1].rng.normal(f"latent/{turn}", 8)  # noqa: E731
        plain = w_cgan(job.label, reals, latents, run, 6)
        s = build_session(job.run, tiny_run.World.solo(), mine, Networks(*two_nets(job.run.seed), 8))
        for _ in range(6):
            play_round(s)
        trained = s.game.g.net.state_dict() | s.game.d.net.state_dict()
        assert all(torch.equal(trained[name], value) for name, value in plain.items())
