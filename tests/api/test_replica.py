"""Replicas in a loop of the user: the steps of plain PyTorch on the whole batch, on any number of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import paragan as pg
from paragan.nets.codebook import VectorQuantizer

Z, X, BATCH = 4, 6, 12


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(Z, 8), nn.Tanh(), nn.Linear(8, X))


class Discriminator(nn.Module):
    """Two heads on one trunk; `unused` has no part in the loss."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(X, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        h = torch.tanh(self.trunk(x))
        return [head(h) for head in self.heads]


def build(dtype=torch.float64):
    torch.manual_seed(0)
    return Generator().to(dtype), Discriminator().to(dtype)


def adam(net):
    return torch.optim.Adam(net.parameters(), 1e-2, betas=(0.5, 0.9), weight_decay=0.1)


def batch(step, dtype=torch.float64):
    rng = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, Z, generator=rng).to(dtype), torch.randn(BATCH, X, generator=rng).to(dtype)


def loss_d(g, d, z, x):
    fakes = d(g(z).detach())
    return sum(fake.mean() - real.mean() + real.square().mean() for fake, real in zip(fakes, d(x)))


def loss_g(g, d, z):
    return -sum(fake.mean() for fake in d(g(z)))


def play(world, steps=6, **options):
    """Play D and G alternately on this rank's part of the batch."""
    g, d = build()
    gen = pg.Replica(g, adam(g), world=world, **options)
    disc = pg.Replica(d, adam(d), world=world, **options)
    for step in range(steps):
        z, x = (t[world.rank :: world.size] for t in batch(step))
        with disc.turn():
            loss_d(g, d, z, x).backward()
        with gen.turn():
            loss_g(g, d, z).backward()
    return gen, disc


def play_plain(steps=6, max_norm=None):
    """The same in plain PyTorch, on the whole batch."""
    g, d = build()
    opt_g, opt_d = adam(g), adam(d)
    for step in range(steps):
        z, x = batch(step)
        opt_d.zero_grad()
        loss_d(g, d, z, x).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(d.parameters(), max_norm)
        opt_d.step()
        opt_g.zero_grad()
        loss_g(g, d, z).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(g.parameters(), max_norm)
        opt_g.step()
    return g, d


def tensors(*modules):
    return [p.detach().clone() for module in modules for p in (*module.parameters(), *module.buffers())]


def replica_tensors(*replicas):
    """All that a replica holds: parameters, buffers, optimizer state, average, residuals."""
    values = []
    for replica in replicas:
        values += tensors(*replica.modules)
        states = [sorted(replica.optimizer.state.get(p, {}).items()) for p in replica.trained]
        values += [value for state in states for _, value in state if torch.is_tensor(value)]
        values += [average.params for average in replica.averages]
        values += [v for flat in replica.flats for _, v in sorted(flat.states().items())]
    return [value.clone() for value in values]


def assert_close(a, b, tolerance=1e-12):
    assert len(a) == len(b)
    for x, y in zip(a, b):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def assert_same(a, b):
    assert len(a) == len(b)
    assert all(torch.equal(x, y) for x, y in zip(a, b))


# The step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_ranks_equal_plain_pytorch_on_the_whole_batch(pool, ranks, max_norm):
    def job(world):
        gen, disc = play(world, max_norm=max_norm)
        return tensors(*gen.modules, *disc.modules)

    expected = tensors(*play_plain(max_norm=max_norm))
    for result in pool(ranks, job):
        assert_close(result, expected)  # `unused` too, which weight decay would move


def test_unequal_batches_are_weighted(pool):
    def job(world):
        g, d = build()
        gen, disc = (pg.Replica(net, adam(net), world=world) for net in (g, d))
        for step in range(4):
            z, x = (t[:8] if world.rank == 0 else t[8:] for t in batch(step))
            with disc.turn(weight=len(x)):
                loss_d(g, d, z, x).backward()
            with gen.turn(weight=len(z)):
                loss_g(g, d, z).backward()
        return tensors(g, d)

    for result in pool(2, job):
        assert_close(result, tensors(*play_plain(4)))


