"""Mixing matrices are doubly stochastic, contract at the expected rate, and reject unsupported numbers of ranks."""

from __future__ import annotations

import numpy as np
import pytest

from advice import advises
from paragan.comm.topology import (
    BUILTIN_TOPOLOGIES,
    Complete,
    Exponential,
    GraphFile,
    Hypercube,
    Matching,
    OnePeer,
    RandomRing,
    Ring,
    Star,
    Torus,
    check_topology,
    contraction,
    contraction_by_spectrum,
    is_static,
    messages_per_step,
    neighbors,
    restrict_to,
    rounds_for_consensus,
)
from paragan.core.errors import UsageError

every_topology = pytest.mark.parametrize("topology", BUILTIN_TOPOLOGIES, ids=lambda t: t.name)
SIZES = (1, 2, 3, 4, 6, 8, 9, 16, 32)


def transitive_closure(reaches, size):
    for _ in range(size):
        reaches = reaches | reaches @ reaches
    return reaches


@every_topology
def test_every_matrix_is_doubly_stochastic_and_connects(topology):
    for size in (n for n in SIZES if not topology.unsupported_reason(n)):
        reaches = np.eye(size, dtype=bool)
        for step in range(topology.period(size) or 60):
            w = topology.matrix(size, step)
            assert w.shape == (size, size)
            assert (w >= 0).all()
            np.testing.assert_allclose(w.sum(0), 1, atol=1e-12)
            np.testing.assert_allclose(w.sum(1), 1, atol=1e-12)
            reaches |= (w > 0) @ reaches
        if topology.period(size) == 1:
            assert transitive_closure(reaches, size).all()
        else:
            assert (reaches | reaches.T).all()


@pytest.mark.slow(after=9)
@every_topology
@pytest.mark.parametrize("size", [4, 8, 16])
def test_contraction_bounds_the_distance_to_the_mean(topology, size):
    """A fixed W contracts at most by `contraction`, exactly so from the worst start; a random W does in the mean."""
    rate = contraction(topology, size)
    period = topology.period(size)
    if period:
        product = np.eye(size)
        for step in range(3 * period):
            product = topology.matrix(size, step) @ product
        assert np.linalg.norm(product - 1 / size, 2) <= rate ** (3 * period) + 1e-12
        if period == 1:
            w = topology.matrix(size, 0)
            assert np.linalg.norm(w - 1 / size, 2) == pytest.approx(rate, abs=1e-12)
        return
    x = np.random.default_rng(0).standard_normal(size)
    x -= x.mean()
    ratios = [np.square(topology.matrix(size, step) @ x).sum() / np.square(x).sum() for step in range(4000)]
    assert np.mean(ratios) ** 0.5 == pytest.approx(rate, rel=0.02)


def test_known_contractions():
    assert [round(contraction(Ring(), n), 3) for n in (4, 8, 16, 32)] == [0.333, 0.805, 0.949, 0.987]
    assert [rounds_for_consensus(Ring(), n, 1e-2) for n in (4, 8, 16, 32)] == [5, 22, 89, 358]
    assert contraction(Complete(), 8) == 0
    assert contraction(Star(), 8) == pytest.approx(1 - 1 / 8)
    assert contraction(Matching(), 8) == pytest.approx((6 / 14) ** 0.5)
    assert contraction(Hypercube(), 8) == pytest.approx(0.5)
    assert contraction(Exponential(), 8) == pytest.approx(0.5)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 64])
def test_one_peer_reaches_the_mean_in_log2_steps(size):
    product = np.eye(size)
    for step in range(size.bit_length() - 1):
        product = OnePeer().matrix(size, step) @ product
    np.testing.assert_allclose(product, 1 / size, atol=1e-15)
    assert contraction(OnePeer(), size) == 0


def test_messages_per_step():
    sent = {t.name: messages_per_step(t, 16) for t in BUILTIN_TOPOLOGIES}
    assert sent == {
        "ring": 2, "torus": 4, "hypercube": 4, "exponential": 4, "one-peer": 1, "complete": 15,
        "star": 30 / 16, "matching": 1, "random-ring": 2,
    }  # fmt: skip


@every_topology
def test_every_receive_has_a_send(topology):
    for size in (n for n in SIZES if not topology.unsupported_reason(n)):
        for step in (0, 1, 5):
            peers = [neighbors(topology, size, rank, step) for rank in range(size)]
            assert all(j in peers[i].recv_from for j in range(size) for i in peers[j].send_to)
            assert sum(len(p.send_to) for p in peers) == sum(len(p.recv_from) for p in peers)
            assert all(p.self_weight + sum(p.recv_from.values()) == pytest.approx(1) for p in peers)


def test_random_graphs_differ_from_step_to_step_and_follow_the_seed():
    assert not np.array_equal(RandomRing().matrix(8, 0), RandomRing().matrix(8, 1))
    assert np.array_equal(Matching(seed=3).matrix(8, 7), Matching(seed=3).matrix(8, 7))
    assert not np.array_equal(Matching(seed=3).matrix(8, 7), Matching(seed=4).matrix(8, 7))


@pytest.mark.parametrize(
    ("topology", "size", "refusal"),
    [
        (
            Hypercube(),
            6,
            advises(
                "strategy.topology=hypercube on 6 ranks: it needs a number of ranks that is a power of two. "
                "Use ring, torus, exponential, one-peer, complete, star, matching, random-ring"
            ),
        ),
        (
            Torus(),
            7,
            advises(
                "strategy.topology=torus on 7 ranks: it needs a number of ranks that is not prime. "
                "Use ring, exponential, one-peer, complete, star, matching, random-ring"
            ),
        ),
    ],
)
def test_topologies_of_the_advice_are_usable(topology, size, refusal):
    with refusal as raised:
        check_topology(topology, size)
    names = str(raised.value).partition(". Use ")[2].split(", ")
    usable = [t for t in BUILTIN_TOPOLOGIES if t.name in names]
    assert len(usable) == len(names)
    for advised in usable:
        check_topology(advised, size)
        assert contraction(advised, size) < 1


