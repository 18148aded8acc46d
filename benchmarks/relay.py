"""A switch in user space for `lab.py`: TAP devices, a rate and a latency for each. Arguments: NAME,BITS,SECONDS ...

A packet leaves its sender's link when all before it have, arrives a latency later, and waits for the receiver's link.
What a link has no room for yet stays with its sender, as a network card leaves it in the queue of the host; what would
wait for a receiver's link behind more than QUEUE bytes is dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import struct
import sys
import time

TUNSETIFF, TAP, NO_HEADER = 0x400454CA, 0x0002, 0x1000
BROADCAST = 1  # a bit of the first byte of an address
AHEAD_S = 0.05  # of packets that a link takes before they leave: below TCP's least timeout, and no need to be prompt
QUEUE = 512 << 10  # bytes


def main() -> None:
    links = [(name, float(rate), float(latency)) for name, rate, latency in (a.split(",") for a in sys.argv[1:])]
    taps = []
    for name, _, _ in links:
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", name.encode(), TAP | NO_HEADER))
        taps.append(tap)
    print("ready", flush=True)
    poll = select.epoll()
    for tap in taps:
        poll.register(tap, select.EPOLLIN)
    at = {tap: i for i, tap in enumerate(taps)}
    up, down = [0.0] * len(taps), [0.0] * len(taps)  # when each link is free again
    home: dict[bytes, int] = {}  # which link an address is behind
    under_way: list[tuple[float, int, int, bytes]] = []  # (when, number, to whom, packet)
    number = 0
    full: dict[int, float] = {}  # links that take nothing, until when
    while True:
        wait = min([when for when, *_ in under_way[:1]] + list(full.values()), default=time.monotonic() + 1.0)
        for tap, _ in poll.poll(max(0.0, wait - time.monotonic())):
            i = at[tap]
            for _ in range(64):
                if up[i] > time.monotonic() + AHEAD_S:
                    full[i] = up[i] - AHEAD_S
                    poll.modify(tap, 0)
                    break
                try:
                    packet = os.read(tap, 65600)
                except BlockingIOError:
                    break
                now = time.monotonic()
                home[packet[6:12]] = i
                up[i] = max(up[i], now) + taken(packet, links[i][1])
                known = home.get(packet[:6])
                everyone = packet[0] & BROADCAST or known is None
                for j in [j for j in range(len(taps)) if j != i] if everyone else [known]:
                    arrives, number = up[i] + links[i][2] / 2 + links[j][2] / 2, number + 1
                    if links[j][1] and (down[j] - arrives) * links[j][1] / 8 > QUEUE:
                        continue
                    down[j] = max(down[j], arrives) + taken(packet, links[j][1])
                    heapq.heappush(under_way, (down[j], number, j, packet))
        now = time.monotonic()
        for i in [i for i, when in full.items() if when <= now]:
            del full[i]
            poll.modify(taps[i], select.EPOLLIN)
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, j, packet = heapq.heappop(under_way)
            with contextlib.suppress(BlockingIOError, OSError):
                os.write(taps[j], packet)


def taken(packet: bytes, rate: float) -> float:
    """Seconds on a link of so many bit/s."""
    return 8 * len(packet) / rate if rate else 0.0


if __name__ == "__main__":
    main()