@pytest.mark.parametrize("backwards", [3, None])
def test_accumulated_passes_are_summed_and_exchanged_once(pool, backwards):
    def job(world):
        g, d = build()
        gen, disc = (pg.Replica(net, adam(net), world=world) for net in (g, d))
        for step in range(4):
            z, x = (t[world.rank :: world.size] for t in batch(step))
            with disc.turn(backwards=backwards):
                for part in range(3):
                    (loss_d(g, d, z[part::3], x[part::3]) / 3).backward()
            with gen.turn():
                loss_g(g, d, z).backward()
        return tensors(g, d), disc.meter.messages

    results = pool(2, job)
    for result, messages in results:
        assert_close(result, tensors(*play_plain(4)))
        assert messages == results[0][1]


def test_turns_inside_each_other_are_simultaneous():
    g, d = build()
    gen, disc = pg.Replica(g, adam(g)), pg.Replica(d, adam(d))
    z, x = batch(0)
    with disc.turn() as d_turn, gen.turn() as g_turn:
        d_turn.backward(loss_d(g, d, z, x))
        g_turn.backward(loss_g(g, d, z))
    g2, d2 = build()
    opt_g, opt_d = adam(g2), adam(d2)
    loss_d(g2, d2, z, x).backward()
    grads = [None if p.grad is None else p.grad.clone() for p in d2.parameters()]
    opt_g.zero_grad()
    loss_g(g2, d2, z).backward()
    for p, grad in zip(d2.parameters(), grads):
        p.grad = grad
    opt_d.step()
    opt_g.step()
    assert_same(tensors(g, d), tensors(g2, d2))


def test_simultaneous_turns_with_parameters_that_one_rank_does_not_use(pool):
    def job(world):
        torch.manual_seed(0)
        a, b = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double() for _ in range(2))
        first, second = (pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1), world=world) for net in (a, b))
        x = torch.ones(2, 3, dtype=torch.float64)[world.rank :: world.size] * (1 + world.rank)
        with first.turn() as turn_a, second.turn() as turn_b:
            turn_a.backward((a if world.rank == 0 else a[0])(x).sum())  # what remains is sent at the end
            turn_b.backward(b(x).square().sum())
        return tensors(a, b)

    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double() for _ in range(2))
    x = torch.ones(1, 3, dtype=torch.float64)
    (a(x).sum() + a[0](2 * x).sum() + b(x).square().sum() + b(2 * x).square().sum()).div(2).backward()
    expected = [p.detach() - 0.1 * p.grad for net in (a, b) for p in net.parameters()]
    for result in pool(2, job):
        assert_close(result, expected)


def test_a_rank_with_an_empty_batch(pool):
    def job(world):
        torch.manual_seed(0)
        net = nn.Linear(2, 1).double()
        replica = pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1), world=world)
        start, size = net.weight.detach().clone(), 0 if world.rank else 3
        with replica.turn(weight=size):
            net(torch.ones(size, 2, dtype=torch.float64)).mean().backward()  # not a number on rank 1
        return start - net.weight.detach()

    for difference in pool(2, job):
        torch.testing.assert_close(difference, torch.full_like(difference, 0.1))


def test_parameters_and_buffers_of_odd_shapes(pool, tmp_path):
    def build_odd():
        net = nn.Linear(3, 1)
        net.nothing = nn.Parameter(torch.empty(0))
        net.scale = nn.Parameter(torch.tensor(2.0))
        net.register_buffer("rotation", torch.tensor([1j, 2 + 1j]))
        net.register_buffer("nothing_here", torch.ones(0, dtype=torch.bool))
        net.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        return net

    def job(world):
        net = build_odd()
        replica = pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1), world=world)
        for _ in range(2):
            with replica.turn():
                (net(torch.ones(1, 3)) * net.scale + net.nothing.sum()).mean().backward()
        pg.save(tmp_path, replica)
        return tensors(net)

    first, second = pool(2, job)
    assert_same(first, second)
    net = build_odd()
    net.rotation.zero_()
    pg.load(tmp_path, pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1)))
    assert_same(tensors(net), first)
    assert_same(list(net.buffers()), list(build_odd().buffers()))


