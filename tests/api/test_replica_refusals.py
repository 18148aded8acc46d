"""What a replica refuses: one line that names what is wrong, and advice that works when it is followed."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paragan as pg
from advice import advises
from paragan.api import joined_world
from paragan.core.errors import UsageError


def sgd(*modules, lr=0.1, **options):
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr, **options)


def take_turn(replica, net, **options):
    with replica.turn(**options):
        net(torch.ones(1, net.in_features)).sum().backward()


# Turns ------------------------------------------------------------------------------------------------------


def test_a_backward_outside_a_turn():
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, sgd(net))
    with advises(
        "Linear bias: a backward pass outside a turn of Linear reaches it, and its gradient would be lost. Use "
        "turn.backward(loss), or run forward inside `with replica.turn():`, or detach() what is an input"
    ):
        net(torch.ones(1, 2)).sum().backward()
    take_turn(replica, net)
    other = nn.Linear(1, 1)
    other(net(torch.ones(1, 2)).detach()).sum().backward()


def test_a_backward_through_another_replica_outside_its_turn():
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    gen, disc = pg.Replica(g, sgd(g)), pg.Replica(d, sgd(d))
    fake = g(torch.ones(1, 2))  # before the turn, where g was trainable

    def play():
        with disc.turn():
            d(fake).sum().backward()

    with pytest.raises(UsageError, match="outside a turn of Linear"):
        play()
    assert not gen.is_in_turn


def test_more_backward_passes_than_declared():
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, sgd(net))

    def play(**options):
        with replica.turn(**options):
            for _ in range(2):
                net(torch.ones(1, 2)).sum().backward()

    with advises(
        "Linear bias: got a gradient in backward pass 2 of a turn of Linear that has 1. Use turn(backwards=2), or "
        "turn(backwards=None) if their number varies"
    ):
        play()
    play(backwards=2)
    play(backwards=None)
    with advises("backwards=0: must be 1 or more. Use 1, or None if the number varies"):
        play(backwards=0)


def test_backward_in_turns_that_are_open_at_once():
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    gen, disc = pg.Replica(g, sgd(g)), pg.Replica(d, sgd(d))
    z = torch.ones(1, 2)

    def play_wrongly():
        with disc.turn(), gen.turn():
            d(g(z).detach()).sum().backward()
            d(g(z)).sum().backward()

    with advises(
        "Linear bias: got more gradients than the turn of Linear has backward passes, while another turn is open. Use "
        "turn.backward(loss), which reaches the parameters of that turn only"
    ):
        play_wrongly()
    with disc.turn() as d_turn, gen.turn() as g_turn:
        d_turn.backward(d(g(z).detach()).sum())
        g_turn.backward(d(g(z)).sum())


def test_two_turns_of_one_replica_inside_each_other():
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, sgd(net))

    def play_wrongly():
        with replica.turn():
            take_turn(replica, net)

    with advises(
        "Linear: a turn begins inside another turn of the same replica. Close the first one, or use turn(backwards=2) "
        "for two passes of one step"
    ):
        play_wrongly()
    take_turn(replica, net)


def test_a_step_of_the_optimizer_by_hand():
    net = nn.Linear(2, 1)
    optimizer = sgd(net)
    replica = pg.Replica(net, optimizer)
    take_turn(replica, net)
    with advises(
        "Linear: its optimizer is stepped by hand, and the turn takes the step. Leave step() out, or give the "
        "GradScaler that calls it to the turn"
    ):
        optimizer.step()
    take_turn(replica, net, scaler=torch.amp.GradScaler("cpu", enabled=False))
    replica.release()
    optimizer.step()


def test_gradients_that_are_changed_before_they_are_averaged():
    net = nn.Linear(2, 1)
    optimizer = sgd(net)
    replica = pg.Replica(net, optimizer, max_norm=1.0)

    def play(change):
        with replica.turn():
            net(torch.ones(1, 2)).sum().backward()
            change()

    with advises("Linear bias: zero_grad() after backward drops its gradient. Leave zero_grad() out"):
        play(optimizer.zero_grad)
    with advises(
        "Linear: its gradients are changed inside the turn, before they are averaged. Use max_norm and "
        "turn(scaler=scaler)"
    ):
        play(lambda: nn.utils.clip_grad_norm_(net.parameters(), 1e-3))
    scaler = torch.amp.GradScaler("cpu")
    with replica.turn(scaler=scaler):
        scaler.scale(net(torch.ones(1, 2)).sum()).backward()


def test_weights(pool):
    def job(world):
        net = nn.Linear(2, 1)
        replica = pg.Replica(net, sgd(net), world=world, exchange="gossip")
        with advises("weight=3: exchange=gossip does not average the gradient of every turn. Leave weight out"):
            take_turn(replica, net, weight=3)
        seldom = nn.Linear(2, 1)
        with advises("weight=3: exchange=sync+sync_period=8 does not average the gradient of every turn"):
            take_turn(pg.Replica(seldom, sgd(seldom), world=world, exchange="sync+sync_period=8"), seldom, weight=3)
        take_turn(replica, net)
        with advises("weight=-1: must be 0 or more. Use the number of samples of this rank's batch"):
            take_turn(replica, net, weight=-1)
        net = nn.Linear(2, 1)
        take_turn(pg.Replica(net, sgd(net), world=world), net, weight=4)

    pool(2, job)


def test_a_scaler_with_the_steps_of_a_paper():
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, sgd(net), exchange="DQGAN")
    with advises("scaler: exchange=DQGAN takes its own steps. Leave scaler out"):
        take_turn(replica, net, scaler=torch.amp.GradScaler("cpu"))
    take_turn(replica, net)


def test_networks_that_change_after_the_start():
    net = nn.Sequential(nn.Linear(2, 1))
    replica = pg.Replica(net, sgd(net))
    net.append(nn.Linear(1, 1))
    with (
        advises(
            "Sequential: parameters were added or replaced after its Replica was made, and would not be exchanged. "
            "Build the whole network first"
        ),
        replica.turn(),
    ):
        pass
    replica.release()
    with pg.Replica(net, sgd(net)).turn():
        pass


def test_optimizers_that_change_after_the_start():
    net = nn.Linear(2, 1)
    optimizer = sgd(net)
    replica = pg.Replica(net, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with advises(
        "Linear: parameters were added to its optimizer after its Replica was made, and would not be exchanged. Build "
        "the whole optimizer first"
    ):
        take_turn(replica, net)
    replica.release()
    take_turn(pg.Replica(net, sgd(net)), net)


def test_modules_that_are_moved_after_the_start():
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, sgd(net))
    net.double()
    with advises(
        "Linear: its parameters were moved after its Replica was made (to(), half(), .data=). Move them first"
    ):
        take_turn(replica, net)
    replica.release()
    net.float()
    take_turn(pg.Replica(net, sgd(net)), net)


def test_a_parameter_that_is_unfrozen_after_the_start():
    net = nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    replica = pg.Replica(net, sgd(net))
    take_turn(replica, net)
    net.bias.requires_grad_(True)
    with advises(
        "Linear bias: was frozen when its Replica was made, and its gradient would not be exchanged. Make the Replica "
        "first, and freeze the parameter then"
    ):
        take_turn(replica, net)
    replica.release()
    replica = pg.Replica(net, sgd(net))
    net.bias.requires_grad_(False)
    before = net.bias.item()
    take_turn(replica, net)
    assert net.bias.item() == before


@pytest.mark.parametrize("exchange", ["sync", "gossip", "quantized"])
def test_ranks_that_take_different_turns(pool, exchange):
    """Reported of EnCodec trainers (encodec-pytorch#30), where each rank drew whether D trains."""

    def job(world):
        a, b = nn.Linear(2, 1), nn.Linear(2, 1)
        first, second = (pg.Replica(net, sgd(net), world=world, exchange=exchange) for net in (a, b))
        take_turn(first, a)
        take_turn(second, b)
        with advises(
            "Linear: another rank plays the turn of another replica. Take the same turns in the same order on all "
            "ranks: decide by the step, not by the loss or random numbers of a rank"
        ):
            take_turn(*((first, a) if world.is_main else (second, b)))
        return tensors_of(a, b)

    first, second = pool(2, job)
    assert first == second


def tensors_of(*modules):
    return [p.tolist() for module in modules for p in module.parameters()]


# Construction -----------------------------------------------------------------------------------------------


def test_modules_and_optimizers_that_do_not_fit():
    a, b = nn.Linear(2, 1), nn.Linear(1, 1)
    with advises("modules: is empty. Use a module or a list of modules"):
        pg.Replica([], sgd(a))
    with advises("modules: holds a str. Use a module or a list of modules"):
        pg.Replica([a, "b"], sgd(a))
    with advises("optimizer: is a list. Use a torch.optim.Optimizer"):
        pg.Replica(a, [])
    with advises(
        "optimizer: holds a parameter [1, 1] that Linear has not. Give the modules that it belongs to, or leave it out "
        "of the optimizer"
    ):
        pg.Replica(a, sgd(a, b))
    with advises(
        "Linear 2 weight (and 1 more): requires a gradient, and the optimizer of Linear 1 and Linear 2 does not hold "
        "it. Add it to the optimizer, or freeze it with requires_grad_(False)"
    ):
        pg.Replica([a, b], sgd(a))
    pg.Replica([a, b], sgd(a, b)).release()
    b.requires_grad_(False)
    pg.Replica([a, b], sgd(a))


def test_what_differs_on_purpose_is_not_compared(pool):
    def job(world):
        a, b = nn.Linear(2, 1), nn.Linear(2, 1)
        first = pg.Replica(a, sgd(a), world=world, exchange="gossip")
        second = pg.Replica(b, sgd(b), world=world)
        with advises(
            "Linear: its exchange lets ranks differ, as gossip and local steps do. Leave it out of check_replicas"
        ):
            pg.check_replicas(first, second)
        pg.check_replicas(second)
        wrapped = DistributedDataParallel(nn.Linear(2, 1))
        with advises("modules: holds a DistributedDataParallel. Use its .module, and call that one"):
            pg.Replica(wrapped, sgd(wrapped), world=world)
        pg.Replica(wrapped.module, sgd(wrapped), world=world)

    pool(2, job)


def test_parameters_of_two_optimizers():
    a, b = nn.Linear(2, 1), nn.Linear(1, 1)
    first = pg.Replica(a, sgd(a))
    with advises(
        "Linear 1 weight: is moved by the optimizer of another replica too. Leave it out of one of the optimizers, or "
        "call release() of a replica that is not used any more"
    ):
        pg.Replica([a, b], sgd(a, b))
    second = pg.Replica([a, b], sgd(b))  # it uses `a`, which the first one moves
    with second.turn():
        b(a(torch.ones(1, 2))).sum().backward()
    take_turn(first, a)
    first.release()
    second.release()
    pg.Replica([a, b], sgd(a, b))


def test_parameters_that_cannot_be_trained():
    frozen = nn.Linear(1, 1).requires_grad_(False)
    with advises("Linear: has no parameters to train. Give modules with parameters that require gradients"):
        pg.Replica(frozen, sgd(frozen))
    lazy = nn.LazyLinear(1)
    with advises(
        "LazyLinear weight: has no shape before its first pass. Run the network once before, or give its sizes"
    ):
        pg.Replica(lazy, sgd(lazy))
    lazy(torch.ones(1, 2))
    pg.Replica(lazy, sgd(lazy))
    wave = nn.Linear(1, 1, dtype=torch.complex64)
    with advises("Linear weight: is torch.complex64. Use a floating-point dtype"):
        pg.Replica(wave, sgd(wave))


def test_options():
    net = nn.Linear(2, 1)

    def make(**options):
        replica = pg.Replica(net, sgd(net), **options)
        take_turn(replica, net)
        replica.release()

    with advises("max_norm=0: must be positive. Use 1, or None to clip nothing"):
        make(max_norm=0)
    make(max_norm=1)
    with advises("ema=1.5: must be between 0 and 1. Use 0.999, or None for no average"):
        make(ema=1.5)
    make(ema=0.999)
    with advises("buffers=sum: there is no such choice. Use first, mean or own"):
        make(buffers="sum")
    make(buffers="own")
    with advises("exchange: is a int. Use the name of a strategy, such as sync or gossip"):
        make(exchange=3)
    make(exchange="gossip")
    with advises(
        "exchange=async: gives ranks or turns other roles, which a loop of yours cannot play. Use paragan train, "
        "Estimator or ScalingManager for it, or exchange=sync, quantized or gossip"
    ):
        make(exchange="async")
    make(exchange="quantized")
    with advises(
        "exchange=async-gossip: messages are under way between turns, and a loop of yours does not wait for them. Use "
        "exchange=gossip"
    ):
        make(exchange="async-gossip")
    with advises("exchange=sync: outer_d is for a D, and a replica is one player. Use outer"):
        make(exchange="sync+sync_period=2+outer_d=nesterov")
    make(exchange="sync+sync_period=2+outer=nesterov")
    with advises("max_norm=1: exchange=DPOSG takes its own steps. Leave max_norm out"):
        make(exchange="DPOSG", max_norm=1.0)
    make(exchange="DPOSG")


def test_unknown_names_get_the_nearest():
    net = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="did you mean int8"):
        pg.Replica(net, sgd(net), wire="imt8")
    with pytest.raises(UsageError, match="did you mean gossip"):
        pg.Replica(net, sgd(net), exchange="gosip")
    with pytest.raises(UsageError, match=r"did you mean .*sync_period"):
        pg.Replica(net, sgd(net), exchange={"name": "sync", "sync_perod": 2})
    with pytest.raises(UsageError, match="per-label"):
        pg.Replica(net, sgd(net), exchange="per-label")


