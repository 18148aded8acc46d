"""n ranks under `paragan.Replica` equal n ranks under DistributedDataParallel, and one process with the whole batch."""

from __future__ import annotations

import adversarial_loops
import cloudpickle
import pytest
import torch
from adversarial_loops import GAMES, train_alone, train_ddp, train_replica

cloudpickle.register_pickle_by_value(adversarial_loops)

STEPS = 20  # the discriminator of the VQGAN begins at 10
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
CASES = [(2, torch.float32, 1), (2, torch.float64, 4), (4, torch.float32, 1), (4, torch.float64, 4)]


def assert_equal(tensors, others, tolerance):
    """Assert that no number differs by more than `tolerance`, of its value if that is larger than 1."""
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(
            tensor, others[name], rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize(("ranks", "dtype", "passes"), CASES)
def test_equal_to_ddp_and_to_one_process(pool, name, ranks, dtype, passes):
    def job(world):
        return [train(name, dtype, STEPS, world, passes) for train in (train_ddp, train_replica)]

    alone = train_alone(name, dtype, STEPS, ranks, passes)
    for ddp, replica in pool(ranks, job):
        assert_equal(replica, ddp, TOLERANCE[dtype])
        assert_equal(replica, alone, TOLERANCE[dtype])
