import pytest
import torch
from torch import nn
from torchmetrics.image.inception import InceptionScore

from paragan.eval.inception_score import InceptionScoreSums
from paragan.eval.sharding import block_shards


def inception_score(logits, *, splits=10, seed=0, batch=16):
    marginals = InceptionScoreSums(len(logits), logits.shape[1], splits, seed)
    for rows in block_shards(len(logits), batch, 0, 1):
        marginals.update(rows, logits[rows.start : rows.stop])
    return marginals.compute()


def test_inception_score_counts_the_classes_it_is_sure_of():
    sure = 1000.0 * torch.eye(10).repeat(200, 1)  # 200 of each class
    assert inception_score(sure, splits=2) == pytest.approx(10, rel=1e-2)
    assert inception_score(torch.zeros(100, 10)) == pytest.approx(1)
    assert inception_score(1000.0 * torch.eye(10)[:1].repeat(100, 1)) == pytest.approx(1)


def test_inception_score_is_the_formula():
    logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    halves = logits[torch.randperm(40, generator=torch.Generator().manual_seed(3))].double().chunk(2)
    expected = 0
    for p in (half.softmax(1) for half in halves):
        expected += (p * (p / p.mean(0)).log()).sum(1).mean().exp().item() / 2
    assert inception_score(logits, splits=2, seed=3) == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("ignore:.*will save all extracted features", "ignore:std")
@pytest.mark.parametrize(("count", "splits"), [(100, 1), (100, 10), (103, 10), (4, 10)])
def test_inception_score_is_torchmetrics_value(count, splits):
    logits = 3 * torch.randn(count, 6, generator=torch.Generator().manual_seed(1)).double()
    metric = InceptionScore(nn.Identity(), splits, sync_on_compute=False)
    metric.update(logits)
    torch.manual_seed(5)
    result = inception_score(logits, splits=splits, seed=5)
    assert result == pytest.approx(metric.compute()[0].item(), rel=1e-12)


def test_inception_score_is_the_same_on_any_number_of_ranks_and_for_any_batch(on_ranks):
    logits = torch.randn(300, 6, generator=torch.Generator().manual_seed(1))
    single = inception_score(logits, batch=300)

    def score(group):
        marginals = InceptionScoreSums(300, 6, 10, 0)
        for rows in block_shards(300, 17, group.rank, group.size):
            marginals.update(rows, logits[rows.start : rows.stop])
        return marginals.compute(group)

    for size in (1, 2, 4):
        assert on_ranks(size, score) == pytest.approx([single] * size, rel=1e-13)
