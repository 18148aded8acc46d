"""DQGAN (Chen, Yang, Shen, Pang 2020): quantized gradients with error feedback on optimistic mirror descent."""

from __future__ import annotations

import pytest
import torch
from players import ADAM, SGD, UNEQUAL, Adam, JointGame, Optimistic, check
from torch import Tensor
from torch.nn.functional import pad

from paragan.comm.compression.compressors import BF16, Exact, Int4, Int8, Sign, TopK

WIRES = {
    "exact": (Exact(), ()),
    "bf16": (BF16(), ()),
    "int8": (Int8(), ()),
    "int4": (Int4(block=128), ("strategy.wire.block=128",)),
    "sign": (Sign(), ()),
    "topk": (TopK(fraction=0.1), ("strategy.wire.fraction=0.1",)),
}
ALIGNMENT = 64 // 8  # numbers: a parameter begins at a multiple of 64 bytes


def dqgan(wire: str, *more: str) -> tuple[str, ...]:
    fields = ("strategy.paper_update=true", f"strategy.wire={wire}", *WIRES[wire][1])
    return ("strategy=quantized", *fields, *SGD, *more)


def transmit(game: JointGame, wire: str, p: Tensor) -> Tensor:
    """Return Q(p) of p = (G, D): each network is one vector, its parameters in reverse order, zeros between them."""
    if wire == "exact" or game.ranks == 1:
        return p
    parts = []
    for net in (game.networks.g, game.networks.d):
        sizes = [parameter.numel() for parameter in net.parameters()]
        vector, p = p.split([sum(sizes), len(p) - sum(sizes)])
        parameters = [pad(v, (0, -len(v) % ALIGNMENT)) for v in vector.split(sizes)]
        sent = round_trip(wire, torch.cat(parameters[::-1])).split([len(v) for v in parameters[::-1]])
        parts += [v[:size] for v, size in zip(sent[::-1], sizes)]
    return torch.cat(parts)


def round_trip(wire: str, x: Tensor) -> Tensor:
    compressor = WIRES[wire][0]
    data, out = torch.empty(compressor.nbytes(len(x)), dtype=torch.uint8), torch.empty(len(x))
    compressor.encode(x.float(), data, 0)
    compressor.decode(data, out)
    return out.double()


def train(game: JointGame, wire: str, iterations: int, eta=lambda k: 1.0, feedback=1.0, in_half_step=1.0) -> Tensor:
    """The paper's algorithm. Round 0 only measures F(w_0); eta(k): the learning rate's factor in round k."""
    every, w = range(game.ranks), game.start
    before = [game.gradient(w, m, 0) for m in every]
    e = [torch.zeros_like(w) for m in every]
    for k in range(1, iterations + 1):
        rate, sent = eta(k) * game.rates, []
        for m in every:
            half = w - (rate * before[m] + in_half_step * e[m])
            before[m] = game.gradient(half, m, k)
            p = rate * before[m] + e[m]
            sent.append(transmit(game, wire, p))
            e[m] = feedback * (p - sent[m])
        w = w - sum(sent) / game.ranks
    return w


@pytest.mark.parametrize(
    ("wire", "ranks"),
    [
        ("exact", 1),
        ("exact", 3),
        ("bf16", 2),
        ("int8", 1),
        ("int8", 2),
        ("int4", 3),
        ("sign", 2),
        ("sign", 4),
        ("topk", 3),
    ],
)
def test_dqgan(pool, wire, ranks):
    settings = dqgan(wire)
    check(pool, settings, 8, [train(JointGame(settings, ranks), wire, 7)] * ranks)


@pytest.mark.parametrize(("wire", "ranks"), [("exact", 2), ("int8", 2), ("int4", 3), ("sign", 2)])
def test_a_falling_learning_rate(pool, wire, ranks):
    """The residual is in units of a step: what was lost at a former rate is sent as it is."""
    settings = dqgan(wire, "g.schedule=linear", "d.schedule=linear", "kimg=0.288")  # 12 rounds of 24 images
    game = JointGame(settings, ranks)
    check(pool, settings, 8, [train(game, wire, 7, eta=lambda k: 1 - (k + 1) / 12)] * ranks)


@pytest.mark.parametrize(
    ("wire", "field", "arguments"),
    [
        ("int4", "feedback=0.5", {"feedback": 0.5}),
        ("sign", "feedback=0", {"feedback": 0.0}),
        ("sign", "include_residual=false", {"in_half_step": 0.0}),
    ],
)
def test_options(pool, wire, field, arguments):
    settings = dqgan(wire, f"strategy.{field}")
    check(pool, settings, 8, [train(JointGame(settings, 3), wire, 7, **arguments)] * 3)


def test_unequal_ranks(pool):
    """The server's mean is over workers, whatever their part of the batch."""
    settings = dqgan("int8", *UNEQUAL)
    check(pool, settings, 8, [train(JointGame(settings, 3), "int8", 7)] * 3)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("strategy", ["CPOAdam", "quantized"])
def test_cpoadam(pool, strategy, ranks):
    """The uncompressed baseline: optimistic Adam on the mean gradient."""
    settings = (f"strategy={strategy}", *(["strategy.wire=exact"] if strategy == "quantized" else []), *ADAM)
    game = JointGame(settings, ranks)
    w, step = game.start, Optimistic(Adam(game.rates))
    for k in range(8):
        w = w - step(game.mean_gradient(w, k))
    check(pool, settings, 8, [w] * ranks)
