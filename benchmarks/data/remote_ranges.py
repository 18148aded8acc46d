"""Byte ranges a second from a server: through obstore, and through aiohttp and s3fs.

    python -m benchmarks.data.remote_ranges [--rounds 9] [--json benchmarks/results/remote_ranges.json]

nginx on this machine serves one file, over HTTP and, as it ignores signatures, as a bucket of S3. Threads read ranges
of it, as the loader does. Every contestant is a `StorageBackend` of paragan; those of aiohttp and s3fs are what paragan
used before. A round is a block of requests of each; ratios are formed within a round.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from benchmarks.lib.timing import Spread, describe_machine, format_machine, format_table, save_json
from paragan.data.storage.http import HttpBackend
from paragan.data.storage.object_store import ObjectStore
from paragan.data.storage.timeouts import run_on_loop

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from servers import run_nginx

FILE_BYTES = 50_000_000
TIMEOUT_S = 10.0
SIZES = {"a small JPEG": 2_500, "a large JPEG": 50_000, "a part of a shard": 1_000_000}
BLOCK_S = 0.5
ReadFn = Callable[[int, int], bytes]


@dataclass(frozen=True)
class Block:
    """Speed and processor time of one block of requests."""

    requests_s: float
    cpu_us: float  # of this process, per request


def make_contestants(url: str) -> dict[str, tuple[ReadFn, ReadFn]]:
    """Return, for each protocol, how ranges are read now and how they were read before."""
    now = HttpBackend(url)
    before = HttpBackend(url)
    before._range_reader = None
    store = ObjectStore("s3://bucket", TIMEOUT_S)
    s3fs = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    name = "large.bin"

    async def read_s3fs(start: int, end: int) -> bytes:
        response = await s3fs._call_s3("get_object", Bucket="bucket", Key=name, Range=f"bytes={start}-{end - 1}")
        async with response["Body"] as body:
            return await body.read()

    return {
        "http": (
            lambda start, end: now.fetch(f"bucket/{name}", start, end, TIMEOUT_S).data,
            lambda start, end: before.fetch(f"bucket/{name}", start, end, TIMEOUT_S).data,
        ),
        "s3": (
            lambda start, end: store.fetch(name, start, end, TIMEOUT_S).data,
            lambda start, end: run_on_loop(read_s3fs(start, end), TIMEOUT_S),
        ),
    }


def run_block(read: ReadFn, size: int, threads: int, seed: int) -> Block:
    """Read ranges at random places for BLOCK_S."""
    end = time.perf_counter() + BLOCK_S

    def work(thread: int) -> int:
        rng = np.random.default_rng((seed, thread))
        count = 0
        while time.perf_counter() < end:
            start = int(rng.integers(0, FILE_BYTES - size))
            assert len(read(start, start + size)) == size
            count += 1
        return count

    begin = time.perf_counter()
    cpu_begin = time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        count = sum(pool.map(work, range(threads)))
    cpu_s = time.process_time() - cpu_begin
    return Block(count / (time.perf_counter() - begin), 1e6 * cpu_s / count)


def compare(now: ReadFn, before: ReadFn, size: int, threads: int, rounds: int) -> dict[str, Any]:
    """Read by both in turn. Returns the medians, and the ratios with their spread."""
    blocks: dict[str, list[Block]] = {"now": [], "before": []}
    for number in range(-1, rounds):
        for name, read in [("now", now), ("before", before)][:: 1 if number % 2 else -1]:
            block = run_block(read, size, threads, number + 1)
            if number >= 0:  # the first one connects
                blocks[name].append(block)
    pairs = list(zip(blocks["now"], blocks["before"]))
    return {
        "requests_s": {name: Spread.from_values([b.requests_s for b in rows]).median for name, rows in blocks.items()},
        "cpu_us": {name: Spread.from_values([b.cpu_us for b in rows]).median for name, rows in blocks.items()},
        "requests_ratio": Spread.from_values([a.requests_s / b.requests_s for a, b in pairs]).to_json(),
        "cpu_ratio": Spread.from_values([a.cpu_us / b.cpu_us for a, b in pairs]).to_json(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine(), "rounds": options.rounds, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bucket").mkdir()
        (Path(folder) / "bucket" / "large.bin").write_bytes(np.random.default_rng(0).bytes(FILE_BYTES))
        with run_nginx(Path(folder), Path(folder) / "nginx") as server:
            os.environ |= {
                "AWS_ENDPOINT_URL": server.url,
                "AWS_ACCESS_KEY_ID": "someone",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            for protocol, (now, before) in make_contestants(server.url).items():
                for label, size in SIZES.items():
                    for threads in (1, 16):
                        row = compare(now, before, size, threads, options.rounds)
                        result["rows"].append({"protocol": protocol, "bytes": size, "threads": threads, **row})
                        print(protocol, label, threads, row, flush=True)
    print(format_machine(result["machine"]))
    rows = [_describe(row) for row in result["rows"]]
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]))
    save_json(options.json, result)


def _describe(row: dict[str, Any]) -> dict[str, str]:
    def ratio(name: str) -> str:
        low, high = row[name]["ci95"]
        return f"{row[name]['median']:.2f} [{low:.2f}, {high:.2f}]"

    return {
        "protocol": row["protocol"],
        "bytes": f"{row['bytes']:,}",
        "threads": str(row["threads"]),
        "requests/s": f"{row['requests_s']['now']:,.0f}",
        "before": f"{row['requests_s']['before']:,.0f}",
        "ratio": ratio("requests_ratio"),
        "CPU time, ratio": ratio("cpu_ratio"),
    }


if __name__ == "__main__":
    main()
