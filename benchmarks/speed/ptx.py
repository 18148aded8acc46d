"""The wires as CUDA kernels, without a card: `python -m benchmarks.speed.ptx --target 90 --json F`.

On CUDA the wires are their reference functions, compiled by torch.compile (comm/compression/block_quantizer.py). This
makes the Triton kernels that torch writes for a card of the target's architecture, compiles them to PTX and machine
code, and counts: kernels, what they read and write (1: no more than numbers and message), registers, and bytes that
found no register. It takes Triton (`pip install triton`), which brings an assembler, and no driver.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

if importlib.util.find_spec("triton") is None:
    sys.exit("benchmarks.speed.ptx needs Triton, which is not installed: pip install triton")

import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from benchmarks.lib.timing import describe_machine, format_table, save_json
from paragan.comm.compression.compressors import parse_wire
from paragan.core.devices import BACKENDS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from fake_cuda import fake_cuda

WIRES = ("int8", "int4", "int2", "qsgd", "sign")
NUMEL = 1 << 20
CARD = {  # what torch asks a card for, of an H100
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}


@contextlib.contextmanager
def named_card(target: int) -> Generator[Any]:
    """Let torch and Triton compile for a card of compute capability `target` (90: 9.0) that is not there."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    gpu = GPUTarget("cuda", target, CARD["warp_size"])
    properties = SimpleNamespace(major=target // 10, minor=target % 10, **CARD)
    hints = {name: value for name, value in CARD.items() if name in DeviceProperties._fields}
    replaced: dict[str, Any] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_properties": lambda *_: properties,
        "torch.cuda.get_device_capability": lambda *_: divmod(target, 10),
        "torch.cuda._lazy_init": lambda: None,
        "torch._inductor.runtime.hints.DeviceProperties.create": lambda _: DeviceProperties(
            type="cuda", index=0, cc=target, major=target // 10, **hints
        ),
    }
    driver.set_active(SimpleNamespace(get_current_target=lambda: gpu, get_current_device=lambda: 0))  # type: ignore
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch(name, function))
        stack.enter_context(mock.patch.object(torch.version, "cuda", torch.version.cuda or "12.8"))
        yield gpu


def write_kernels(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[str, int]:
    """Return the program that torch writes for a function of CUDA tensors, and the bytes its kernels read and write."""
    functional = torch.func.functionalize(function, remove="mutations")
    trace = make_fx(functional, select_decomp_table(), tracing_mode="fake", _allow_non_fake_inputs=True)
    graph = GraphLowering(trace(*inputs), example_inputs=inputs, shape_env=ShapeEnv())
    mode = inputs[0].fake_mode  # type: ignore
    with V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        graph.run(*inputs)
        program, _ = graph.codegen()
        num_bytes, _, _ = graph.count_bytes()
    return getattr(program, "value", program), int(num_bytes)


def compile_kernels(program: str, target: Any) -> list[Any]:
    """Compile the Triton kernels of a program to machine code of a target."""
    import triton
    from triton.compiler import ASTSource

    compiled: list[Any] = []
    for name, source in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", program, re.DOTALL):
        tuner = getattr(PyCodeCache.load(source.replace("triton_helpers.set_driver_to_gpu()", "")), name)
        meta, config = tuner.triton_meta, tuner.configs[0]
        constants = {**meta.get("constants", {}), **config.kwargs}
        types = {argument: meta["signature"].get(argument, "constexpr") for argument in tuner.fn.arg_names}
        types |= dict.fromkeys(constants, "constexpr")
        code = ASTSource(tuner.fn, types, constants, meta["configs"][0])
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        compiled.append(triton.compile(code, target=target, options=options))
    return compiled


def registers_of(kernel: Any, target: int) -> tuple[int, int]:
    """Return the registers a thread uses, and the bytes of local memory, where those are that did not suffice."""
    from triton.backends.nvidia.compiler import get_ptxas  # type: ignore

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(kernel.asm["ptx"])
        architecture = re.search(r"\.target (\w+)", kernel.asm["ptx"])
        assert architecture
        command = [get_ptxas(target).path, "-v", f"--gpu-name={architecture[1]}", str(path), "-o", str(path) + ".o"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", text), re.search(r"(\d+) bytes spill stores", text)
    return int(registers[1]) if registers else 0, int(spilled[1]) if spilled else 0


def functions_of(name: str, device: torch.device) -> dict[str, tuple[Callable[..., Tensor], Tensor]]:
    """Return encoding and decoding of a wire in plain PyTorch, each with its input."""
    wire = parse_wire(name)
    size = wire.nbytes(NUMEL)

    def encode(x: Tensor) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8, device=device)
        wire.encode(x, data, 0)
        return data

    def decode(data: Tensor) -> Tensor:
        out = torch.empty(NUMEL, device=device)
        wire.decode(data, out)
        return out

    message = torch.empty(size, dtype=torch.uint8, device=device)
    return {"encode": (encode, torch.empty(NUMEL, device=device)), "decode": (decode, message)}


def measure(wire: str, target: int) -> list[dict[str, Any]]:
    """Return what the kernels of a wire do, for encoding and for decoding."""
    rows: list[dict[str, Any]] = []
    plain_form = mock.patch.object(BACKENDS["cuda"], "prefers_compile", False)
    with fake_cuda() as device, plain_form, named_card(target) as gpu:
        for direction, (function, x) in functions_of(wire, device).items():
            program, num_bytes = write_kernels(function, x)
            with unset_fake_temporarily():
                kernels = compile_kernels(program, gpu)
                used = [registers_of(kernel, target) for kernel in kernels]
            least = 4 * NUMEL + parse_wire(wire).nbytes(NUMEL)
            rows.append(
                {
                    "wire": wire,
                    "direction": direction,
                    "kernels": len(kernels),
                    "ptx_lines": sum(len(kernel.asm["ptx"].splitlines()) for kernel in kernels),
                    "bytes_over_least": round(num_bytes / least, 2),
                    "registers": max(registers for registers, _ in used),
                    "spilled_bytes": sum(spilled for _, spilled in used),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=int, default=90, help="compute capability, such as 80 or 90")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = [row for wire in WIRES for row in measure(wire, args.target)]
    print(format_table(list(rows[0]), [list(row.values()) for row in rows]))
    if args.json:
        save_json(args.json, {"machine": describe_machine(), "target": args.target, "rows": rows})


if __name__ == "__main__":
    main()
