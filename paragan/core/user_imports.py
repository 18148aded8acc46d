"""Import what options name as `module:attribute`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def import_attribute(name: str) -> Any:
    """Import `module:attribute`, of an installed module or of one in the current folder, as `python -m` finds it.

    Whatever the module raises is raised: it may run any code.
    """
    module, _, attribute = name.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    imported = importlib.import_module(module)
    if not hasattr(imported, attribute):
        raise AttributeError(f"module {module!r} ({imported.__file__}) has no attribute {attribute!r}")
    return getattr(imported, attribute)
