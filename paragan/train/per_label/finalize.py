"""What is made of all labels together, when each is done: scores of the merged model, a grid, a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from paragan.comm.process_group import Solo
from paragan.config.run import Run
from paragan.core.jsonl import Records, Row, read
from paragan.core.rng import CPU
from paragan.data.dataset import Images
from paragan.eval.evaluate import Protocol
from paragan.models.model import load_model, part
from paragan.report.page import write_report
from paragan.train.callbacks.report_figures import at_end
from paragan.train.callbacks.sample_images import draw_fakes
from paragan.train.callbacks.scoring import append, score, summary
from paragan.train.console import Screen
from paragan.train.per_label.jobs import Job
from paragan.train.per_label.lease_queue import Entry

SUMMED = ("Progress/kimg", "Progress/step", "Timing/total_s", "Timing/data_wait_s")
LARGEST = ("Resources/peak_mem_gb",)


def conclude(
    run: Run, images: Images, jobs: Sequence[Job], entries: Mapping[str, Entry], folder: Path, screen: Screen
) -> None:
    """Score the model of all labels, as a run does at its end, and write what people look at."""
    model = load_model(folder, nets=run.nets, data=images)
    kimg = model.kimg
    if run.evaluation.metrics:
        screen.say(f"scoring {run.evaluation.count:,} fakes of all labels: {', '.join(run.evaluation.metrics)}")
        protocol = Protocol(batch_norm=model.batch_norm, ema=True, truncation=1.0, seed=run.seed)
        scores = score(model.sampler, images, run.evaluation, protocol, Solo())
        Records(folder / "metrics.jsonl").truncate_after(math.nextafter(kimg, 0), key="kimg")  # of who died in here
        append(folder, scores, kimg)
        screen.say(f"{kimg:g} kimg, all labels: {summary(scores)}")
    draw_fakes(model.sampler, run.nets, images, images.labels, folder / f"fakes{round(kimg):06d}.png")
    stats = folder / "stats.jsonl"
    stats.unlink(missing_ok=True)
    for row in together([read(part(folder / "labels", job.label) / "stats.jsonl") for job in jobs]):
        Records(stats).append(row)
    table = folder / "labels.jsonl"
    table.unlink(missing_ok=True)
    for job in sorted(jobs, key=lambda job: job.label):
        Records(table).append(_row(job, entries[job.name]))
    at_end(folder, run.nets, images, CPU, screen)
    write_report(folder)


def _row(job: Job, entry: Entry) -> Row:
    """A label in the report."""
    about = entry.about
    return {
        "label": job.label,
        "name": job.title,
        "images": job.of,
        "kimg": float(about.get("images", 0)) / 1000,
        "seconds": float(about.get("seconds", 0)),
        "worker": str(about.get("replaced", entry.worker)),
        "scores": dict(about.get("scores", {})),
    }


def together(of_labels: Sequence[Sequence[Row]]) -> list[Row]:
    """Stats of all labels as those of one run: what is counted is summed, the rest is the mean over labels, line by
    line; a label that has fewer lines stays at its last."""
    longest = max((len(rows) for rows in of_labels), default=0)
    lines = list[Row]()
    for number in range(longest):
        rows = [rows[min(number, len(rows) - 1)] for rows in of_labels if rows]
        keys = [key for key in rows[0] if all(isinstance(row.get(key), int | float) for row in rows)]
        lines.append({key: _one(key, [float(row[key]) for row in rows]) for key in keys})
    return lines


def _one(key: str, values: Sequence[float]) -> float:
    if key.startswith("Comm/") or key in SUMMED:
        return sum(values)
    return max(values) if key in LARGEST else float(np.mean(values))
