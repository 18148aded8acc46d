"""kernels.c, compiled for this processor when first wanted, and kept for the next process."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
# Contraction and reordering would round differently from the plain form, and from another compiler.
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
PATIENCE_S = 120.0


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no C compiler, which is said once."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    try:
        if compiler is None:
            raise OSError("there is no C compiler (cc, or what CC names)")
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: there is no home
        reason = getattr(error, "stderr", None) or error
        first = str(reason).strip().splitlines()[0]
        warnings.warn(f"compressors run in plain PyTorch, about ten times slower: {first}", stacklevel=2)
        return None


def _compiled(compiler: str) -> Path:
    """The library's path, named after all that decides what is in it; ranks that race each write the same."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    about = (SOURCE.read_text(), " ".join(FLAGS), version.stdout, _processor())
    name = f"kernels-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.so"
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paragan"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            made = Path(aside) / name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(made), "-lm"]
            subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
            made.replace(folder / name)
    return folder / name


def _processor() -> str:
    """What instructions there are: a home directory may be shared by different hosts."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    kept = [line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return f"{platform.machine()} {sorted(set(kept))}"
