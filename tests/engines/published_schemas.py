"""Schemas that Kubernetes and SkyPilot check a file with, as their projects publish them.

Update `schemas/` from checkouts at the tags in its README, in an environment that has skypilot:

    python tests/engines/published_schemas.py TRAINER_CHECKOUT JOBSET_CHECKOUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMAS = Path(__file__).parent / "schemas"
FILES = {  # kind -> (checkout, its custom resource definition)
    "TrainJob": (0, "manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml"),
    "TrainingRuntime": (0, "manifests/base/crds/trainer.kubeflow.org_trainingruntimes.yaml"),
    "JobSet": (1, "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"),
}
NOTES = {"description", "format", "title", "x-kubernetes-validations", "x-kubernetes-list-type"}
METADATA = {  # of every object; a definition only says that it is one
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "namespace": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "additionalProperties": False,
}

Schema = dict[str, Any]


def trim(schema: Any) -> Any:
    """Return a schema without texts that describe it, and without rules in other languages."""
    if isinstance(schema, list):
        return [trim(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    trimmed = {key: trim(part) for key, part in schema.items() if key not in NOTES and key != "properties"}
    if "properties" in schema:
        trimmed["properties"] = {name: trim(part) for name, part in schema["properties"].items()}
    return trimmed


def load_schema(kind: str) -> Schema:
    """Return the JSON schema of a kind of object of Kubernetes, or of SkyPilot's "task" and "resources".

    Those of Kubernetes refuse unknown fields, as `kubectl apply` does: a definition says that they are pruned.
    """
    schema = json.loads((SCHEMAS / f"{kind.lower()}.json").read_text())
    if kind not in FILES:
        return schema
    schema["properties"]["apiVersion"] = {"const": schema.pop("apiVersion")}
    schema["properties"]["kind"] = {"const": kind}
    schema["properties"]["metadata"] = METADATA | {"required": ["name"]}
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return refuse_unknown_fields(schema)


def refuse_unknown_fields(schema: Schema) -> Schema:
    """Return a structural schema of Kubernetes as the JSON schema of what a file may say.

    A field that has a default need not be there, `x-kubernetes-int-or-string` is a type, and objects have the fields
    that are named.
    """
    closed = dict(schema)
    properties = {name: refuse_unknown_fields(part) for name, part in schema.get("properties", {}).items()}
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            closed[keyword] = refuse_unknown_fields(schema[keyword])
    if schema.get("x-kubernetes-int-or-string"):
        closed["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        closed["properties"] = properties
        closed["required"] = [name for name in schema.get("required", ()) if "default" not in properties[name]]
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed["additionalProperties"] = False
    if schema == {"type": "object"}:
        return METADATA
    return closed


def write_schemas(checkouts: list[str]) -> None:
    """Write `schemas/` from the checkouts of Trainer and JobSet, and from the skypilot that is installed."""
    schemas = {}
    for kind, (number, path) in FILES.items():
        definition = yaml.safe_load((Path(checkouts[number]) / path).read_text())["spec"]
        (version,) = definition["versions"]
        name = f"{definition['group']}/{version['name']}"
        schemas[kind.lower()] = {"apiVersion": name, **version["schema"]["openAPIV3Schema"]}
    from sky.utils import schemas as sky_schemas  # pyright: ignore[reportMissingImports]

    sky_schemas._allow_additional_properties = lambda: False  # as on its server, which refuses unknown fields
    schemas["task"] = sky_schemas.get_task_schema()
    schemas["resources"] = sky_schemas.get_resources_schema()
    for name, schema in schemas.items():
        text = json.dumps(trim(schema), indent=None, separators=(",", ":"), sort_keys=True)
        (SCHEMAS / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    write_schemas(sys.argv[1:])
