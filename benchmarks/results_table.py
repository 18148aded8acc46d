"""The table of all results, with command, machine, date and load: `python -m benchmarks.results_table`.

It stands in docs/measurements/README.md; tests/test_figures.py compares. A new result gets a line in COMMANDS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
NOT_RECORDED = "not recorded"

COMMANDS = {  # of every result: a module of benchmarks/ and its arguments
    "acceptance": "quality.digits_acceptance RUN_DIR  # of paragan train digits",
    "acceptance_paper": "quality.digits_acceptance RUN_DIR ...  # of the runs of quality_digits_paper",
    "acceptance_per_label": "quality.digits_acceptance RUN_DIR  # of --strategy per-label --ranks 2",
    "async_lab": "comm.slow_links async",
    "auto": "plan.auto",
    "clock_digits": "comm.clock --hosts 4 --every-kimg 20 --jobs 9  # periods: --kimg 240 --jobs 1",
    "clock_trial": "comm.clock --hosts 4 --links '20 Mbit/s, 50 ms' --ways 'period 32, DiLoCo' --every-kimg 20",
    "convolutions": "speed.convolutions",
    "ddp": "comm.ddp",
    "ddp_lab": "comm.slow_links ddp",
    "distillation_digits": "quality.distillation digits --cases DMD2",
    "dqgan_workers": "quality.workers_speedup",
    "engines": "resilience.engines",
    "equal_time_fashion": "quality.equal_time fashion --data fashion_mnist.npz",
    "examples": "quality.examples",
    "families_step": "speed.families",
    "fd_penalty": "speed.fd_penalty",
    "forms": "comm.async_reuse",
    "gossip_lab": "comm.slow_links gossip",
    "gpu_h100": "speed.gpu",
    "graphs": "speed.export_graph",
    "health_cost": "quality.health cost",
    "health_healthy": "quality.health healthy",
    "health_planted": "quality.health planted --kimg 16 --seeds 6",
    "lab": "comm.slow_links wires",
    "install_size": "speed.install_size --reference ../before",
    "labels_quality_digits": "quality.per_label_quality digits --minutes 4",
    "labels_quality_fashion": "quality.per_label_quality fashion --minutes 10",
    "labels_queue": "per_label.per_label queue --seconds 12",
    "labels_scaling": "per_label.per_label scaling --kimg 80 --repetitions 3",
    "layout": "speed.tune --networks digits,fashion,dcgan,sngan --all digits,fashion",
    "loss_float64": "comm.repeated_rank_loss --strategies sync --float64 --kinds killed --period 15 "
    "--undisturbed-minutes 0 --minutes 6 --settings '...'",
    "loss_gossip": "comm.repeated_rank_loss --strategies gossip --undisturbed-minutes 1",
    "loss_outer": "comm.repeated_rank_loss --strategies 'outer optimizer' --undisturbed-minutes 1",
    "loss_quantized": "comm.repeated_rank_loss --strategies quantized --undisturbed-minutes 1",
    "loss_sync": "comm.repeated_rank_loss --strategies sync --undisturbed-minutes 1",
    "memory": "speed.memory",
    "memory_bf16": "speed.memory",
    "memory_process": "speed.memory fashion:32:4",
    "memory_predicted": "speed.memory --predict",
    "mixture_wires": "quality.mixture_wires --seeds 0",
    "networks_step": "speed.networks step",
    "networks_step_bf16": "speed.networks step",
    "networks_strategies": "speed.networks strategies",
    "operations": "speed.operations",
    "pipeline_congestion": "data.pipeline congestion --seconds 60 --rounds 2 --search-seconds 24",
    "pipeline_decode": "data.pipeline decode --rounds 7",
    "prediction": "plan.prediction measure",
    "prediction_again": "plan.prediction measure",
    "prediction_own": "plan.prediction own",
    "prediction_scaling": "plan.prediction scaling",
    "quality_biggan": 'quality.quality biggan --suite networks --cases "float32;bf16" --ranks 1',
    "quality_digits_ahead": "quality.quality digits --suite lags --ranks 1 --more '...'",
    "quality_digits_async": "quality.quality digits --suite async --ranks 2",
    "quality_digits_batches": "quality.quality digits --suite batches --ranks 1 --every-kimg 10",
    "quality_digits_gossip4": "quality.quality digits --suite gossip --ranks 4",
    "quality_digits_gossip8": "quality.quality digits --suite gossip --ranks 8",
    "quality_digits_lags": "quality.quality digits --suite lags --ranks 1",
    "quality_digits_outer": "quality.quality digits --suite outer --ranks 4",
    "quality_digits_paper": 'quality.quality digits --suite paper --cases "DPOSG;DQGAN" --ranks 4',
    "quality_digits_periods": "quality.quality digits --suite periods --ranks 4",
    "quality_digits_quantized": "quality.quality digits --suite quantized",
    "quality_digits_split": "quality.quality digits --suite async --ranks 4",
    "quality_digits_sync": "quality.quality digits",
    "quality_fashion_async": "quality.quality fashion --suite async --ranks 2",
    "quality_fashion_batches": "quality.quality fashion --suite batches --ranks 1 --every-kimg 10",
    "quality_fashion_gossip4": "quality.quality fashion --suite gossip --ranks 4",
    "quality_fashion_gossip8": "quality.quality fashion --suite gossip --ranks 8",
    "quality_fashion_int4_block256": "quality.quality fashion  # at commit cc1615e",
    "quality_fashion_optimizers": "quality.quality fashion --suite optimizers --ranks 1 --every-kimg 10",
    "quality_fashion_outer": "quality.quality fashion --suite outer --ranks 4",
    "quality_fashion_paper": "quality.quality fashion --suite paper --ranks 4 --every-kimg 40 --more=--kimg=240",
    "quality_fashion_periods": "quality.quality fashion --suite periods --ranks 4",
    "quality_fashion_policies": "quality.quality fashion --suite policies --ranks 1",
    "quality_fashion_quantized": "quality.quality fashion --suite quantized",
    "quality_fashion_sync": "quality.quality fashion",
    "quality_sngan": "quality.quality sngan --suite networks --cases float32 --ranks 1",
    "quality_sngan_bf16": 'quality.quality sngan --suite networks --cases "float32;bf16" --ranks 1',
    "remote_ranges": "data.remote_ranges --rounds 5",
    "replica": "comm.replica",
    "replica_check": "comm.replica_check  # under torchrun --nproc-per-node 2",
    "scale": "comm.scale",
    "scores": "quality.scores fd prdc --rounds 1",
    "scores_prdc": "quality.scores prdc --rounds 1",
    "sharded_memory": "comm.sharded_memory",
    "small_worlds": "plan.small_worlds",
    "srun_kills": "resilience.srun_kills --kills 100 --jobs 2",
    "step": "speed.step",
    "record_loader": "data.record_loader --turns 5",
    "reconstruction_speed": "speed.reconstruction --rounds 9",
    "super_resolution": "quality.reconstruction super-resolution --kimg 500 --settings device.threads=1",
    "cold_start": "speed.cold_start --reference ../before --rounds 5",
    "cold_start_charts": "speed.cold_start --reference ../before --rounds 3",
    "cold_start_recipes": "speed.cold_start --reference ../before --rounds 3",
    "survive": "comm.rank_loss",
    "team_memory": "comm.team_memory",
    "teams": "comm.gd_teams",
    "two_checkouts": "speed.two_checkouts",
    "tokenizer": "quality.reconstruction tokenizer --settings device.threads=1",
    "vocoder": "quality.vocoder --recordings recordings.zip --settings device.threads=1",
    "wcgan_cifar": "quality.wcgan cifar --data cifar10.npz --minutes 1.5",
    "wcgan_fashion": "quality.wcgan fashion --data fashion_mnist.npz --minutes 1",
    "wires": "comm.compressors",
}

NEEDS_DATA = re.compile(r"(quality\.(?:quality|per_label_quality) (?:fashion|sngan|biggan))")
WITH_DATA = r"\1 --data fashion_mnist.npz"


def read_result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def machine_of(result: Any) -> dict[str, Any]:
    """Return what a result records of its machine, {} if nothing."""
    machine = result.get("machine") if isinstance(result, dict) else None
    return machine if isinstance(machine, dict) else {}


def name_machine(machine: dict[str, Any]) -> str:
    """Return the processor as the pages name it, or NOT_RECORDED."""
    if not machine:
        return NOT_RECORDED
    processor = "Intel Xeon" if "Xeon" in machine["processor"] else machine["processor"]
    features = machine["features"]
    level = "AVX512-BF16" if "avx512_bf16" in features else "AVX512" if "avx512f" in features else "AVX2"
    return machine.get("card") or f"{processor} with {level}"


def format_rows() -> Iterator[str]:
    """Yield the lines of the table. A laboratory that ran apart from the others of its file has its own."""
    yield "| result | command: `python -m benchmarks.` | processor | torch | date | load before |"
    yield "|---|---|---|---|---|---|"
    for path in sorted(RESULTS.glob("*.json")):
        result = read_result(path.stem)
        command = f"`{NEEDS_DATA.sub(WITH_DATA, COMMANDS[path.stem])}`"
        yield _row(f"`{path.name}`", command, machine_of(result))
        laboratories = result.get("laboratories", {}) if isinstance(result, dict) else {}
        for name, laboratory in laboratories.items():
            if "machine" in laboratory:
                yield _row(f"the same, {name}", command, laboratory["machine"])


def _row(result: str, command: str, machine: dict[str, Any]) -> str:
    cells = ["", "", ""]
    if machine:
        cells = [machine["torch"].partition("+")[0], machine["date"][:10], f"{machine['load_before']:.1f}"]
    return f"| {' | '.join([result, command, name_machine(machine), *cells])} |"


if __name__ == "__main__":
    print("\n".join(format_rows()))
