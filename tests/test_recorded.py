"""Recorded passes: what is replayed is what would have been played. The recording itself needs a GPU (test_gpu)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import toy
from paragan.comm.world import World
from paragan.errors import Unusable
from paragan.game.recorded import Recorder, Staged
from paragan.rng import Draw
from paragan.train.loop import play_round
from paragan.train.run import build_nets, resolve, spec_of
from paragan.train.start import assemble, seat

SETTINGS = {
    "plain": (),
    "batch norm": ("nets.batch_norm=true", "nets.spectral=false", "d_steps=2"),
    "lazy r1": ("objective.r1=1", "objective.r1_every=3"),
    "gp, another batch of G": ("objective.gp=10", "objective.loss=wasserstein", "g_batch=32"),
    "lane by lane": ("device.merge=3",),
    "unconditional": ("data.labels=false",),
}


def again(action):
    """Where there is no CUDA: does it again, reading the same tensors, as a graph does."""
    return action


def played(run, recorder):
    images, world = toy.images(), World.solo()
    run = resolve(run, images)
    s = assemble(run, world, images, build_nets(run, spec_of(run, images), world.device))
    s = seat(run, world, images, dataclasses.replace(s.game, recorder=recorder), s.clock)
    for _ in range(8):
        play_round(s)
    return toy.state(s), s.stats.tick(s.clock.images, s.clock.step)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_is_replayed_is_what_would_have_been_played(settings):
    run, made = toy.run(*settings), []

    def recorder():
        made.append(Recorder(run.objective.kind, capture=again))
        return made[-1]

    (a, line_a), (b, line_b) = played(run, lambda: None), played(run, recorder)
    assert toy.same(a, b)
    assert {k: v for k, v in line_a.items() if k.startswith("Loss/")} == {
        k: v for k, v in line_b.items() if k.startswith("Loss/")
    }
    assert any(kept.replay for recorder in made for kept in recorder.recordings.values())


def test_staged_numbers_are_those_of_the_position_they_were_refreshed_for():
    staged, later = Staged(0, 0, (0, 1), 4), Draw(0, 64, (0, 1), 4)
    small = dataclasses.replace(staged, per_lane=2)
    first = staged.normal("z", 3), small.normal("z", 3)
    assert torch.equal(first[0], Draw(0, 0, (0, 1), 4).normal("z", 3))
    staged.refresh(later)
    assert staged.normal("z", 3) is first[0]
    assert torch.equal(first[0], later.normal("z", 3))
    assert torch.equal(first[1], dataclasses.replace(later, per_lane=2).normal("z", 3))


@pytest.mark.parametrize("settings", [(), ("strategy=gossip",), ("strategy.order=together",), ("device.compile=true",)])
def test_graphs_are_refused_where_they_cannot_be_recorded(settings, monkeypatch):
    run = toy.run("device.graph=true", *settings)
    if torch.cuda.is_available() and not settings:
        run.check(1)
    else:
        with pytest.raises(Unusable, match=r"--device.graph=true .*leave it false"):
            run.check(1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if settings:
        with pytest.raises(Unusable, match=r"--device.graph=true .*leave it false"):
            run.check(1)
    with pytest.raises(Unusable, match="one rank"):
        run.check(2)