def test_the_steps_of_a_paper_need_plain_descent():
    net = nn.Linear(2, 1)
    with advises(
        "exchange=DQGAN: takes plain gradient steps of its own. Use torch.optim.SGD with one learning rate, without "
        "momentum and weight decay"
    ):
        pg.Replica(net, sgd(net, momentum=0.9), exchange="DQGAN")
    pg.Replica(net, sgd(net), exchange="DQGAN").release()
    other = nn.Linear(2, 1).double()
    with advises("exchange=DQGAN: parameters have several dtypes. Use one"):
        pg.Replica([net, other], sgd(net, other), exchange="DQGAN")
    pg.Replica([net, other.float()], sgd(net, other), exchange="DQGAN")


def test_a_lossy_wire_of_other_dtypes(pool):
    def job(world):
        net = nn.Linear(2, 1).double()
        with advises("wire=int8: Linear weight is not float32. Use wire=exact, or float32 parameters"):
            pg.Replica(net, sgd(net), world=world, wire="int8")
        pg.Replica(net, sgd(net), world=world, wire="exact").release()
        net.float()
        pg.Replica(net, sgd(net), world=world, wire="int8")

    pool(2, job)


def test_modules_on_another_kind_of_device(pool):
    def job(world):
        net = nn.Linear(2, 1, device="meta")
        with advises(
            "Linear weight: is on meta, and the ranks communicate for cpu. Use paragan.join(device='meta'), or move "
            "the modules"
        ):
            pg.Replica(net, sgd(net), world=world)
        net = nn.Linear(2, 1)
        pg.Replica(net, sgd(net), world=world)

    pool(2, job)


