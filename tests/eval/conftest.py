import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from paragan.eval.inception import Inception
from paragan.eval.sharding import CompletedWork


class ThreadGroup:
    """A rank of a group whose ranks are threads of this process."""

    def __init__(self, rank, size, barrier, slots):
        self.rank, self.size, self.barrier, self.slots = rank, size, barrier, slots

    def exchange(self, x):
        assert x.is_contiguous()
        self.slots[self.rank] = x.clone()
        self.barrier.wait(30)
        received = list(self.slots)
        self.barrier.wait(30)
        return received

    def all_reduce_sum(self, x):
        x.copy_(sum(self.exchange(x)))
        return CompletedWork()

    def all_gather(self, x):
        return torch.stack(self.exchange(x)), CompletedWork()


@pytest.fixture
def on_ranks():
    """`on_ranks(3, f)`: [f(group) of each rank]."""

    def run(size, f):
        barrier, slots = threading.Barrier(size), [None] * size
        with ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(lambda rank: f(ThreadGroup(rank, size, barrier, slots)), range(size)))

    return run


@pytest.fixture(scope="session")
def digits():
    """uint8 [1797, 8, 8, 1]; corners are 0 in all of them, so their covariance lacks rank."""
    return (load_digits().images * 15.9).astype(np.uint8)[..., None]


@pytest.fixture
def blurred(digits):
    """A sampler of digits that are a little off."""
    fakes = torch.from_numpy(digits).permute(0, 3, 1, 2)
    fakes = ((fakes.int() + fakes.roll(1, 3)) // 2).to(torch.uint8)
    return lambda rows: fakes[rows.start : rows.stop]


@pytest.fixture(scope="session")
def inception_file(tmp_path_factory):
    """The Inception network with random weights, saved as the real ones are."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "random.pth"
    state = Inception().state_dict()
    torch.save({name: value for name, value in state.items() if "num_batches_tracked" not in name}, file)
    return file
