"""The README.md of a model: what it is, its scores and how they were measured, its use. The hub reads the head."""

from __future__ import annotations

import json
from typing import Any

import yaml

from paragan.core.jsonl import Row, is_number, read_jsonl
from paragan.models.model import Model

USAGE = """```python
import paragan

model = paragan.load("{where}")
images = model.sample(16{labels}, truncation=0.7, seed=0)  # {shape}
model.g  # the torch.nn.Module: (z [N, {latent}], y [N]{none}) -> images in [-1, 1]
```"""


def make_model_card(model: Model, name: str = "") -> str:
    """Markdown. The licence is left to whoever publishes it: the head has a line for it."""
    name = name or _model_name(model)
    scores = read_model_scores(model)
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(model, name, scores), sort_keys=False)}# license: which one is yours to say\n---",
        f"# {name}",
        _description(model),
        "" if model.spec.array_shape else "![samples, as often of each class as in the data](samples.png)",
        _score_table(scores),
        "## Use\n\n" + _usage(model),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def read_model_scores(model: Model) -> list[Row]:
    """The lines of the run's metrics.jsonl that were measured of this model, the latest of each name."""
    found: dict[str, Row] = {}
    for folder in (model.folder, model.folder.parent):
        for row in read_jsonl(folder / "metrics.jsonl"):
            of_now = row.get("kimg") == model.config.get("kimg") and is_number(row.get("value"))
            if of_now and isinstance(row.get("name"), str) and isinstance(row.get("protocol", {}), dict):
                found[row["name"]] = row
    return list(found.values())


def _model_name(model: Model) -> str:
    """Of its run, as far as that is known; `best` and `model` are inside it."""
    folder = model.folder.resolve()
    return (
        folder.parent.name
        if folder.name in ("model", "best") and (folder.parent / "run.yaml").exists()
        else folder.name
    )


def _front_matter(model: Model, name: str, scores: list[Row]) -> dict[str, Any]:
    head: dict[str, Any] = {
        "library_name": "paragan",
        "pipeline_tag": "unconditional-image-generation",
        "tags": ["gan", "image-generation", "pytorch", str(model.config.get("net", {}).get("name", "per-label"))],
    }
    if scores:
        results = [{"type": row["name"], "value": row["value"], "name": _format_protocol(row)} for row in scores]
        data = {"name": str(model.config.get("recipe", "custom")), "type": "image"}
        task = {"type": "unconditional-image-generation", "name": "Image generation"}
        head["model-index"] = [{"name": name, "results": [{"task": task, "dataset": data, "metrics": results}]}]
    return head


def _description(model: Model) -> str:
    config, spec = model.config, model.spec
    net = config.get("net", {})
    what = (
        f"images of {spec.resolution} x {spec.resolution} x {spec.channels}"
        if not spec.array_shape
        else (f"numbers {list(spec.array_shape)}")
    )
    classes = f", {spec.classes} classes ({_shortened(model.classes)})" if spec.classes else ""
    norm = {"standing": "measured anew on its own images", "running": "those kept in training", "none": ""}
    told = norm.get(str(config.get("batch_norm")), "")
    lines = [
        f"A generator of {what}{classes}.",
        f"Networks: `{json.dumps(net)}`." if net else "A generator for every label.",
        f"Recipe: {config.get('recipe', 'custom')}, {float(config.get('kimg', 0)):g} thousand real images shown to D.",
        f"Statistics of batch norm: {told}." if told else "",
    ]
    return "  \n".join(line for line in lines if line)


def _shortened(names: tuple[str, ...]) -> str:
    return ", ".join(names[:10]) + ", ..." * (len(names) > 10)


def _format_protocol(row: Row) -> str:
    """In what way a score was measured, in short."""
    told = {k: v for k, v in dict(row.get("protocol", {})).items() if v is not None}
    return ", ".join(f"{k}={v}" for k, v in told.items())


def _score_table(scores: list[Row]) -> str:
    if not scores:
        return ""
    rows = [
        f"| `{row['name']}` | {row['value']:.5g} | `{row.get('fingerprint', '')}` | {_format_protocol(row)} |"
        for row in scores
    ]
    head = "## Scores\n\nScores whose protocols differ cannot be compared.\n\n| score | value | protocol | measured |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def _usage(model: Model) -> str:
    spec = model.spec
    latent = str(model.config.get("net", {}).get("latent", "latent"))
    shape = (
        f"float32 {[16, *spec.array_shape]}"
        if spec.array_shape
        else f"uint8 {[16, spec.resolution, spec.resolution, spec.channels]}"
    )
    labels = f", labels={[0, spec.classes - 1] if spec.classes > 1 else [0]}" if spec.classes else ""
    none = "" if spec.classes else " or None"
    return USAGE.format(where="PATH or user/name", labels=labels, shape=shape, latent=latent, none=none)