def test_ranks_with_different_networks(pool):
    def job(world):
        net = nn.Linear(2, 1 + world.rank)
        with advises(
            "ranks have different networks: Linear weight float32 [1, 2] on rank 0, Linear weight float32 [2, 2] on "
            "rank 1. Build the same network on all ranks"
        ):
            pg.Replica(net, sgd(net), world=world)

    pool(2, job)


# Files ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_saved(tmp_path):
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, sgd(net))
    with advises("replicas: there is none. Use save(folder, gen, disc) and load(folder, gen, disc)"):
        pg.save(tmp_path)
    with advises("replicas: holds a Linear. Use paragan.Replica"):
        pg.save(tmp_path, net)
    with advises("max_checkpoints=0: must be 1 or more. Use 2"):
        pg.save(tmp_path, replica, max_checkpoints=0)
    with advises("extra: Object of type Tensor is not JSON serializable. Use numbers, texts, lists and mappings only"):
        pg.save(tmp_path, replica, extra={"x": torch.ones(1)})

    def save_inside():
        with replica.turn():
            pg.save(tmp_path, replica)

    with advises("Linear: its turn is open. Save and load between turns"):
        save_inside()
    pg.save(tmp_path, replica, extra={"x": [1.0]}, max_checkpoints=2)


def test_what_cannot_be_loaded(tmp_path):
    net, other = nn.Linear(2, 1), nn.Linear(3, 1)
    replica = pg.Replica(net, sgd(net))
    folder = pg.save(tmp_path, replica)
    with advises(f"{folder}: holds 1 replicas (Linear), not 2. Give as many, in order"):
        pg.load(tmp_path, replica, pg.Replica(other, sgd(other)))
    with advises(
        f"{folder}: holds other networks: Linear weight was [1, 2], now [1, 3]. Build the networks that were saved"
    ):
        pg.load(tmp_path, pg.Replica(other, sgd(other)))
    same = nn.Linear(2, 1)
    with advises(f"{folder}: lacks an average of Linear. Use ema as it was when it was saved"):
        pg.load(tmp_path, pg.Replica(same, sgd(same), ema=0.9))
    with advises(
        f"{folder}: Linear was saved with exchange name=sync, now gossip. Use the exchange and wire that it was saved "
        "with"
    ):
        pg.load(tmp_path, pg.Replica(same, sgd(same), exchange="gossip"))
    assert pg.load(tmp_path, pg.Replica(same, sgd(same))) == {}
    assert torch.equal(same.weight, net.weight)
    with advises("load: 'cpu' is not a replica. Use device='cpu'"):
        pg.load(tmp_path, "cpu")


