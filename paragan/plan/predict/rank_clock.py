"""The time of one simulated rank."""

from __future__ import annotations

from collections.abc import Mapping

from paragan.plan.predict.event_loop import Deadlock, SimEvent, Task

COMPUTE, CODEC = "compute", "codec"
MOMENT_S = 1e-3  # between two looks of a loop that polls
MAX_MOMENTS = 100_000  # of a rank in a simulation


def codec_s_per_number(codec_cost: Mapping[str, float], op: str) -> float:
    """Return the seconds per number of an operation: of "int8/encode", else of "encode", else 0."""
    return codec_cost.get(op, codec_cost.get(op.rpartition("/")[2], 0.0))


class RankClock:
    """The time of one rank, as its task spends it.

    Time is spent at once only where it matters to others: before a message, and before a look at what has arrived.

    step      : the round that the rank plays
    slowdown  : factor on the time of computing in this round
    spent_s   : so far, by COMPUTE and CODEC
    link_ages : of the messages that arrived over links that may lag, in rounds
    """

    def __init__(self, task: Task, codec_cost: Mapping[str, float]):
        self.task = task
        self.codec_cost = codec_cost
        self.step = 0
        self.slowdown = 1.0
        self.spent_s = {COMPUTE: 0.0, CODEC: 0.0}
        self.link_ages: list[int] = []
        self._due_s = 0.0
        self._num_moments = 0

    def compute(self, seconds: float) -> None:
        """Spend time that the networks compute."""
        self._spend(COMPUTE, self.slowdown * seconds)

    def run_codec(self, op: str, numel: int) -> None:
        """Spend the time of an operation of an exchange on `numel` numbers: "pass", "int8/encode"."""
        self._spend(CODEC, numel * codec_s_per_number(self.codec_cost, op))

    def _spend(self, kind: str, seconds: float) -> None:
        self.spent_s[kind] += seconds
        self._due_s += seconds

    def catch_up(self) -> float:
        """Let the spent time pass. Returns the time that it is then."""
        due_s = self._due_s
        self._due_s = 0.0
        self.task.sleep(due_s)
        return self.task.clock.now_s

    def sleep(self, seconds: float) -> None:
        """Let the spent time pass, and `seconds` after it."""
        self.catch_up()
        self.task.sleep(seconds)

    def wait(self, event: SimEvent, awaited: str) -> None:
        """Wait for an event."""
        self.catch_up()
        self.task.wait(event, awaited)

    def wait_a_moment(self, awaited: str) -> float:
        """Wait as a loop does that looks for what has arrived. Returns the time that it is then.

        Raises:
            Deadlock: it has looked for too long.
        """
        self._num_moments += 1
        if self._num_moments > MAX_MOMENTS:
            raise Deadlock(f"{self.task.name} looks {MAX_MOMENTS} times for {awaited}")
        self.task.sleep(MOMENT_S)
        return self.task.clock.now_s
