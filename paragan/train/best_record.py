"""Read the score of the best model of a run, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BEST_FOLDER = "best"


def read_best(folder: Path) -> dict[str, Any] | None:
    """Return name, value, kimg and fingerprint of the best model in a run folder; None if there is none."""
    try:
        best = json.loads((folder / BEST_FOLDER / "config.json").read_text())["best"]
        texts = {key: str(best[key]) for key in ("name", "fingerprint")}
        return {**best, **texts, "value": float(best["value"]), "kimg": float(best["kimg"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