def test_files_that_are_damaged_or_of_something_else(tmp_path, finished):
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, sgd(net))
    with advises("was not written by paragan.save. Use the folder that was given to paragan.save"):
        pg.load(finished / "checkpoints", replica)
    folder = pg.save(tmp_path, replica)
    assert pg.load(tmp_path, replica) == {}
    (folder / "checkpoint.json").write_text("{}")
    with (
        pytest.warns(UserWarning, match="damaged"),
        advises(f"{tmp_path}: every save is damaged. Use another folder to start again"),
    ):
        pg.load(tmp_path, replica)
    assert pg.load(tmp_path / "other", replica) is None


def test_ranks_that_see_different_saves(pool, tmp_path):
    def job(world):
        net = nn.Linear(2, 1)
        replica = pg.Replica(net, sgd(net), world=world)
        pg.save(tmp_path, replica)
        folder = tmp_path if world.is_main else tmp_path / "absent"
        with advises(f"folder={folder}: ranks see different saves (00000001, ). Use storage that all ranks share"):
            pg.load(folder, replica)
        assert pg.load(tmp_path, replica) == {}

    pool(2, job)


# Positions --------------------------------------------------------------------------------------------------


def test_positions_and_small_data():
    for wrong in (-1, 1.5, "a", 1 << 70):
        with advises(f"position={wrong}: must be a whole number, not negative. Use 0 or more"):
            pg.rng(wrong)
    pg.rng(0)
    sampler = pg.shard(range(4))
    with pytest.raises(UsageError, match="position=-1: must be a whole number"):
        sampler.position = -1
    sampler.position = 2
    with advises("dataset: generator has no length. Use a data set that can be indexed"):
        pg.shard(i for i in range(4))
    pg.shard(list(range(4)))
    three = SimpleNamespace(size=3, rank=0)
    with advises("dataset: has 2 samples for 3 ranks. Use more data, or fewer ranks"):
        pg.shard(range(2), world=three)
    pg.shard(range(3), world=three)


