"""`paragan plan RECIPE --simulate`: many workers that differ, falter, leave and join."""

from __future__ import annotations

import argparse
from typing import Any


def simulate(options: argparse.Namespace, run: Any, links: Any) -> int:
    return 0
