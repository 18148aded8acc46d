"""A run folder that only some hosts see is refused before anything is trained."""

from __future__ import annotations

from advice import advises
from paragan.train import rank_agreement


def test_a_folder_missing_on_one_host_raises_on_all(pool, tmp_path):
    def job(world):
        rank_agreement.SHARED_STORAGE_TIMEOUT_S = 0.3
        path = tmp_path / f"host{world.rank // 2}"
        path.mkdir(exist_ok=True)
        with advises("does not see it. Use storage that all hosts share") as refusal:
            rank_agreement.check_shared_storage(path, world)
        rank_agreement.check_shared_storage(tmp_path, world)
        return str(refusal.value)

    messages = pool(3, job)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"rank 2: {tmp_path}/host1: host ")


def test_the_check_leaves_no_file(pool, tmp_path):
    assert pool(2, lambda world: rank_agreement.check_shared_storage(tmp_path, world)) == [None, None]
    assert list(tmp_path.iterdir()) == []