def test_a_timeout_that_is_no_time(monkeypatch):
    monkeypatch.setattr(joined_world, "_world", None)
    with advises("device=gpu: unknown. Use auto, cpu or cuda, or torch.device('cuda:1') for a certain one"):
        pg.join(device="gpu")
    with advises("timeout_s=0: must be positive. Use 600"):
        pg.join(timeout_s=0)
    assert pg.join(timeout_s=600, device="cpu").size == 1


def test_a_replica_that_is_gone_leaves_the_network_to_others():
    net = nn.Linear(2, 1)
    take_turn(pg.Replica(net, sgd(net)), net)
    gc.collect()
    net(torch.ones(1, 2)).sum().backward()
    take_turn(pg.Replica(net, sgd(net)), net)


def test_a_turn_that_begins_after_a_backward_pass_of_another():
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    gen, disc = pg.Replica(g, sgd(g)), pg.Replica(d, sgd(d))

    def play_wrongly():
        with disc.turn():
            d(torch.ones(1, 2)).sum().backward()
            take_turn(gen, g)

    with advises(
        "Linear: a turn begins inside a turn of Linear that has had a backward pass. Open both before: `with "
        "disc.turn() as d, gen.turn() as g:`, or close the first one"
    ):
        play_wrongly()
    with disc.turn() as d_turn, gen.turn() as g_turn:
        d_turn.backward(d(torch.ones(1, 2)).sum())
        g_turn.backward(g(torch.ones(1, 2)).sum())
    take_turn(disc, d)
    take_turn(gen, g)


