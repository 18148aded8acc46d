"""One GPU, measured in one command of at most eight minutes: `python -m benchmarks.speed.gpu --json F`.

    tests       python -m pytest -m gpu
    limits      what this card does at best, in this very run: bf16 and float32 matrix products, a copy
    wires       encoding and decoding by every wire, compared with a copy of the same vector
    throughput  SNGAN, BigGAN and R3GAN for CIFAR-10, at batch 64 (512 too for SNGAN), fashion and digits:
                paragan in several settings, and plain PyTorch loops of the same networks with the same weights
                (plain.py); BigGAN at 128, 256, 512 and 1024 px in bf16, compiled or not
    quality     --cifar FOLDER (train_part*of3.npz): --quality-seconds of SNGAN (--quality-nets: or of another) in bf16,
                then `paragan eval` in pixels and in a classifier of the data (fd_resnet20, which is not FID). Five
                minutes of it want a call of its own: --only-quality

Needs nothing installed but what paragan imports; says what is missing. The file is written anew after every
part, so that a run cut off keeps what it had. `--tiny` goes through everything but compilation in minutes on a CPU,
to test this script.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # a bare machine has no paragan installed
REQUIRED_PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "yaml": "pyyaml",
    "safetensors": "safetensors",
    "PIL": "pillow",
    "scipy": "scipy",
    "tensorboard": "tensorboard",
    "jinja2": "jinja2",
    "rich": "rich",
    "simplejpeg": "simplejpeg",
    "h5py": "h5py",
    "isal": "isal",
    "fsspec": "fsspec[http]",
}
OPTIONAL_PACKAGES = {
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
    "cloudpickle": "cloudpickle",
    "torchmetrics": "torchmetrics",
}  # for the tests


def missing_packages(names: dict[str, str]) -> list[str]:
    return [package for module, package in names.items() if importlib.util.find_spec(module) is None]


if lacking := missing_packages(REQUIRED_PACKAGES):
    sys.exit(f"paragan needs {', '.join(lacking)}: not on this machine; carry the wheels, or pip install them")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks.comm.compressors import COMPRESSORS  # noqa: E402
from benchmarks.lib import plain_pytorch as plain  # noqa: E402
from benchmarks.lib import session_fixture as ours  # noqa: E402
from benchmarks.lib.timing import Spread, StepsFn, describe_machine, format_table, repeat_fn, save_json  # noqa: E402
from paragan.comm.compression.compressors import Compressor  # noqa: E402
from paragan.comm.world import World  # noqa: E402
from paragan.config.run import Run  # noqa: E402
from paragan.core.devices import pick_device  # noqa: E402
from paragan.data.dataset import Dataset, load_data  # noqa: E402
from paragan.plan.memory import estimate  # noqa: E402
from paragan.plan.round_cost import blank_dataset, play_one_round  # noqa: E402

Results = dict[str, Any]


@dataclass(frozen=True)
class GpuBench:
    """What all parts need: the device, how small to be, and when to be done."""

    device: torch.device
    tiny: bool
    deadline: float

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def log(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# Tests ----------------------------------------------------------------------------------------------------


GPU_TESTS = ("tests/test_gpu.py", "tests/contracts/test_gpu_contracts.py")


def run_tests(bench: GpuBench) -> Results:
    """The tests marked `gpu`, in a process of their own."""
    if lacking := missing_packages(OPTIONAL_PACKAGES):
        return {"skipped": f"missing: {', '.join(lacking)}"}
    command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", *GPU_TESTS]
    command += ["-n", "6"] if importlib.util.find_spec("xdist") else []
    done = subprocess.run(
        command, cwd=REPOSITORY, env=describe_environment(), capture_output=True, text=True, timeout=180
    )
    return {"status": done.returncode, "tail": done.stdout.splitlines()[-15:]}


def describe_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


# Limits ---------------------------------------------------------------------------------------------------


def measure_limits(bench: GpuBench) -> Results:
    """Best of ten, on random data (zeros would run faster)."""
    n = 256 if bench.tiny else 8192
    result: Results = {}
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        a, b = torch.randn(2, n, n, device=bench.device, dtype=dtype)
        result[f"{name}_matmul_tflops"] = 2e-12 * n**3 / fastest_s(bench, lambda a=a, b=b: a @ b)
    x = torch.empty(1 << (20 if bench.tiny else 31), dtype=torch.uint8, device=bench.device)
    y = torch.empty_like(x)
    result["copy_gb_per_s"] = 2e-9 * x.numel() / fastest_s(bench, lambda: y.copy_(x))  # read and written
    return result


def fastest_s(bench: GpuBench, action: Callable[[], object]) -> float:
    """Seconds of the fastest of ten, after three."""
    seconds = []
    for i in range(13):
        bench.sync()
        start = time.perf_counter()
        action()
        bench.sync()
        if i >= 3:
            seconds.append(time.perf_counter() - start)
    return min(seconds)


# Wires ----------------------------------------------------------------------------------------------------


def measure_wires(bench: GpuBench) -> Results:
    """Encoding and decoding a gradient by every wire, in the time of a copy of it."""
    n = 1 << (16 if bench.tiny else 26)
    x = torch.randn(n, device=bench.device)
    out = torch.empty_like(x)
    copy_s = fastest_s(bench, lambda: out.copy_(x))
    result: Results = {"numbers": n, "copy_ms": 1000 * copy_s, "rows": {}}
    for name, wire in COMPRESSORS.items():
        if bench.left_s < 30:
            result["rows"][name] = {"skipped": "no time left"}
            continue
        data = torch.empty(wire.nbytes(n), dtype=torch.uint8, device=bench.device)

        def encode_decode(wire: Compressor = wire, data: torch.Tensor = data) -> None:
            wire.encode(x, data, 1)
            wire.decode(data, out)

        row = run_guarded(lambda action=encode_decode: {"ms": 1000 * fastest_s(bench, action)})
        result["rows"][name] = row | ({"copies": row["ms"] / 1000 / copy_s} if "ms" in row else {})
    return result


# Throughput -----------------------------------------------------------------------------------------------

# name: settings, and an ingredient taken out
SETTINGS: dict[str, tuple[tuple[str, ...], ours.SessionChange]] = {
    "float32": (("device.precision=float32",), ours.no_change),
    "bf16": (("device.precision=bf16",), ours.no_change),
    "bf16, one lane": (("device.precision=bf16", "lanes=1"), ours.no_change),
    "bf16, contiguous": (("device.precision=bf16", "device.channels_last=false"), ours.no_change),
    "bf16, convolutions as written": (("device.precision=bf16",), ours.use_separate_resampling),
    "bf16, async": (("device.precision=bf16", "strategy=async"), ours.no_change),
    "bf16, recorded": (("device.precision=bf16", "device.capture_passes=true"), ours.no_change),
    "bf16, compiled": (("device.precision=bf16", "device.compile=true"), ours.no_change),
}


@dataclass(frozen=True)
class Workload:
    """One recipe at one size, and what is measured of it."""

    name: str
    recipe: str
    images: Dataset
    settings: tuple[str, ...]
    variants: tuple[str, ...]

    def run(self, *settings: str) -> Run:
        return ours.make_endless_run(self.recipe, self.images, *self.settings, *settings)


PLAIN_VARIANTS = ("plain float32", "plain bf16", "plain bf16, compiled")


def workloads(bench: GpuBench, fashion: str | None) -> list[Workload]:
    grey, colour = (
        load_data(fashion, resolution=32) if fashion else ours.random_dataset(32, 1),
        ours.random_dataset(32, 3),
    )
    cifar = ("lanes=1", "device.lanes_per_pass=0", "d_steps=1", f"batch={16 if bench.tiny else 64}")
    many = (*cifar[:-1], f"batch={32 if bench.tiny else 512}")
    small = ("nets.width=8", "batch=16") if bench.tiny else ()
    thin = ("nets.width=16",) if bench.tiny else ()
    every, steady = (*SETTINGS, *PLAIN_VARIANTS), (*SETTINGS, *PLAIN_VARIANTS[:2])
    few = ("float32", "bf16", "bf16, one lane", "bf16, recorded", "bf16, async", *PLAIN_VARIANTS[:2])
    brief = ("float32", "bf16", "bf16, recorded", "bf16, compiled", *PLAIN_VARIANTS[:2])
    return [
        Workload("sngan-cifar10", "sngan-cifar10", colour, (*cifar, *thin), every),
        Workload("biggan-cifar10", "biggan-cifar10", colour, (*cifar, *thin), brief),
        Workload("r3gan-cifar10", "r3gan-cifar10", colour, (*cifar, *thin), brief),
        Workload("sngan-cifar10, batch 512", "sngan-cifar10", colour, (*many, *thin), steady),
        *(make_large_workload(bench, *of) for of in ((128, 64), (256, 32), (512, 16), (1024, 8))),
        Workload("fashion", "fashion", grey, small, steady),
        Workload("digits", "digits", load_data("digits", resolution=8), small, few),
    ]


def make_large_workload(bench: GpuBench, resolution: int, batch: int) -> Workload:
    """BigGAN on one card: a step of D and one of G, as many images as fit with room to spare."""
    size = (f"batch={2 if bench.tiny else batch}", "lanes=1", "device.lanes_per_pass=0", "d_steps=1", "g_batch=0")
    if bench.tiny:
        size = (*size, "nets.width=8")
    images = ours.random_dataset(resolution, 3, 16 if bench.tiny else 128)
    recipe = f"biggan-imagenet{resolution}"
    return Workload(recipe, recipe, images, size, ("bf16", "bf16, compiled") if bench.cuda else ("bf16",))


# measured first, of every workload, in case the time does not suffice
MAIN_VARIANTS = ("bf16, recorded", "bf16", "plain bf16", "float32", "plain float32")


def measure_throughput(bench: GpuBench, loads: list[Workload], compiled: bool, result: Results) -> Results:
    """img/s, ms a round, peak memory.

    compiled: only variants that are compiled, or only the others. result: to which rows are added.
    """
    for w in loads:
        result.setdefault(w.name, {"batch": w.run().batch, "rows": {}})
    jobs = [(w, v) for w in loads for v in w.variants if (bench.cuda or "recorded" not in v)]
    order = {name: i for i, name in enumerate(MAIN_VARIANTS)}
    for w, variant in sorted(jobs, key=lambda job: order.get(job[1], len(order))):
        if compiled != ("compiled" in variant):
            continue
        rows = result[w.name]["rows"]
        if bench.left_s < (60 if "compiled" in variant else 10):
            rows[variant] = {"skipped": "no time left"}
            continue
        row = rows[variant] = run_guarded(lambda w=w, variant=variant: measure(w, variant, bench))
        log(f"{w.name}, {variant}: {summarize_row(row)}")
    return result


def add_shares_of_peak(loads: list[Workload], peak_tflops: float, result: Results) -> Results:
    """Add the operations of a round to every workload, and to its rows their share of the measured peak.

    Last, for counting them takes seconds of the host.
    """
    for w in loads:
        gflop = result[w.name]["gflop_a_round"] = round_gflop(w)
        for row in result[w.name]["rows"].values():
            if "ms" in row:
                row["share_of_peak"] = gflop / row["ms"]["median"] / peak_tflops
    return result


def round_gflop(w: Workload) -> float:
    """Of one round, as paragan computes it: the same count for every variant, so shares compare."""
    run = w.run("device.precision=float32")
    return estimate(lambda: play_one_round(run, blank_dataset(w.images))).flops / 1e9


def measure(w: Workload, variant: str, bench: GpuBench) -> Results:
    """One variant alone on the device."""
    gc.collect()  # what the variant before held
    if bench.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    with make_contestant(w, variant, bench) as play:
        start = time.perf_counter()
        play(1 if bench.tiny else 3)
        bench.sync()
        first_s = time.perf_counter() - start
        ms = time_rounds(play, bench)
    row = {"ms": ms.to_json(), "img_per_s": 1000 * w.run().batch / ms.median, "warm_up_s": first_s}
    return row | ({"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if bench.cuda else {})


@contextlib.contextmanager
def make_contestant(w: Workload, variant: str, bench: GpuBench) -> Iterator[StepsFn]:
    if variant in PLAIN_VARIANTS:
        run = w.run("device.channels_last=false")
        loop = plain.PlainTrainer(run, w.images, bench.device, bf16="bf16" in variant)
        if "compiled" in variant:
            loop.g.compile()
            loop.d.compile()
        yield repeat_fn(loop.step)
        return
    settings, change = SETTINGS[variant]
    run = w.run(*settings, f"device.kind={bench.device.type}")
    session = ours.make_session(run, w.images, World.solo(bench.device), change)
    yield ours.make_play_fn(session)


def time_rounds(play: StepsFn, bench: GpuBench) -> Spread:
    """Milliseconds a round over five blocks of 0.4 s."""
    if bench.tiny:
        return Spread.from_values([1000 * time_block(play, 1, bench) for _ in range(2)])
    block_s, blocks = 0.4, 5
    n, seconds = 1, 0.0
    while seconds < block_s / 2:  # as many as fill a block
        n *= 2
        seconds = time_block(play, n, bench)
    n = max(1, round(n * block_s / seconds))
    return Spread.from_values([1000 * time_block(play, n, bench) / n for _ in range(blocks)])


def time_block(play: StepsFn, n: int, bench: GpuBench) -> float:
    bench.sync()
    start = time.perf_counter()
    play(n)
    bench.sync()
    return time.perf_counter() - start


def run_guarded(action: Callable[[], Results]) -> Results:
    """A part that fails is a finding, not the end."""
    try:
        return action()
    except Exception as error:
        traceback.print_exc(limit=-3)
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def summarize_row(row: Results) -> str:
    if "ms" not in row:
        return str(row)
    memory = f", {row['peak_gb']:.2f} GB" if "peak_gb" in row else ""
    return f"{row['img_per_s']:,.0f} img/s, {row['ms']['median']:.2f} ms a round{memory}"


# Quality --------------------------------------------------------------------------------------------------


def measure_quality(bench: GpuBench, options: argparse.Namespace, img_per_s: float, folder: Path) -> Results:
    """Some minutes of training at the speed just measured, scored by the command line."""
    cifar, batch = options.cifar, options.quality_batch
    data = folder / "cifar.npz"
    seconds = 2 if bench.tiny else max(30.0, min(options.quality_seconds, bench.left_s - 90))
    parts = join_dataset_parts(cifar, data, 200 if bench.tiny else None)
    kimg = max(0.25, round(img_per_s * seconds / 1000, 2))
    count = 50 if bench.tiny else 10_000
    settings = [f"--data={data}", f"--kimg={kimg}", f"--batch={batch}", "--lanes=4", "--d_steps=1"]
    settings += ["--g.optimizer.betas=[0, 0.9]", "--d.optimizer.betas=[0, 0.9]", "--ema.half_life_kimg=20"]
    settings += ["--nets.width=16"] if bench.tiny else []
    settings += ["--device.precision=bf16", f"--output.checkpoint_kimg={kimg}", f"--output.fakes_kimg={kimg}"]
    run_dir = folder / "run"
    start = time.monotonic()
    scored = ["--evaluation.metrics=[fd]", f"--evaluation.count={count}"]
    paragan_command(
        "train", f"{options.quality_nets}-cifar10", "--run-dir", str(run_dir), "--resume=never", *settings, *scored
    )
    result: Results = {"parts": parts, "kimg": kimg, "batch": batch, "train_and_score_s": time.monotonic() - start}
    for space, metrics in (("pixels", "fd"), ("resnet20", "fd,accuracy")):
        paragan_command("eval", str(run_dir), "--metrics", metrics, "--features", space, "--count", str(count))
    result["scores"] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for one in result["scores"]:
        log(f"{one['name']} {one['value']:.4g} after {kimg:g} kimg")
    return result


def paragan_command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paragan", *arguments], env=describe_environment(), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"paragan {arguments[0]}: status {done.returncode}: {done.stderr.strip()[-500:]}")


def join_dataset_parts(cifar: Path, target: Path, most: int | None) -> int:
    """Whichever thirds of the training set are there, as one file."""
    files = sorted(cifar.glob("train_part*of3.npz"))
    if not files:
        raise FileNotFoundError(f"{cifar}: no train_part*of3.npz")
    parts = [np.load(file) for file in files]
    images, labels = (np.concatenate([part[key] for part in parts])[:most] for key in ("images", "labels"))
    np.savez(target, images=images, labels=labels)
    return len(files)


# All of it ------------------------------------------------------------------------------------------------


def describe_gpu(device: torch.device) -> Results:
    """Which GPU, which versions, what is missing."""
    about: Results = {"missing": missing_packages(OPTIONAL_PACKAGES), "numpy": np.__version__}
    if device.type != "cuda":
        return about | {"card": "none: this ran on the CPU"}
    p = torch.cuda.get_device_properties(device)
    about |= {"card": p.name, "memory_gb": round(p.total_memory / 1e9, 1), "multiprocessors": p.multi_processor_count}
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    cudnn, cublas = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    return about | versions | {"float32_convolutions": cudnn.fp32_precision, "float32_matmul": cublas.fp32_precision}


def format_tables(result: Results) -> str:
    """The throughput tables, for people."""
    lines = []
    for name, entry in result.items():
        rows = [[variant, *_cells(row)] for variant, row in entry["rows"].items()]
        head = ["", "img/s", "ms", "low", "high", "GB", "of peak"]
        lines.append(
            f"\n{name}: {entry['gflop_a_round']:.1f} GFLOP a round of {entry['batch']}\n{format_table(head, rows)}"
        )
    return "\n".join(lines)


def _cells(row: Results) -> list[str]:
    if "ms" not in row:
        return [row.get("error") or row["skipped"], *[""] * 5]
    ms = row["ms"]
    times = [f"{x:.2f}" for x in (ms["median"], *ms["ci95"])]
    return [f"{row['img_per_s']:,.0f}", *times, f"{row.get('peak_gb', 0):.2f}", f"{row['share_of_peak']:.1%}"]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", ".")) / "gpu.json"
    parser.add_argument("--json", metavar="F", default=str(default), help=f"where everything is written ({default})")
    parser.add_argument("--data", metavar="NPZ", help="Fashion-MNIST, for fashion (else random images)")
    parser.add_argument("--cifar", metavar="FOLDER", type=Path, help="with train_part*of3.npz: also a quality run")
    parser.add_argument("--quality-batch", type=int, default=64, metavar="N")
    parser.add_argument("--quality-seconds", type=float, default=120, metavar="S", help="of training, about (120)")
    parser.add_argument("--quality-nets", choices=["sngan", "biggan", "r3gan"], default="sngan")
    parser.add_argument("--only-quality", action="store_true", help="and the throughput it needs to know")
    parser.add_argument("--minutes", type=float, default=7.5, help="skip what does not fit (7.5)")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="everything, very small")
    return parser.parse_args()


def main() -> int:
    options = parse_args()
    if not (options.tiny or torch.cuda.is_available()):
        sys.exit("torch finds no CUDA device on this machine: with --tiny this script runs on the CPU, to test it")
    warnings.simplefilter("ignore")
    torch._dynamo.config.disable = options.tiny  # compiling takes a minute on a CPU
    end = time.monotonic() + 60 * options.minutes
    bench = GpuBench(pick_device("auto"), options.tiny, end)
    result: Results = {"machine": describe_machine() | describe_gpu(bench.device), "tiny": options.tiny}
    log(json.dumps(result["machine"]))

    def part(name: str, action: Callable[[], Results]) -> Results:
        result[name] = run_guarded(action)
        save_json(options.json, result)
        return result[name]

    name = f"{options.quality_nets}-cifar10"
    only = (name, "bf16") if options.only_quality else None
    if not (options.no_tests or only):
        log(f"tests: {part('tests', lambda: run_tests(bench))}")
    log(f"limits: {part('limits', lambda: measure_limits(bench))}")
    peak = result["limits"].get("bf16_matmul_tflops", float("nan"))
    kept_s = (60 if options.tiny else options.quality_seconds + 90) if options.cifar else 0
    before = GpuBench(bench.device, bench.tiny, end - kept_s)
    loads = workloads(bench, options.data)
    if only:
        loads = [dataclasses.replace(w, variants=only[1:]) for w in loads if w.name == only[0]]
    measured = part("throughput", lambda: measure_throughput(before, loads, False, {}))
    if not only:
        log(f"wires: {part('wires', lambda: measure_wires(before))}")
        measured = part("throughput", lambda: measure_throughput(before, loads, True, measured))
    if "error" not in measured:
        measured = part("throughput", lambda: add_shares_of_peak(loads, peak, measured))
        print(format_tables(measured))
    if options.cifar:
        row = measured.get(name, {}).get("rows", {}).get("bf16", {})
        img_per_s = options.quality_batch * 1000 / row["ms"]["median"] if "ms" in row else 10.0 * options.quality_batch
        with tempfile.TemporaryDirectory() as folder:
            log(f"quality: {part('quality', lambda: measure_quality(bench, options, img_per_s, Path(folder)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
