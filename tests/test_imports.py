"""Benchmarks run by hand, so what they import from each other is checked here, without running them."""

from __future__ import annotations

import ast
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def top_level_names(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def test_benchmarks_import_names_that_exist():
    missing: list[str] = []
    for path in BENCHMARKS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("benchmarks."):
                continue
            source = (BENCHMARKS.parent / str(node.module).replace(".", "/")).with_suffix(".py")
            known = top_level_names(source) if source.exists() else {p.stem for p in source.with_suffix("").iterdir()}
            missing += [f"{path.name}: {node.module}.{a.name}" for a in node.names if a.name not in known]
    assert not missing