def test_optimizers_that_one_pass_does_not_serve():
    net = nn.Linear(2, 1)
    with advises("optimizer: LBFGS needs several passes in a step. Use another one, such as Adam"):
        pg.Replica(net, torch.optim.LBFGS(net.parameters()))
    with advises("optimizer: SparseAdam needs sparse gradients. Use another one, such as Adam"):
        pg.Replica(net, torch.optim.SparseAdam(net.parameters()))
    take_turn(pg.Replica(net, torch.optim.Adam(net.parameters())), net)


def test_keys_that_json_would_change(tmp_path):
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, sgd(net))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(replica.optimizer, [3])
    state = scheduler.state_dict()
    with advises(
        "extra.scheduler.milestones: has the key 3, which JSON would make a text. Use texts as keys, or leave "
        "extra.scheduler.milestones out"
    ):
        pg.save(tmp_path, replica, extra={"scheduler": state})
    del state["milestones"]
    pg.save(tmp_path, replica, extra={"scheduler": state})
    scheduler.load_state_dict(pg.load(tmp_path, replica)["scheduler"])
    for _ in range(3):
        take_turn(replica, net)
        scheduler.step()
    assert replica.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_what_needs_the_weights_while_the_average_is_in_their_place(tmp_path):
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, sgd(net), ema=0.9)
    with replica.using_ema():
        for use in (lambda: take_turn(replica, net), lambda: pg.save(tmp_path, replica)):
            with advises("Linear: its modules have the averaged weights now. Close using_ema() before"):
                use()
    take_turn(replica, net)
    pg.save(tmp_path, replica)


def test_an_average_that_there_is_not():
    net = nn.Linear(2, 1)
    replica = pg.Replica(net, sgd(net))
    with advises("Linear: has no average. Use Replica(..., ema=0.999)"), replica.using_ema():
        pass
    with pg.Replica(net, replica.optimizer, ema=0.999).using_ema():
        pass


def test_a_save_with_another_optimizer(tmp_path):
    net = nn.Linear(2, 1)
    path = pg.save(tmp_path, pg.Replica(net, torch.optim.Adam(net.parameters())))
    with advises(f"{path}: Linear was saved with optimizer Adam, now SGD. Use the optimizer that it was saved with"):
        pg.load(tmp_path, pg.Replica(other := nn.Linear(2, 1), sgd(other)))
    pg.load(tmp_path, pg.Replica(other := nn.Linear(2, 1), torch.optim.Adam(other.parameters())))
