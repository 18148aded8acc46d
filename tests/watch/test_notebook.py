"""examples/first_hour.ipynb, executed, and what `show_run` shows in a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

import paragan as pg
from benchmarks.lib.document import ROOT
from paragan.watch import notebook
from processes import train_tiny

NOTEBOOK = ROOT / "examples" / "first_hour.ipynb"


@pytest.fixture
def displayed(monkeypatch):
    """The HTML that is displayed, in place of a notebook."""
    from IPython import display

    shown: list[str] = []

    class Handle:
        def update(self, item):
            shown.append(item.data)

    monkeypatch.setattr(display, "display", lambda item, display_id: Handle())
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=None))
    return shown


def test_the_notebook_runs_and_shows_what_it_says(tmp_path, monkeypatch):
    monkeypatch.setenv("KIMG", "2")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = nbformat.read(NOTEBOOK, 4)
    folder = tmp_path / "work"
    folder.mkdir()
    NotebookClient(book, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    texts = json.dumps(outputs)
    assert "finished" in texts
    assert "<svg" in texts
    assert "coverage_pixels" in texts
    assert "model.safetensors" in texts
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not [output for output in outputs if output.output_type == "error"]
    assert (folder / "run" / "report.html").is_file()


def test_the_notebook_is_committed_without_outputs():
    book = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(book)
    assert all(not cell.outputs and cell.execution_count is None for cell in book.cells if cell.cell_type == "code")


def test_a_run_is_shown_until_its_process_ends(tmp_path, displayed):
    folder = tmp_path / "run"
    trained = train_tiny(tmp_path / "trained", "--kimg=0.16")
    code = "import shutil, sys, time; shutil.copytree(*sys.argv[1:]); time.sleep(0.3)"
    process = subprocess.Popen([sys.executable, "-c", code, str(trained), str(folder)])
    pg.show_run(folder, process, interval_s=0.05)
    assert process.returncode == 0
    assert len(displayed) >= 2
    assert "finished" in displayed[-1]
    assert displayed[-1].count("<svg") == notebook.MAX_CHARTS
    assert "data:image/png" in displayed[-1]


def test_a_process_that_fails_is_an_error(finished, displayed):
    with pytest.raises(pg.RunError, match="ended with status 2"):
        pg.show_run(finished, subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"]), interval_s=0.05)
    assert displayed


def test_a_run_of_another_process_is_shown_while_it_holds_the_lock(finished, displayed, monkeypatch):
    owners = iter(["process 1 on gpu07", "process 1 on gpu07", ""])
    monkeypatch.setattr(notebook, "lock_owner", lambda folder: next(owners))
    pg.show_run(finished, interval_s=0.01)
    assert len(displayed) == 3


def test_what_cannot_be_shown(tmp_path, monkeypatch):
    with pytest.raises(pg.UsageError, match="needs a notebook"):
        pg.show_run(tmp_path / "no")
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(kernel=None))
    with pytest.raises(pg.UsageError, match="does not exist"):
        pg.show_run(tmp_path / "no")
    monkeypatch.setitem(sys.modules, "IPython.display", None)
    with pytest.raises(pg.UsageError, match="needs a notebook: pip install jupyterlab"):
        pg.show_run(tmp_path)


def test_ipython_is_not_needed_for_anything_else():
    code = "import sys; import paragan.watch.notebook; sys.exit('IPython' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
