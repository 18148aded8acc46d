"""How many hands the data pipeline needs: a pure function of what a window of time showed.

Congestion is told by the latency of fetches against what it is when there is none, as in ParaGAN (Shi, Li, You; SoCC
2024, section on the data pipeline). The paper gives no rule; this one is ours:

* of what is fetched from afar two seconds of the step are ahead, always: a burst that nobody expected begins with that;
* the quiet latency is the lower quartile of the medians of the last minute;
* congestion begins at twice the quiet latency and ends below 1.3 times (hysteresis);
* under congestion, or while the step waits, hands grow at once: as many fetches as Little's law asks for at the pace of
  the step, as many decoders as their work needs; depth doubles under congestion, or where it was what is short: the
  batches ahead had been complete since it last grew;
* where near images are so small that as many threads as may be are still too few, each has a process to decode them;
* after a time without either (cool-down) hands are released, a quarter at a time; where trouble comes back after that,
  the next cool-down is twice as long, so that bursts which come and go find the buffer still there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

WINDOW_S = 0.5  # what one decision looks at
BEGINS, ENDS = 2.0, 1.3  # congestion, in quiet latencies
MEMORY = 120  # windows whose medians are remembered
WAITING = 0.01  # share of a window that the step may wait
RESERVE_S = 2.0  # of batches ahead of a step that is fed from afar
SPARE = 1.5  # more than Little's law asks for: latencies have a tail
NOTHING_S = 0.001  # a latency that nobody has to wait for
BRIEF_S = 0.0001  # an image that is decoded in less has threads wait for the interpreter's lock
COOL, COOLEST = 40, 1200  # windows without trouble before something is released


@dataclass(frozen=True)
class Hands:
    """What the pipeline works with.

    workers : threads that decode;  fetches : requests under way at once;  depth : batches begun and not yet taken
    apart : 1 where each worker has a process to decode
    """

    workers: int
    fetches: int
    depth: int
    apart: int = 0

    def within(self, most: Hands, least: Hands) -> Hands:
        pairs = zip(self.values(), most.values(), least.values())
        return Hands(*(max(min(value, high), low) for value, high, low in pairs))

    def values(self) -> tuple[int, int, int, int]:
        return self.workers, self.fetches, self.depth, self.apart


@dataclass(frozen=True)
class Window:
    """What a window of time showed. Latencies and costs are in seconds an image; 0 where there were none.

    wait_s : the step waited, of `seconds`;  taken : images it took, in `batches`
    fetch_s : median latency of a fetch;  high_s : its 90th percentile
    decode_s : processor time of decoding one
    ready : batches that are complete at its end
    """

    seconds: float
    wait_s: float
    taken: int
    batches: int
    fetch_s: float
    high_s: float
    decode_s: float
    ready: int


@dataclass(frozen=True)
class Tuning:
    """Where the tuner stands.

    quiet : medians of the windows that are remembered;  calm : windows since the last trouble
    cool : windows of calm before a release;  why : of the last change, "" where nothing changed
    filled : whether at least half of what is ahead was complete since depth last changed
    """

    hands: Hands
    quiet: tuple[float, ...] = ()
    congested: bool = False
    calm: int = 0
    cool: int = COOL
    released: bool = False
    filled: bool = False
    why: str = ""

    @property
    def quiet_s(self) -> float:
        """Latency of a fetch without congestion, as far as is known; 0 before the first."""
        return sorted(self.quiet)[len(self.quiet) // 4] if self.quiet else 0.0


def readers(cores: int, seen: Window) -> int:
    """How many threads that read and decode in turns keep so many cores busy, four for each at most."""
    return round(cores * min(4.0, 1 + seen.fetch_s / seen.decode_s)) if seen.decode_s else cores


def tune(now: Tuning, seen: Window, most: Hands, least: Hands) -> Tuning:
    """The next decision. most, least : bounds of every number; depth's is what the memory cap allows."""
    now = _remember(now, seen)
    least = replace(least, depth=min(max(least.depth, _reserve(seen)), most.depth))
    now = replace(now, filled=now.filled or 2 * seen.ready >= now.hands.depth)
    waiting = seen.wait_s > WAITING * seen.seconds
    if now.congested or waiting:
        hands = _grown(now, seen, most, waiting).within(most, least)
        cool = min(2 * now.cool, COOLEST) if now.released else now.cool
        why = "" if hands == now.hands else "congestion" if now.congested else "the step waited"
        filled = now.filled and hands.depth == now.hands.depth
        return replace(now, hands=hands, calm=0, cool=cool, released=False, filled=filled, why=why)
    if now.calm < now.cool:
        hands = now.hands.within(most, least)
        return replace(now, hands=hands, calm=now.calm + 1, why="" if hands == now.hands else "reserve")
    hands = _released(now.hands, seen).within(most, least)
    if hands == now.hands:
        return replace(now, why="")
    return replace(now, hands=hands, calm=now.cool // 2, released=True, why="calm")


def _remember(now: Tuning, seen: Window) -> Tuning:
    if not seen.fetch_s:
        return now
    now = replace(now, quiet=(*now.quiet, seen.fetch_s)[-MEMORY:])
    return replace(now, congested=seen.fetch_s > (ENDS if now.congested else BEGINS) * max(now.quiet_s, NOTHING_S))


def _reserve(seen: Window) -> int:
    """Batches that the step takes in RESERVE_S when it does not wait; 0 where they are near."""
    if seen.fetch_s < NOTHING_S:
        return 0
    return math.ceil(RESERVE_S * seen.batches / _busy(seen))


def _busy(seen: Window) -> float:
    """Seconds that the step did not wait."""
    return max(seen.seconds - seen.wait_s, 0.02 * seen.seconds)


def _needed(seen: Window) -> tuple[int, int]:
    """Decoders and fetches that keep up with the step as it goes when it does not wait."""
    pace = seen.taken / _busy(seen)  # images/s
    return math.ceil(SPARE * pace * seen.decode_s), math.ceil(SPARE * pace * max(seen.fetch_s, seen.high_s / 2))


def _grown(now: Tuning, seen: Window, most: Hands, waiting: bool) -> Hands:
    hands = now.hands
    workers, fetches = _needed(seen)
    brief = 0 < seen.decode_s < BRIEF_S and seen.fetch_s < NOTHING_S
    apart = int(hands.apart or (waiting and brief and hands.workers >= most.workers))
    if waiting and not seen.taken:  # so slow that there is no pace to go by
        workers, fetches = hands.workers + 1, 2 * hands.fetches
    elif waiting:
        workers, fetches = max(workers, hands.workers + 1), max(fetches, math.ceil(1.5 * hands.fetches))
    depth = hands.depth * (2 if now.congested or now.filled else 1)
    return Hands(max(workers, hands.workers), max(fetches, hands.fetches), depth, apart)


def _released(hands: Hands, seen: Window) -> Hands:
    """A quarter less of what is more than needed."""
    workers, fetches = _needed(seen)
    return Hands(
        max(workers, hands.workers - 1),
        max(fetches, hands.fetches - math.ceil(hands.fetches / 4)),
        hands.depth - math.ceil(hands.depth / 4),
        hands.apart,
    )
