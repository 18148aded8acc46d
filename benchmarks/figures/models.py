"""State the figures of docs/models.md: exported graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page("docs/models.md")


@PAGE.states("graphs")
def differences_of_exported_graphs(graphs: Any) -> Iterator[Statement]:
    onnx, torch_export = (
        max(row["apart"] for row in graphs["rows"] if row["form"] == form) for form in ("onnx", "torch-export")
    )
    yield "differ by at most {} in ONNX and {:.0f} in torch.export", f"{onnx:.0e}".replace("e-0", "e-"), torch_export
