"""Who may import whom. docs/design.md draws this picture; here it is checked."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "paragan"

WORDS = {"errors", "config", "rng", "clock", "batch", "devices"}  # single files that anyone may import
MAY = {
    "comm": {"comm"},
    "game": {"game", "comm"},
    "strategies": {"strategies", "game", "comm"},
    "plan": {"plan", "train", "strategies", "game", "comm", "data", "losses", "eval"},
    "report": {"report"},  # reads files
    "train": {"train", "strategies", "game", "comm", "data", "eval", "nets", "losses", "optim", "report"},
    "models": {"models", "train", "nets", "data", "report"},
    "recipes": {"recipes", "train", "game", "nets", "losses", "optim", "strategies"},
    **{leaf: {leaf} for leaf in ("nets", "losses", "optim", "data", "eval")},
}
TOP = {"__init__", "__main__", "api", "cli", *(f.stem for f in ROOT.glob("cli_*.py"))}  # introduce everyone to everyone


def modules():
    return sorted(ROOT.rglob("*.py"))


def room(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports(path: Path):
    """Absolute names of everything a file imports, lazily too."""
    package = ("paragan", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_picture(path):
    here = room(path)
    if here in TOP:
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] != "paragan" or len(parts) < 2:
            continue
        allowed = MAY.get(here, set()) | WORDS
        assert parts[1] in allowed, f"{here} may not import {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_torch_distributed_has_one_door(path):
    named = any(name.startswith("torch.distributed") for name in imports(path))
    assert not named or path.relative_to(ROOT).as_posix() in ("comm/groups.py", "comm/world.py")


def _of_pickle(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pickle"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_that_runs_code_from_files_is_imported(path):
    named = {name for name in imports(path) if name.split(".")[0] in ("pickle", "dill", "cloudpickle", "torchvision")}
    assert named <= {"pickle", "pickle.UnpicklingError"}
    if named and path.relative_to(ROOT).as_posix() != "data/sources/inert.py":  # reads them without running them
        used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if _of_pickle(node)}
        assert used <= {"UnpicklingError"}  # the error of torch's own safe reader
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_step_waits_for_the_device_by_accident(path):
    if room(path) in ("game", "losses", "optim"):
        assert ".item()" not in path.read_text()


def test_every_room_is_in_the_picture():
    rooms = {p.name for p in ROOT.iterdir() if p.is_dir() and p.name != "__pycache__"}
    files = {p.stem for p in ROOT.glob("*.py")}
    assert rooms == set(MAY)
    assert files == WORDS | TOP