@pytest.mark.parametrize("groups", ["names of parameters", "name of a group"])
def test_optimizers_whose_groups_have_names_are_saved(tmp_path, groups):
    def make():
        net = nn.Linear(2, 1)
        params = (
            net.named_parameters()
            if groups == "names of parameters"
            else [{"params": list(net.parameters()), "name": "all"}]
        )
        return pg.Replica(net, torch.optim.Adam(params, 0.1))

    def take_turn(replica):
        with replica.turn():
            replica.modules[0](torch.ones(1, 2)).square().sum().backward()

    first = make()
    take_turn(first)
    pg.save(tmp_path, first)
    again = make()
    pg.load(tmp_path, again)
    for replica in (first, again):
        take_turn(replica)
    assert_same(replica_tensors(again), replica_tensors(first))


def test_the_others_are_frozen_inside_a_turn_and_trainable_after_it():
    g, d = build()
    gen, disc = pg.Replica(g, adam(g)), pg.Replica(d, adam(d))
    with disc.turn():
        assert not any(p.requires_grad for p in g.parameters())
        loss_d(g, d, *batch(0)).backward()
    assert all(p.requires_grad for p in (*g.parameters(), *d.parameters()))
    with gen.turn():
        assert not any(p.requires_grad for p in d.parameters())


def test_a_turn_without_backward_takes_no_step(pool):
    def job(world):
        g, _ = build()
        gen = pg.Replica(g, adam(g), world=world)
        before = tensors(g)
        with gen.turn():
            pass
        with gen.turn():  # one rank only
            if world.rank:
                g(torch.ones(1, Z, dtype=torch.float64)).sum().backward()
        return before, tensors(g)

    (before, after), (_, other) = pool(2, job)
    assert_same(after, other)
    assert not torch.equal(before[0], after[0])


def test_users_may_zero_gradients_and_toggle_them():
    g, d = build()
    opt_g = adam(g)
    gen, disc = pg.Replica(g, opt_g), pg.Replica(d, adam(d))
    for step in range(6):
        z, x = batch(step)
        g.requires_grad_(False)
        with disc.turn():
            disc.optimizer.zero_grad()
            loss_d(g, d, z, x).backward()
        with gen.turn():
            g.requires_grad_(True)
            d.requires_grad_(False)
            opt_g.zero_grad()
            loss_g(g, d, z).backward()
            d.requires_grad_(True)
    assert_same(tensors(g, d), tensors(*play_plain()))


def test_a_list_of_modules_with_shared_and_frozen_parameters(pool):
    def job(world):
        torch.manual_seed(world.rank)  # ranks begin with different weights: those of rank 0 count
        encoder, first, second = nn.Linear(X, 8), nn.Linear(8, 1), nn.Linear(8, 1)
        second.weight = first.weight
        encoder.weight.requires_grad_(False)
        modules = [encoder, first, second]
        parameters = {p: None for module in modules for p in module.parameters() if p.requires_grad}
        replica = pg.Replica(modules, torch.optim.SGD(list(parameters), 0.1), world=world)
        frozen = encoder.weight.clone()
        for _ in range(2):
            with replica.turn():
                h = encoder(torch.full((2, X), 1.0 + world.rank))
                (first(h) + second(h.sin())).mean().backward()
        pg.check_replicas(replica)
        return torch.equal(frozen, encoder.weight), second.weight is first.weight, tensors(*modules)

    (unchanged, shared, a), (_, _, b) = pool(2, job)
    assert unchanged
    assert shared
    assert_same(a, b)


