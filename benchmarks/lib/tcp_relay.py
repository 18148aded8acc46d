"""Relay packets between TAP devices, each with a rate and a latency: a switch in user space for netns_lab.py.

    python tcp_relay.py NAME,BITS_PER_S,LATENCY_S ...

A packet leaves its sender's link after all before it, arrives a latency later, and waits for the receiver's link. A
packet that would wait longer than QUEUE_S is dropped: with a queue longer than TCP's minimum timeout everything is sent
twice.
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
BROADCAST = 1  # bit of the first byte of an address
QUEUE_S = 0.1  # as in a home modem


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
    link_of_tap = {tap: i for i, tap in enumerate(taps)}
    # when each link is free again, in either direction
    up = [0.0] * len(taps)
    down = [0.0] * len(taps)
    link_of_address: dict[bytes, int] = {}
    in_flight: list[tuple[float, int, int, bytes]] = []  # (arrival time, number, link, packet)
    number = 0
    while True:
        wait = max(0.0, in_flight[0][0] - time.monotonic()) if in_flight else 1.0
        for tap, _ in poll.poll(wait):
            i = link_of_tap[tap]
            for _ in range(64):
                try:
                    packet = os.read(tap, 65600)
                except BlockingIOError:
                    break
                now = time.monotonic()
                link_of_address[packet[6:12]] = i
                if up[i] > now + QUEUE_S:
                    continue
                up[i] = max(up[i], now) + transmit_s(packet, links[i][1])
                target = link_of_address.get(packet[:6])
                if packet[0] & BROADCAST or target is None:
                    targets = [j for j in range(len(taps)) if j != i]
                else:
                    targets = [target]
                for j in targets:
                    arrives = up[i] + links[i][2] / 2 + links[j][2] / 2
                    if down[j] > arrives + QUEUE_S:
                        continue
                    down[j] = max(down[j], arrives) + transmit_s(packet, links[j][1])
                    number += 1
                    heapq.heappush(in_flight, (down[j], number, j, packet))
        while in_flight and in_flight[0][0] <= time.monotonic():
            _, _, j, packet = heapq.heappop(in_flight)
            with contextlib.suppress(BlockingIOError, OSError):
                os.write(taps[j], packet)


def transmit_s(packet: bytes, rate: float) -> float:
    """Return the seconds that a packet takes on a link of `rate` bit/s; 0: unlimited."""
    return 8 * len(packet) / rate if rate else 0.0


if __name__ == "__main__":
    main()
