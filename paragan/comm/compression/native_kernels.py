"""kernels.c, compiled for this processor when first wanted, and kept for the next process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
# Contraction and reordering would round differently from the plain form, and from another compiler.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 120.0


@cache
def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no C compiler, which is said once."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]  # CC may be "ccache gcc"
    try:
        if shutil.which(compiler[0]) is None:
            raise OSError("there is no C compiler (cc, or what CC names)")
        return ctypes.CDLL(str(_compile(compiler)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        first = lines[0] if lines else repr(error)
        warnings.warn(f"compressors run in plain PyTorch, about ten times slower: {first}", stacklevel=2)
        return None


def _compile(compiler: list[str]) -> Path:
    """The library's path, named after all that decides what is in it; ranks that race each write the same. It ends with
    its own checksum: a library that was cut off would kill whoever loads it."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=True)
    about = (SOURCE.read_text(), " ".join(FLAGS), version.stdout, _cpu_id())
    name = f"kernels-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paragan"
    if not _is_intact(folder / name):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside) / name
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
            subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
            made.write_bytes(made.read_bytes() + hashlib.sha256(made.read_bytes()).digest())
            made.replace(folder / name)
    return folder / name


def _is_intact(path: Path) -> bool:
    data = path.read_bytes() if path.exists() else b""
    return hashlib.sha256(data[:-32]).digest() == data[-32:]


def _cpu_id() -> str:
    """What instructions there are: a home directory may be shared by different hosts."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    kept = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return f"{platform.machine()} {sorted(set(kept))}"
