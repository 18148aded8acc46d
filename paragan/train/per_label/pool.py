"""Make one model of the runs of single labels, whoever trained them (`paragan pool`).

Each is an ordinary run of `--data.only=K`. The result has the layout of the model of a per-label run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paragan.config.resolve import load_dataset, make_spec
from paragan.config.sections import DataOptions
from paragan.core.errors import UsageError
from paragan.data.dataset import Dataset
from paragan.models.model import init_per_label_model
from paragan.models.model_config import read_model_config
from paragan.models.model_files import is_per_label, read_consistent
from paragan.models.per_label_layout import label_dir
from paragan.models.sampler import LabelPrior
from paragan.train.saved_run import load_run_without_user_code


@dataclass(frozen=True)
class LabelRun:
    """The finished run of a label.

    config : the content of config.json of its model
    """

    label: int
    folder: Path
    data: DataOptions
    config: dict[str, Any]


def pool(folder: Path, out: Path, data: str | None = None, allow_missing: bool = False) -> int:
    """Make one model of the finished label runs in a folder.

    Args:
        folder: has a run folder for each label; their names do not matter.
        out: gets the model, in `model/`; a model that was pooled before is replaced.
        data: where the data of the runs are now; None: where they were.
        allow_missing: leave out labels that have no run.

    Returns:
        The number of generators.

    Raises:
        UsageError: a run is not finished or not of one label, runs do not belong together, or a label is missing.
    """
    runs = find_label_runs(folder)
    _check_out(out)
    _check_same_networks(runs)
    options = dataclasses.replace(runs[0].data, only=None, labels=True)
    if data:
        options = dataclasses.replace(options, path=data)
    dataset = load_dataset(options)
    for label_run in runs:
        _check_data(label_run, dataset, options)
    assert dataset.labels is not None
    if not allow_missing:
        _check_all_labels(runs, dataset.classes, folder)
    trained_labels = [label_run.label for label_run in runs]
    prior = LabelPrior.from_labels(dataset.labels[np.isin(dataset.labels, trained_labels)], len(dataset.classes))
    counts = [int(count) for count in np.bincount(dataset.labels, minlength=len(dataset.classes))]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".pool-", dir=out) as parent:
        model = Path(parent, "model")
        init_per_label_model(
            model, make_spec(options, dataset), prior, dataset.classes, data=dataset.fingerprint, images=counts
        )
        for label_run in runs:
            target = label_dir(model, label_run.label)
            target.mkdir()
            read_consistent(label_run.folder / "model", ["model"]).write_to(target)
        shutil.rmtree(out / "model", ignore_errors=True)
        model.rename(out / "model")
    return len(runs)


def find_label_runs(folder: Path) -> list[LabelRun]:
    """Return the label runs in a folder, sorted by label. UsageError if a run in it is another one or not finished."""
    if (folder / "run.yaml").exists():
        raise UsageError(f"{folder}: is a run itself. Give the folder that holds the runs of all labels")
    run_dirs = sorted(path.parent for path in folder.glob("*/run.yaml"))
    if not run_dirs:
        problem = "has no run folders in it" if folder.is_dir() else "does not exist"
        raise UsageError(
            f"{folder}: {problem}. Train label K with `paragan train RECIPE --data.only=K --run-dir {folder}/K`"
        )
    runs: dict[int, LabelRun] = {}
    for path in run_dirs:
        label_run = _read_label_run(path)
        other = runs.setdefault(label_run.label, label_run)
        if other is not label_run:
            raise UsageError(
                f"label {label_run.label}: {other.folder} and {path} are both runs of it. Move one of them elsewhere"
            )
    return [runs[label] for label in sorted(runs)]


def _read_label_run(folder: Path) -> LabelRun:
    run = load_run_without_user_code(folder)
    if run.data.only is None:
        raise UsageError(
            f"{folder}: is not the run of one label (data.only is not set). Move it elsewhere, or train it with "
            "--data.only=K"
        )
    has_model = (folder / "model" / "config.json").is_file()
    config = read_model_config(folder / "model") if has_model else {}
    kimg = float(config.get("kimg", 0))
    if round(1000 * kimg) < run.total_images:
        raise UsageError(f"{folder}: is not finished, at {kimg:g} of {run.kimg:g} kimg. Resume it first")
    return LabelRun(run.data.only, folder, run.data, config)


def _check_out(out: Path) -> None:
    """Raise UsageError if a folder holds something else than a pooled model."""
    model = out / "model"
    if (out / "run.yaml").exists() or (model.exists() and not is_per_label(model)):
        raise UsageError(f"--out {out}: holds a run or another model. Choose another folder")


def _check_same_networks(runs: Sequence[LabelRun]) -> None:
    """Raise UsageError if generators differ in their networks, or in what they make."""
    first = runs[0]
    for other in runs[1:]:
        for part, name in (("spec", "images"), ("net", "networks")):
            before, now = first.config[part], other.config[part]
            if before != now:
                field = next(key for key in {**before, **now} if before.get(key) != now.get(key))
                raise UsageError(
                    f"{other.folder}: its {name} have {field}={now.get(field)}, and those of {first.folder} "
                    f"{field}={before.get(field)}. Train one of them again, as the other"
                )


def _check_data(label_run: LabelRun, dataset: Dataset, options: DataOptions) -> None:
    """Raise UsageError if a run was trained on other images than those of its label in a data set."""
    fingerprint = ""
    with contextlib.suppress(UsageError):  # it has no such label
        fingerprint = dataset.only_class(label_run.label).fingerprint
    if fingerprint != label_run.config.get("data"):
        raise UsageError(
            f"{label_run.folder}: was not trained on label {label_run.label} of {options.redacted_path}. Use runs of "
            "the same data, and --data PATH if it has moved"
        )


def _check_all_labels(runs: Sequence[LabelRun], classes: Sequence[str], folder: Path) -> None:
    trained_labels = {label_run.label for label_run in runs}
    missing = [f"{label} ({name})" for label, name in enumerate(classes) if label not in trained_labels]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise UsageError(
            f"{folder}: has no run of label {', '.join(missing[:5])}{more}. Train them, or use --allow-missing"
        )
