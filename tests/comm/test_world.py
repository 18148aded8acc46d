"""Collectives of groups and worlds, and failures that name the rank."""

from __future__ import annotations

import os
import socket
import socketserver
import threading
import time
from unittest import mock

import pytest
import torch

import standin
from advice import advises
from paragan.comm import world as world_module
from paragan.comm.launch_info import LaunchInfo
from paragan.comm.process_group import CommunicationError, SingleRankGroup, c10d
from paragan.comm.sockets import duplicate_socket, open_sockets
from paragan.comm.world import World
from paragan.core.devices import backend_of
from processes import free_port


def test_sum_and_gather(pool):
    def job(world):
        x = torch.arange(5.0) * (world.rank + 1)
        world.all_ranks.all_reduce_sum(x).wait()
        rows, work = world.all_ranks.all_gather(torch.tensor([world.rank, 7]))
        work.wait()
        return x, rows

    for x, rows in pool(3, job):
        assert torch.equal(x, torch.arange(5.0) * 6)
        assert rows.tolist() == [[0, 7], [1, 7], [2, 7]]


def test_solo_needs_no_process_group():
    world = World.solo()
    x = torch.ones(3)
    world.all_ranks.all_reduce_sum(x).wait()
    rows, work = world.all_ranks.all_gather(x)
    work.wait()
    assert rows.shape == (1, 3)
    assert world.all_gather_str("text") == ["text"]
    world.close()


def test_tensors_of_one_rank_on_all(pool):
    def job(world):
        import torch

        from paragan.comm.process_group import broadcast_tensors

        rng = torch.Generator().manual_seed(world.rank)
        odd = torch.randint(256, (3,), generator=rng, dtype=torch.uint8)  # what follows it is not aligned
        tensors = [torch.randn(2, 3, generator=rng), odd, torch.tensor(7 * world.rank), torch.zeros(0)]
        tensors += [torch.randn(5, generator=rng).bfloat16(), torch.tensor([torch.nan, world.rank])]
        received = broadcast_tensors(world.all_ranks, tensors, world.rank == 1)
        assert broadcast_tensors(world.all_ranks, [], world.rank == 1) == []
        return tensors, received

    results = pool(3, job)
    source, _ = results[1]
    for _, received in results:
        for x, y in zip(source, received, strict=True):
            assert x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


def test_groups_of_some_ranks(pool):
    def job(world):
        groups = [world.new_group([0, 2]), world.new_group([1])]
        group = next(g for g in groups if g)
        x = torch.tensor([float(world.rank)])
        group.all_reduce_sum(x).wait()
        return group.size, group.rank, x.item()

    assert pool(3, job) == [(2, 0, 2.0), (1, 0, 1.0), (2, 1, 2.0)]


def refuse_shared_device(device, join):
    """Check that ranks with the same device are refused on all ranks, and that others sum."""
    backend = backend_of(device)
    advice = advises("Use one rank for each device, or set MOCK_VISIBLE_DEVICES to another device in each rank")
    with mock.patch.object(backend, "id", "GPU-7"), advice as error:
        join()
    with mock.patch.object(backend, "id", f"GPU-{os.getpid()}"), join() as world:
        x = torch.ones(2, device=device)
        world.all_ranks.all_reduce_sum(x).wait()
        return str(error.value).replace(socket.gethostname(), "host"), x.tolist()


SHARED_DEVICE = (
    "--device.kind=mock: ranks 0 and 1 use the same device (host/GPU-7). Use one rank for each device, or set "
    "MOCK_VISIBLE_DEVICES to another device in each rank"
)


def test_ranks_that_share_a_device_are_refused(pool):
    ports = [free_port(), free_port()]

    def job(world):
        world.close()
        return refuse_shared_device(
            world.device,
            lambda: World.join(
                world.launch_info,
                world.device,
                20.0,
                {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.pop())},
            ),
        )

    assert pool(2, job, standin.NAME) == [(SHARED_DEVICE, [2.0, 2.0])] * 2


def test_ranks_of_a_foreign_group_that_share_a_device_are_refused(in_foreign_group):
    def job():
        device = torch.device(standin.NAME, 0)
        refusal, total = refuse_shared_device(device, lambda: World.join(LaunchInfo(), device, 20.0))
        return refusal, total, c10d.is_initialized()

    assert in_foreign_group(2, job, standin.NAME) == [(SHARED_DEVICE, [2.0, 2.0], True)] * 2


def test_strings_are_gathered_in_rank_order(pool):
    assert pool(3, lambda world: world.all_gather_str(f"from {world.rank}")) == [["from 0", "from 1", "from 2"]] * 3