def test_parameters_of_several_dtypes(pool):
    def job(world):
        torch.manual_seed(0)
        a, b = nn.Linear(3, 3).double(), nn.Linear(3, 1)
        replica = pg.Replica([a, b], torch.optim.SGD([*a.parameters(), *b.parameters()], 0.1), world=world, max_norm=1)
        x = torch.arange(6.0).view(2, 3)[world.rank :: world.size]
        with replica.turn():
            b(a(x.double()).float()).mean().backward()
        return tensors(a, b)

    (alone,), ranks = pool(1, job), pool(2, job)
    for result in ranks:
        assert_close(result, alone, 1e-6)


@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients_take_the_same_steps(passes):
    def build_sparse():
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1)])
        return layers, torch.optim.SGD(layers.parameters(), 0.1)

    (layers, optimizer), (plain_layers, plain_optimizer) = build_sparse(), build_sparse()
    replica = pg.Replica(layers, optimizer)
    for step in range(3):
        tokens = torch.tensor([1, 2, step + 4])
        plain_optimizer.zero_grad()
        with replica.turn(backwards=passes):
            for embedding, linear in [layers, plain_layers] * passes:
                linear(embedding(tokens)).square().mean().backward()
        plain_optimizer.step()
    assert_close(tensors(layers), tensors(plain_layers), 1e-6)


def test_the_average_follows_every_turn():
    g, _ = build()
    gen = pg.Replica(g, torch.optim.SGD(g.parameters(), 0.1), ema=0.9)
    expected = tensors(g)
    for step in range(3):
        with gen.turn():
            g(batch(step)[0]).mean().backward()
        expected = [0.9 * e + 0.1 * p for e, p in zip(expected, tensors(g))]
    current = tensors(g)
    with gen.using_ema():
        assert_close(tensors(g), expected)
    assert_same(tensors(g), current)


@pytest.mark.parametrize("wire", ["exact", "int8"])
def test_a_grad_scaler_skips_a_step_that_overflowed_on_one_rank(pool, wire):
    def job(world):
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        replica = pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1), world=world, wire=wire, max_norm=10.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        history = []
        for step in range(3):
            x = torch.ones(2, 3) * (float("inf") if step == 1 and world.rank else 1.0)
            with replica.turn(scaler=scaler):
                scaler.scale(net(x).mean()).backward()
            scaler.update()
            history.append((net.weight.detach().clone(), scaler.get_scale()))
        return history

    for (w0, s0), (w1, s1), (w2, _) in pool(2, job):
        assert torch.equal(w0, w1)
        assert s1 == s0 / 2
        torch.testing.assert_close(w0 - w2, torch.full_like(w0, 0.1), rtol=0.02, atol=0)


def test_buffers_are_those_of_rank_0_the_mean_or_left_to_each_rank(pool):
    def job(world):
        results = []
        for buffers in ("first", "mean", "own"):
            net = nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1))
            net.register_buffer("index", torch.tensor([5 + world.rank]))  # rank 0's from the start
            replica = pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1), world=world, buffers=buffers)
            with replica.turn():
                net.index += 1 + world.rank
                net(torch.tensor([[0.0, 1.0], [2.0, 3.0]]) + world.rank).mean().backward()
            pg.check_replicas(replica, ignore=["*index"] if buffers == "mean" else [])
            results.append((net[0].running_mean.tolist(), net.index.item()))
        return results

    (first, mean, mine), (also_first, also_mean, others) = pool(2, job)
    assert first == also_first == (pytest.approx([0.1, 0.2]), 6)
    assert mean[0] == also_mean[0] == pytest.approx([0.15, 0.25])
    assert (mean[1], also_mean[1]) == (6, 7)
    assert (mine, others) == ((pytest.approx([0.1, 0.2]), 6), (pytest.approx([0.2, 0.3]), 7))