RING4 = "0.5,0.25,0,0.25\n0.25,0.5,0.25,0\n0,0.25,0.5,0.25\n0.25,0,0.25,0.5\n"


def test_graph_from_a_file(tmp_path):
    file = tmp_path / "ring.csv"
    file.write_text(RING4)
    graph = GraphFile(path=str(file))
    check_topology(graph, 4)
    assert contraction(graph, 4) == pytest.approx(0.5)
    assert neighbors(graph, 4, 0, 3).recv_from == {1: 0.25, 3: 0.25}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (RING4.replace("0.5,0.25,0,0.25", "0.6,0.25,0,0.25"), "row 0 of .* adds up to 1.1"),
        ("0.5,0.5\n", "as many numbers as there are lines"),
        ("0.5 half\n0.5 0.5\n", "could not convert"),
        ("1 0 0 0\n0 1 0 0\n0 0 .5 .5\n0 0 .5 .5\n", "ranks 0 have no link to the others"),
        (".5 .5 0 0\n.5 .5 0 0\n0 0 .5 .5\n0 0 .5 .5\n", "ranks 0, 1 have no link to the others"),
        ("0 1 0 0\n1 0 0 0\n0 1 0 0\n0 0 0 1\n", "column 1 of .* adds up to 2"),
        ("1.5 -.5 0 0\n-.5 1.5 0 0\n0 0 1 0\n0 0 0 1\n", "row 0 of .* has a negative weight"),
        ("1\n", "the matrix in .* is for 1 ranks. Use ring"),
    ],
)
def test_invalid_graph_is_rejected(tmp_path, text, message):
    file = tmp_path / "graph.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        check_topology(GraphFile(path=str(file)), 4)


@pytest.mark.parametrize(
    ("topology", "original_ranks", "initial_size", "name"),
    [
        (Ring(), (0, 1, 3), 4, "ring"),
        (OnePeer(), (1, 2, 3), 4, "one-peer"),
        (Hypercube(), (0, 1, 3), 4, "induced-subgraph"),  # the path 0 - 1 - 3 remains of the square
        (Hypercube(), (0, 3), 4, "hypercube"),
        (Torus(), (0, 1, 2, 3, 4), 6, "induced-subgraph"),
        (Hypercube(), (0, 3, 5), 8, "ring"),  # no two of these corners of the cube are neighbors
    ],
)
def test_survivors_stay_connected(topology, original_ranks, initial_size, name):
    restricted = restrict_to(topology, original_ranks, initial_size)
    assert restricted.name == name
    size = len(original_ranks)
    w = restricted.matrix(size, 0)
    np.testing.assert_allclose(w.sum(0), 1)
    np.testing.assert_allclose(w.sum(1), 1)
    assert contraction(restricted, size) < 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
@every_topology
def test_static_is_the_same_and_symmetric(topology, size):
    if topology.unsupported_reason(size):
        pytest.skip(topology.unsupported_reason(size))
    matrices = [topology.matrix(size, step) for step in range(3)]
    is_symmetric = np.allclose(matrices[0], matrices[0].T)
    is_same = topology.period(size) == 1 and all(np.array_equal(w, matrices[0]) for w in matrices)
    assert is_static(topology, size) == (is_same and is_symmetric)


def test_static_topologies():
    assert is_static(Ring(), 100_000)
    assert not is_static(Exponential(), 100_000)
    assert [t.name for t in BUILTIN_TOPOLOGIES if is_static(t, 8)] == ["ring", "torus", "hypercube", "complete", "star"]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12, 31, 32, 64])
@pytest.mark.parametrize("topology", [t for t in BUILTIN_TOPOLOGIES if hasattr(t, "senders")], ids=lambda t: t.name)
def test_senders_are_those_of_the_matrix(topology, size):
    if topology.unsupported_reason(size):
        pytest.skip(topology.unsupported_reason(size))
    for step in range(topology.period(size) or 3):
        senders = topology.senders(size, step)
        w = np.eye(size) / (1 + len(senders))
        for sender in senders:
            w[np.arange(size), sender] += 1 / (1 + len(senders))
        np.testing.assert_allclose(w, topology.matrix(size, step), atol=1e-12)


HAVE_SPECTRUM = [t for t in BUILTIN_TOPOLOGIES if hasattr(t, "spectrum")]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 12, 31, 32, 64])
@pytest.mark.parametrize("topology", HAVE_SPECTRUM, ids=lambda t: t.name)
def test_contraction_by_spectrum_equals_that_of_the_matrix(topology, size):
    if topology.unsupported_reason(size):
        pytest.skip(topology.unsupported_reason(size))
    assert contraction_by_spectrum(topology, size) == pytest.approx(contraction(topology, size), abs=1e-6)


def test_a_topology_without_a_spectrum_is_refused_with_those_that_have_one():
    with advises(f"strategy.topology=torus: no formula for 16 ranks. Use {', '.join(t.name for t in HAVE_SPECTRUM)}"):
        contraction_by_spectrum(Torus(), 16)
    assert all(0 <= contraction_by_spectrum(topology, 16) < 1 for topology in HAVE_SPECTRUM)