def test_missing_rank_is_named(pool):
    def job(world):
        if world.rank == 1:
            time.sleep(1)
            return "late"
        with pytest.raises(CommunicationError, match=r"rank 1 did not arrive within 0\.3 s"):
            world.all_gather_str("text", timeout_s=0.3)
        return "named"

    assert pool(3, job) == ["named", "late", "named"]


def test_strings_that_have_arrived_are_gathered_though_their_ranks_have_left():
    """A rank that has all strings may leave before another one has read the last of them."""
    world = World(LaunchInfo(0, 2, 0, 2), torch.device("cpu"), c10d.HashStore(), SingleRankGroup(), 5)
    world.store.set("gather/1/1", "from 1")
    with mock.patch.object(world, "raise_if_broken", side_effect=CommunicationError("a peer was lost")):
        assert world.all_gather_str("from 0") == ["from 0", "from 1"]
        with pytest.raises(CommunicationError, match="rank 1 did not arrive, and a peer was lost"):
            world.all_gather_str("from 0")


def test_all_ranks_report_the_first_failure(pool):
    def job(world):
        world.all_gather_str("connected")  # the first report closes connections
        if world.rank == 2:
            return world.report_failure(ValueError("bad pixel"), 41)
        return world.report_failure(CommunicationError("connection closed"), 41)

    assert pool(3, job) == ["rank 2, step 41: bad pixel"] * 3


def test_timeouts_of_other_sockets_are_unchanged(pool):
    def job(world):
        world.report_failure(ValueError("bad pixel"), 41)
        handles = filter(None, map(duplicate_socket, open_sockets()))
        pipes = [handle for handle in handles if handle.family == socket.AF_UNIX]  # the pool's
        return [pipe.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) for pipe in pipes]

    for timeouts in pool(2, job):
        assert timeouts
        assert all(timeout == bytes(16) for timeout in timeouts)


class Echo(socketserver.BaseRequestHandler):
    """Answers with the request, as a database would with a result."""

    def handle(self):
        self.request.sendall(self.request.recv(100))


def test_a_failing_rank_leaves_the_connections_of_its_program_open(pool):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = server.server_address

        def job(world):
            with socket.create_connection(address, timeout=5) as database:  # opened after the group was formed
                pair = world.pair_group(1 - world.rank)
                world.all_gather_str("")
                world.interrupt_waits()
                with pytest.raises(CommunicationError):
                    pair.all_reduce_sum(torch.ones(1)).wait()
                database.sendall(b"query")
                return database.recv(100)

        assert pool(2, job) == [b"query", b"query"]
        server.shutdown()


def never_connect(*arguments, **options):
    """Wait as gloo does for addresses that other hosts cannot reach."""
    threading.Event().wait(60)


def test_ranks_that_cannot_connect_do_so_over_the_interface_of_the_advice(pool):
    ports = [free_port(), free_port()]

    def job(world):
        """Connect again, after an attempt that fails."""
        c10d.destroy_process_group()

        def join(port, timeout_s):
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            return World.join(world.launch_info, torch.device("cpu"), timeout_s, env)

        with (
            mock.patch.object(world_module, "FAULT_WINDOW_S", 0),
            mock.patch.object(c10d, "init_process_group", never_connect),
            advises(
                f"rank {world.rank} could not connect to all other ranks within 1 s. Set GLOO_SOCKET_IFNAME to the "
                "network interface that the hosts share",
                CommunicationError,
            ),
        ):
            join(ports[0], 1.0)
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME="lo"):
            joined = join(ports[1], 20.0)
        x = torch.ones(1)
        joined.all_ranks.all_reduce_sum(x).wait()
        return x.item()

    assert pool(2, job) == [2.0, 2.0]


def test_ranks_form_a_second_world_once_they_have_left_the_first_under_torchrun(pool):
    port = free_port()
    agent_store = c10d.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # as torchrun serves it

    def job(world):
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torchrun = {**env, "TORCHELASTIC_USE_AGENT_STORE": "True"}

        def join(number, env):
            return World.join(world.launch_info, torch.device("cpu"), 20.0, env, number)

        with advises("world: its ranks are in a group already. Call close of the ScalingManager that formed it"):
            join(0, torchrun)
        c10d.destroy_process_group()
        first = join(0, torchrun)
        texts = first.all_gather_str("first")
        first.close()
        with advises("without torchrun, whose store lasts. Use torchrun, or a script for each ScalingManager"):
            join(1, env)
        second = join(1, torchrun)
        x = torch.ones(1)
        second.all_ranks.all_reduce_sum(x).wait()
        return texts, second.all_gather_str(f"second {world.rank}"), x.item()

    assert pool(2, job) == [(["first", "first"], ["second 0", "second 1"], 2.0)] * 2
    del agent_store
