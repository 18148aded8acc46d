"""kernels.c, compiled for this processor at its first use and cached in ~/.cache/paragan/kernels.

A library in the cache is loaded only if it and its folder belong to this user and nobody else can write to them.
"""

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
# Contraction and reordering would round differently from the reference, and from another compiler.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 120.0


@cache
def load_kernels() -> ctypes.CDLL | None:
    """Return the compiled kernels; None if there is no C compiler, with a warning at the first call."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]  # CC may be "ccache gcc"
    try:
        if shutil.which(compiler[0]) is None:
            raise OSError("there is no C compiler (cc, or the one that CC names)")
        return ctypes.CDLL(str(_compile(compiler)))
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:  # RuntimeError: no home directory
        lines = str(getattr(error, "stderr", None) or error).strip().splitlines()
        reason = lines[0] if lines else repr(error)
        warnings.warn(f"compressors run in plain PyTorch, about ten times slower: {reason}", stacklevel=2)
        return None


def _compile(compiler: list[str]) -> Path:
    """Return the path of the compiled library.

    Its name has a digest of all that its contents depend on, so ranks that compile at the same time write the same. The
    file ends with a checksum of itself, because loading a truncated library would kill the process.
    """
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=True)
    inputs = (SOURCE.read_text(), " ".join(FLAGS), version.stdout, _cpu_id())
    name = f"kernels-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paragan" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(folder):
        raise OSError(f"{folder} can be written by other users: chmod 700 it")
    if not _is_intact(folder / name):
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            library = Path(temporary) / name
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(library), "-lm"]
            subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=True)
            library.write_bytes(library.read_bytes() + hashlib.sha256(library.read_bytes()).digest())
            library.chmod(0o700)
            library.replace(folder / name)
    return folder / name


def _is_private(path: Path) -> bool:
    """Return whether a file or folder belongs to this user, and nobody else can write to it."""
    status = path.lstat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022 and not path.is_symlink()


def _is_intact(path: Path) -> bool:
    data = path.read_bytes() if path.exists() and _is_private(path) else b""
    return hashlib.sha256(data[:-32]).digest() == data[-32:]


def _cpu_id() -> str:
    """Describe the processor's instruction set: hosts that share a home directory may differ."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return f"{platform.machine()} {sorted(set(features))}"
