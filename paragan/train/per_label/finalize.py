"""Make what belongs to all labels together when each is done: scores of the combined model, a sample grid, a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from paragan.comm.process_group import SingleRankGroup
from paragan.config.run import Run
from paragan.core.jsonl import JsonlFile, Row, read_jsonl
from paragan.core.rng import CPU
from paragan.data.dataset import Dataset
from paragan.eval.evaluate import EvalProtocol
from paragan.models.model import load_model
from paragan.models.per_label_layout import label_dir
from paragan.report.page import write_report
from paragan.train.callbacks.report_figures import make_final_figures
from paragan.train.callbacks.sample_images import draw_fakes
from paragan.train.callbacks.scoring import append_scores, format_failures, format_score_summary, score
from paragan.train.console import RunConsole
from paragan.train.per_label.jobs import Job
from paragan.train.per_label.lease_queue import LeaseEntry

SUMMED_KEYS = ("Progress/kimg", "Progress/step", "Timing/total_s", "Timing/data_wait_s")
MAX_KEYS = ("Resources/peak_mem_gb",)


def finalize(
    run: Run,
    dataset: Dataset,
    jobs: Sequence[Job],
    entries: Mapping[str, LeaseEntry],
    folder: Path,
    console: RunConsole,
) -> None:
    """Score the model of all labels, as a run does at its end, and write its grid, stats, figures and report.

    Repeated by another worker if this one dies, so every file is replaced.
    """
    model = load_model(folder, nets=run.nets, dataset=dataset, decoder=run.data.decoder)
    kimg = model.kimg
    if run.evaluation.metrics:
        console.print(f"scoring {run.evaluation.count:,} fakes of all labels: {', '.join(run.evaluation.metrics)}")
        protocol = EvalProtocol(batch_norm=model.batch_norm, ema=True, truncation=1.0, seed=run.seed)
        scores = score(model.sampler, dataset, run.evaluation, protocol, SingleRankGroup())
        # drop scores that a worker that died here has written
        JsonlFile(folder / "metrics.jsonl").truncate_after(math.nextafter(kimg, 0), key="kimg")
        append_scores(folder, scores, kimg)
        console.print(f"{kimg:g} kimg, all labels: {format_score_summary(scores)}")
        for line in format_failures(scores):
            console.print(line)
    draw_fakes(model.sampler, run.nets, dataset, dataset.labels, folder, round(kimg))
    stats_path = folder / "stats.jsonl"
    stats_path.unlink(missing_ok=True)
    stats_per_label = [read_jsonl(label_dir(folder / "labels", job.label) / "stats.jsonl") for job in jobs]
    for row in merge_label_stats(stats_per_label):
        JsonlFile(stats_path).append(row)
    labels_path = folder / "labels.jsonl"
    labels_path.unlink(missing_ok=True)
    for job in sorted(jobs, key=lambda job: job.label):
        JsonlFile(labels_path).append(_label_row(job, entries[job.name]))
    make_final_figures(folder, run.nets, dataset, CPU, console)
    write_report(folder)


def _label_row(job: Job, entry: LeaseEntry) -> Row:
    """Return the line of labels.jsonl, which the report shows."""
    metadata = entry.metadata
    return {
        "label": job.label,
        "name": job.class_name,
        "images": job.num_images,
        "kimg": float(metadata.get("images", 0)) / 1000,
        "seconds": float(metadata.get("seconds", 0)),
        "worker": str(metadata.get("replaced", entry.worker)),
        "scores": dict(metadata.get("scores", {})),
    }


def merge_label_stats(stats_per_label: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the stats of all labels, line by line, into those of one run: counts are summed, the rest is the mean.

    A label with fewer lines counts with its last one.
    """
    num_lines = max((len(rows) for rows in stats_per_label), default=0)
    merged: list[Row] = []
    for number in range(num_lines):
        rows = [rows[min(number, len(rows) - 1)] for rows in stats_per_label if rows]
        keys = [key for key in rows[0] if all(isinstance(row.get(key), int | float) for row in rows)]
        merged.append({key: _combine_values(key, [float(row[key]) for row in rows]) for key in keys})
    return merged


def _combine_values(key: str, values: Sequence[float]) -> float:
    if key.startswith("Comm/") or key in SUMMED_KEYS:
        return sum(values)
    return max(values) if key in MAX_KEYS else float(np.mean(values))
