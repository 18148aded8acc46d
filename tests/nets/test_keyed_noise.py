"""Random numbers from the bits of latents: distribution, independence, and the same for a row in any batch."""

import torch

from paragan.nets.keyed_noise import keyed_normal, keyed_uniform, row_keys


def test_the_numbers_are_normal_and_independent():
    keys = row_keys(torch.randn(1000, 16))
    x = keyed_normal(keys, 0, 40, 41).double()
    assert x.shape == (1000, 40, 41)
    assert abs(x.mean()) < 4 / len(x.view(-1)) ** 0.5
    assert abs(x.square().mean() - 1) < 6e-3
    assert abs(x.pow(4).mean() - 3) < 0.05
    rows = x.flatten(1)
    others = keyed_normal(keys, 1, 40, 41).double().flatten(1)
    for a, b in ((rows[1:], rows[:-1]), (rows, others), (rows[:, 1:], rows[:, :-1]), (rows[:, :820], rows[:, 820:])):
        assert abs((a * b).mean()) < 5 / a.numel() ** 0.5  # of rows, streams, neighbors, and the two of Box and Muller


def test_uniform_numbers():
    u = keyed_uniform(row_keys(torch.randn(5000, 16)), 3, 7).double()
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u, 20, 0, 1)
    assert (counts / counts.mean() - 1).abs().max() < 0.1


def test_a_row_has_its_numbers_in_any_batch():
    z = torch.randn(6, 16)
    keys = row_keys(z)
    assert len(set(keys.tolist())) == 6
    assert torch.equal(row_keys(z[2:4]), keys[2:4])
    assert torch.equal(row_keys(z.double()), keys)
    assert torch.equal(keyed_normal(keys[2:4], 5, 3, 3), keyed_normal(keys, 5, 3, 3)[2:4])
    nudged = z.clone()
    nudged[:, 9] = nudged[:, 9].nextafter(torch.tensor(10.0))
    assert not (row_keys(nudged) == keys).any()
