"""The README.md of a model: description, scores with their protocols, usage, and front matter for the hub."""

from __future__ import annotations

import json
from typing import Any

import yaml

from paragan.core.jsonl import Row, is_number, read_jsonl
from paragan.models.model import Model
from paragan.models.sampler import Sampler

USAGE = """```python
import paragan

model = paragan.load("PATH or user/name"{more})
{kind} = model.sample({arguments})  # {shape}
model.g  # the torch.nn.Module: ({inputs}) -> {kind}
```"""


HUB_TAGS = {
    ("image", True): "unconditional-image-generation",
    ("image", False): "image-to-image",
    ("audio", False): "audio-to-audio",
}  # of the data, and whether G takes latents
BATCH_NORM_TEXTS = {"standing": "computed on images of the averaged generator", "running": "those of training"}


def make_model_card(model: Model, name: str = "") -> str:
    """Return the card in Markdown. Its front matter has a comment where the publisher puts the licence."""
    name = name or _model_name(model)
    scores = read_model_scores(model)
    front_matter = yaml.safe_dump(_front_matter(model, name, scores), sort_keys=False)
    parts = [
        f"---\n{front_matter}# license: add yours\n---",
        f"# {name}",
        _description(model),
        _picture(model),
        _score_table(scores),
        "## Use\n\n" + _usage(model),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _picture(model: Model) -> str:
    if model.spec.array_shape:
        return ""
    return f"![samples{', classes as frequent as in the data' if model.spec.classes else ''}](samples.png)"


def read_model_scores(model: Model) -> list[Row]:
    """Return the rows of the run's metrics.jsonl that score this model, the latest for each name."""
    latest: dict[str, Row] = {}
    for folder in (model.folder, model.folder.parent):
        for row in read_jsonl(folder / "metrics.jsonl"):
            is_of_model = row.get("kimg") == model.config.get("kimg") and is_number(row.get("value"))
            if is_of_model and isinstance(row.get("name"), str) and isinstance(row.get("protocol", {}), dict):
                latest[row["name"]] = row
    return list(latest.values())


def _model_name(model: Model) -> str:
    """Return the name of the run, whose folder contains `model` and `best`, or of the model folder."""
    folder = model.folder.resolve()
    in_run_dir = folder.name in ("model", "best") and (folder.parent / "run.yaml").exists()
    return folder.parent.name if in_run_dir else folder.name


def _front_matter(model: Model, name: str, scores: list[Row]) -> dict[str, Any]:
    data_type = _data_type(model)
    tag = HUB_TAGS.get((data_type, takes_latents(model)))
    head: dict[str, Any] = {
        "library_name": "paragan",
        **({"pipeline_tag": tag} if tag else {}),
        "tags": [
            "gan",
            f"{data_type}-generation",
            "pytorch",
            str(model.config.get("net", {}).get("name", "per-label")),
        ],
    }
    if scores:
        results = [{"type": row["name"], "value": row["value"], "name": _format_protocol(row)} for row in scores]
        data = {"name": str(model.config.get("recipe", "custom")), "type": data_type}
        task = {"type": tag or "other", "name": f"{data_type} generation".capitalize()}
        head["model-index"] = [{"name": name, "results": [{"task": task, "dataset": data, "metrics": results}]}]
    return head


def _data_type(model: Model) -> str:
    if model.spec.sample_rate:
        return "audio"
    return "array" if model.spec.array_shape else "image"


def takes_latents(model: Model) -> bool:
    """Return whether the input of a model is latents, not data."""
    return not isinstance(model.sampler, Sampler) or model.sampler.uses_latents


def _description(model: Model) -> str:
    config = model.config
    spec = model.spec.sample_spec
    net = config.get("net", {})
    if spec.sample_rate:
        output = f"waves {list(spec.array_shape)} at {spec.sample_rate} Hz"
    elif spec.array_shape:
        output = f"numbers {list(spec.array_shape)}"
    else:
        output = f"images of {spec.size.width} x {spec.size.height} x {spec.channels}"
        if not spec.size.is_square:
            output += f" ({spec.size})"
    classes = ""
    if spec.classes:
        names = [*model.classes[:10], *(["..."] if len(model.classes) > 10 else [])]
        classes = f", {spec.classes} classes ({', '.join(names)})"
    records = "real records" if spec.array_shape else "real images"
    lines = [
        f"A generator of {output}{classes}" + ("." if takes_latents(model) else ", which is given data, not latents."),
        f"Networks: `{json.dumps(net)}`." if net else "A generator for each label.",
        f"Recipe: {config.get('recipe', 'custom')}, {float(config.get('kimg', 0)):g} thousand {records} shown to D.",
    ]
    if encoding := config.get("encoding"):
        lines.append(f"It makes latents, which `{encoding['decoder']}` decodes (weights {encoding['fingerprint']}).")
    if statistics := BATCH_NORM_TEXTS.get(str(config.get("batch_norm"))):
        lines.append(f"Batch-norm statistics: {statistics}.")
    return "  \n".join(lines)


def _format_protocol(row: Row) -> str:
    return ", ".join(f"{name}={value}" for name, value in row.get("protocol", {}).items() if value is not None)


def _score_table(scores: list[Row]) -> str:
    if not scores:
        return ""
    rows = [
        f"| `{row['name']}` | {row['value']:.5g} | `{row.get('fingerprint', '')}` | {_format_protocol(row)} |"
        for row in scores
    ]
    head = "## Scores\n\nScores with different protocols are not comparable.\n\n| score | value | protocol | measured |"
    return "\n".join([head, "|---|---|---|---|", *rows])


def _usage(model: Model) -> str:
    spec = model.spec.sample_spec
    shape = f"uint8 {[16, spec.size.height, spec.size.width, spec.channels]}"
    if spec.array_shape:
        shape = f"float32 {[16, *spec.array_shape]}"
    kind = "samples" if spec.array_shape else "images"
    name = str(model.config.get("net", {}).get("name", ""))
    nets = f', nets="{name}"' if ":" in name else ""  # the user's own
    labels = "y [N]" if spec.classes else "y [N] or None"
    if not takes_latents(model):
        size = f", resolution={spec.resolution!r}"
        if spec.array_shape:
            size = f", segment={spec.array_shape[-1]}" if spec.sample_rate else ""
        more = f', dataset=paragan.DataOptions("DATA"{size})' + nets
        return USAGE.format(more=more, kind=kind, arguments="16", shape=shape, inputs=f"its input, {labels}")
    arguments = "16, truncation=0.7, seed=0"
    if spec.classes:
        arguments = f"16, labels={[0, spec.classes - 1] if spec.classes > 1 else [0]}, truncation=0.7, seed=0"
    latent = model.config.get("net", {}).get("latent", "latent")
    return USAGE.format(more=nets, kind=kind, arguments=arguments, shape=shape, inputs=f"z [N, {latent}], {labels}")
