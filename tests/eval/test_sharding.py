import pytest
import torch

from paragan.eval.sharding import FeatureShard, all_ranks, block_shards, gather_all


@pytest.mark.parametrize(("count", "block", "size"), [(10, 3, 2), (9, 3, 3), (2, 5, 3), (7, 1, 4)])
def test_blocks_cover_all_rows_and_gather_in_order(on_ranks, count, block, size):
    shares = [i for rank in range(size) for rows in block_shards(count, block, rank, size) for i in rows]
    assert sorted(shares) == list(range(count))
    x = torch.arange(2.0 * count).view(count, 2)

    def gathered(group):
        mine = [i for rows in block_shards(count, block, group.rank, group.size) for i in rows]
        return gather_all(FeatureShard(x[mine], count, block), group)

    assert all(torch.equal(result, x) for result in on_ranks(size, gathered))


@pytest.mark.parametrize("most", [1, 8, 1000])
def test_windows_yield_all_rows_in_order(on_ranks, most):
    x = torch.arange(2.0 * 53).view(53, 2)

    def walked(group):
        private = torch.cat([x[r.start : r.stop] for r in block_shards(53, 4, group.rank, group.size)])
        share = FeatureShard(private, 53, 4)
        assert torch.equal(x[share.rows(group)], private)
        return list(share.windows(group, most))

    for size in (1, 2, 3, 4):
        for windows in on_ranks(size, walked):
            assert [i for rows, _ in windows for i in rows] == list(range(53))
            assert torch.equal(torch.cat([part for _, part in windows]), x)
            assert all(len(part) == len(rows) <= max(most, 4 * size) for rows, part in windows)


def test_all_ranks_is_a_conjunction(on_ranks):
    assert on_ranks(3, lambda group: all_ranks(group, group.rank < 2)) == [False] * 3
    assert on_ranks(3, lambda group: all_ranks(group, True)) == [True] * 3
