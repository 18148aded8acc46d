"""What a launcher says of its ranks."""

from __future__ import annotations

import subprocess

import pytest

from paragan.train.local_launcher import _ended_before_training, _wait_for_ranks


@pytest.mark.parametrize(
    ("ends", "tolerate_lost_ranks", "status"),
    [
        (("exit 0", "exit 0"), False, 0),
        (("exit 2", "exit 2"), False, 2),
        (("exit 3", "exit 0"), False, 3),
        (("exit 1", "exit 0"), False, 1),
        (("kill -9 $$", "exit 3"), False, 1),
        (("kill -9 $$", "exit 0"), True, 0),
        (("kill -9 $$", "exit 3"), True, 3),
        (("exit 1", "exit 3"), True, 3),
        (("exit 2", "exit 2"), True, 2),
        (("kill -9 $$", "exit 1"), True, 1),
    ],
)
def test_the_status_follows_those_of_the_ranks(ends, tolerate_lost_ranks, status):
    assert _wait_for_ranks([subprocess.Popen(["sh", "-c", end]) for end in ends], [], tolerate_lost_ranks) == status


@pytest.mark.parametrize(
    ("codes", "forwarded", "expected"),
    [
        ([-15, 1], [15], True),  # rank 1 had its handlers, and was told that rank 0 is gone
        ([-15, 3], [15], True),
        ([-2, -2], [2], True),
        ([-9, 1], [15], False),
        ([-15, 1], [], False),  # somebody else's signal
        ([1, 1], [15], False),
        ([-15, 2], [15], False),
    ],
)
def test_a_signal_before_all_ranks_have_handlers_is_no_failure(codes, forwarded, expected):
    assert _ended_before_training(codes, forwarded) is expected
