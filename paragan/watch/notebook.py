"""A run inside a notebook: what it does now, its curves and its newest samples, refreshed while it is trained."""

from __future__ import annotations

import subprocess
import time
from itertools import chain, islice
from pathlib import Path
from typing import Any

from paragan.core.errors import RunError, UsageError
from paragan.core.folder_lock import lock_owner
from paragan.report.charts import score_charts, standard_charts
from paragan.report.embedded_images import latest_grid
from paragan.report.page import render_page, summarize_run
from paragan.report.run_data import read_run_data
from paragan.report.scores import group_scores
from paragan.watch.run_state import read_state

MAX_CHARTS = 3
MAX_GRID_CHARS = 500_000  # of the samples, in a notebook that is saved


def show_run(run_dir: str | Path, process: subprocess.Popen[Any] | None = None, interval_s: float = 2.0) -> None:
    """Show a run below the cell of a notebook until it is not trained any more.

    Args:
        run_dir: the folder of the run, which `process` may still have to make.
        process: trains the run: `subprocess.Popen(["paragan", "train", ...])`. None: whichever process trains it.
        interval_s: seconds between two refreshes.

    Raises:
        UsageError: there is no run in the folder, or this is no notebook.
        RunError: `process` ended with another status than 0.
    """
    try:
        from IPython import get_ipython
        from IPython.display import HTML, display
    except ImportError:
        get_ipython = None
    if get_ipython is None or not hasattr(get_ipython(), "kernel"):
        raise UsageError("paragan.show_run needs a notebook: pip install jupyterlab, or use `paragan watch`")
    folder = Path(run_dir)
    if process is None:
        read_run_data(folder)  # raises UsageError unless it is a run
    handle = display(HTML("waiting for the first lines"), display_id=True)
    is_trained = True
    while is_trained:
        is_trained = process.poll() is None if process else bool(lock_owner(folder))
        if (folder / "run.yaml").is_file() and handle:
            handle.update(HTML(render_summary(folder)))
        if is_trained:
            time.sleep(interval_s)
    if process and process.returncode:
        raise RunError(f"{run_dir}: the process that trained it ended with status {process.returncode}")


def render_summary(folder: Path) -> str:
    """Return the HTML fragment about a run: its state, some curves, the newest samples.

    Raises:
        UsageError: the folder holds no run, or one of its files cannot be read.
    """
    run_data = read_run_data(folder)
    charts = chain(score_charts(group_scores(run_data.scores)), standard_charts(run_data.stats))
    return render_page(
        "notebook.html",
        run=summarize_run(run_data),
        state=read_state(run_data).to_line(),
        findings=run_data.events[-MAX_CHARTS:],
        charts=list(islice(charts, MAX_CHARTS)),
        grid=latest_grid(folder, MAX_GRID_CHARS),
    ).decode()