@pytest.mark.parametrize("buffers", ["first", "mean"])
def test_a_codebook_on_two_ranks_is_that_of_one(buffers, pool):
    def job(world):
        torch.manual_seed(0)
        net = nn.ModuleList([nn.Linear(3, 4), VectorQuantizer(8, 4, decay=0.5)])
        replica = pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1), world=world, buffers=buffers)
        for step in range(5):
            x = torch.randn(8, 3, 6, generator=torch.Generator().manual_seed(step))
            with replica.turn():
                h = net[0](x[world.rank :: world.size].transpose(1, 2)).transpose(1, 2)
                quantized = net[1](h)
                (quantized.quantized.square().mean() + quantized.commitment).backward()
            net[1].apply_synchronised()
        return net[1].codebook, net[0].weight.detach()

    ((codebook, weight),) = pool(1, job)
    for other_codebook, other_weight in pool(2, job):
        torch.testing.assert_close(other_codebook, codebook)
        torch.testing.assert_close(other_weight, weight)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("feature", ["compile", "autocast", "checkpoint", "create_graph", "hooks"])
def test_what_users_do_with_networks_works_as_without_a_replica(feature):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    net = copy.deepcopy(plain)
    replica = pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1))
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    x = torch.ones(2, 3)

    def loss_of(model):
        call = torch.compile(model, backend="aot_eager") if feature == "compile" else model
        if feature == "checkpoint":
            h = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=True)
            return (h + torch.utils.checkpoint.checkpoint(model, 2 * x, use_reentrant=True)).mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=feature == "autocast"):
            return call(x).float().square().mean()

    if feature == "hooks":
        for model in (plain, net):
            model[0].register_forward_hook(lambda module, args, out: out * 2)
    options = {"create_graph": True} if feature == "create_graph" else {}
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(plain).backward(**options)
        optimizer.step()
        with replica.turn(backwards=None if feature == "checkpoint" else 1):
            loss_of(net).backward(**options)
    assert_close(tensors(net), tensors(plain), 1e-6)


# Exchanges --------------------------------------------------------------------------------------------------

EXCHANGES = (
    *("sync+int8", "CPOAdam-GQ+int4", "gossip", "gossip+int8+topology=ring", "DQGAN", "DPOSG", "sync+sync_period=2"),
    *("sync+sync_period=2+sync_mode=accumulate", "sync+sync_period=2+sync_mode=gradients"),
    *("sync+sync_period=2+outer=nesterov", "sync+int8+sync_period=3+fragments=2+delay=2"),
)


def play_digits(world, exchange, steps, start=None, folder=None):
    g, d = build(torch.float32)
    is_plain = exchange in ("DQGAN", "DPOSG")
    make = (lambda net: torch.optim.SGD(net.parameters(), 0.05)) if is_plain else adam
    ema = None if is_plain else 0.9
    gen, disc = (pg.Replica(net, make(net), world=world, exchange=exchange, ema=ema) for net in (g, d))
    extra = pg.load(folder, gen, disc) if start else None
    for step in range(extra["step"] if extra else 0, steps):
        z, x = (t[world.rank :: world.size] for t in batch(step, torch.float32))
        with disc.turn():
            loss_d(g, d, z, x).backward()
        with gen.turn():
            loss_g(g, d, z).backward()
        if folder and step + 1 == 3 and not start:
            pg.save(folder, gen, disc, extra={"step": step + 1})
    return gen, disc


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_trains_and_a_resumed_loop_is_the_undisturbed_one(pool, tmp_path, exchange):
    def job(world):
        whole = replica_tensors(*play_digits(world, exchange, 5, folder=tmp_path))
        resumed = replica_tensors(*play_digits(world, exchange, 5, start=True, folder=tmp_path))
        return whole, resumed

    results = pool(2, job)
    for whole, resumed in results:
        assert_same(whole, resumed)
    first, second = (whole[0] for whole, _ in results)
    assert torch.allclose(first, second, atol=0.1)  # under gossip they differ a little


def test_the_wire_sends_fewer_bytes(pool):
    def job(world):
        sent = []
        for wire in ("exact", "int8"):
            net = nn.Linear(100, 100)
            replica = pg.Replica(net, torch.optim.SGD(net.parameters(), 0.1), world=world, wire=wire)
            with replica.turn():
                net(torch.ones(1, 100)).sum().backward()
            sent.append(replica.meter.sent_bytes)
        return sent

    for exact, int8 in pool(2, job):
        assert int8 < 0.3 * exact + 2 * 102 * 8  # and who used which parameter


