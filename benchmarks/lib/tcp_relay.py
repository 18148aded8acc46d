"""A switch in user space for `lab.py`: TAP devices, a rate and a latency for each. Arguments: NAME,BITS,SECONDS ...

A packet leaves its sender's link when all before it have, arrives a latency later, and waits for the receiver's link.
What would wait longer than QUEUE_S for a link is dropped: a queue beyond TCP's least timeout has everything sent twice.
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
QUEUE_S = 0.1  # as the modem of a home holds


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
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 1.0
        for tap, _ in poll.poll(wait):
            i = at[tap]
            for _ in range(64):
                try:
                    packet = os.read(tap, 65600)
                except BlockingIOError:
                    break
                now = time.monotonic()
                home[packet[6:12]] = i
                if up[i] > now + QUEUE_S:
                    continue
                up[i] = max(up[i], now) + transmit_s(packet, links[i][1])
                known = home.get(packet[:6])
                everyone = packet[0] & BROADCAST or known is None
                for j in [j for j in range(len(taps)) if j != i] if everyone else [known]:
                    arrives = up[i] + links[i][2] / 2 + links[j][2] / 2
                    if down[j] > arrives + QUEUE_S:
                        continue
                    down[j] = max(down[j], arrives) + transmit_s(packet, links[j][1])
                    number += 1
                    heapq.heappush(under_way, (down[j], number, j, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, j, packet = heapq.heappop(under_way)
            with contextlib.suppress(BlockingIOError, OSError):
                os.write(taps[j], packet)


def transmit_s(packet: bytes, rate: float) -> float:
    """Seconds on a link of so many bit/s."""
    return 8 * len(packet) / rate if rate else 0.0


if __name__ == "__main__":
    main()