# Saved replicas ---------------------------------------------------------------------------------------------


def test_a_save_is_loaded_on_another_number_of_ranks(pool, tmp_path):
    def save(world):
        gen, disc = play_digits(world, "sync", 3)
        pg.save(tmp_path, gen, disc, extra={"epoch": 3})
        return tensors(*gen.modules, *disc.modules)

    def load(world):
        gen, disc = play_digits(world, "sync", 0)
        extra = pg.load(tmp_path, gen, disc)
        return extra, gen.turns, tensors(*gen.modules, *disc.modules)

    saved = pool(2, save)[0]
    for extra, turns, loaded in pool(3, load):
        assert (extra, turns) == ({"epoch": 3}, 3)
        assert_same(loaded, saved)


def test_learning_rates_and_betas_are_restored(tmp_path):
    g, _ = build()
    gen = pg.Replica(g, adam(g))
    gen.optimizer.param_groups[0].update(lr=0.123, betas=(0.1, 0.2))
    pg.save(tmp_path, gen)
    other, _ = build()
    again = pg.Replica(other, adam(other))
    assert pg.load(tmp_path, again) == {}
    group = again.optimizer.param_groups[0]
    assert (group["lr"], group["betas"]) == (0.123, (0.1, 0.2))


def test_the_newest_saves_are_kept_and_a_damaged_one_is_passed_over(tmp_path):
    g, _ = build()
    gen = pg.Replica(g, adam(g))
    assert pg.load(tmp_path, gen) is None
    for i in range(3):
        newest = pg.save(tmp_path, gen, extra={"i": i})
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["00000002", "00000003"]
    (newest / "rank0000.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="is damaged"):
        assert pg.load(tmp_path, gen) == {"i": 1}


# Positions --------------------------------------------------------------------------------------------------


def test_random_numbers_are_a_function_of_seed_lane_and_position():
    def draw(position, **where):
        return torch.randn(4, generator=pg.rng(position, **where)).tolist()

    assert draw(3, lane=1) == draw(3, lane=1)
    assert draw(0) == draw(0, lane=0)  # alone, this rank is 0
    assert len({tuple(draw(*where)) for where in [(0,), (1,)]} | {tuple(draw(0, lane=1)), tuple(draw(0, seed=1))}) == 4


def test_ranks_share_an_epoch_as_one_rank_uses_it(pool):
    def job(world):
        sampler = pg.shard(range(11), seed=5, world=world)
        return [list(sampler), list(sampler)], len(sampler), sampler.position

    (first, length, position), (second, _, _) = pool(2, job)
    ((alone, _, _),) = pool(1, job)
    for epoch in range(2):
        together = [i for pair in zip(first[epoch], second[epoch]) for i in pair]
        assert together == alone[epoch][:10]
    assert first[0] != first[1]
    assert (length, position) == (5, 20)


def test_a_sampler_begins_at_its_position():
    sampler = pg.shard(range(10), seed=1)
    epochs = [list(sampler), list(sampler)]
    sampler.position = 13
    assert len(sampler) == 7
    assert list(sampler) == epochs[1][3:]


def test_a_loader_takes_it():
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = torch.utils.data.DataLoader(data, 4, sampler=pg.shard(data, shuffle=False))
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_epoch_has_ended_for_a_loop_that_counts_its_batches():
    sampler = pg.shard(range(8), seed=1)
    loader = torch.utils.data.DataLoader(range(8), 4, sampler=sampler)
    epochs = []
    for _ in range(2):
        batches = iter(loader)  # as Lightning does: it never asks for a batch beyond the last
        epochs.append([next(batches).tolist() for _ in range(len(loader))])
    assert sampler.position == 16
    assert epochs[0] != epochs[1]
