"""The reference of the site, generated from the code: the Python API, commands, fields of a run, and recipes.

A public name without a docstring, and one that no page shows, is a warning, which fails the build.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

import paragan
from paragan.cli.main import build_parser
from paragan.config.run import Run
from paragan.core.field_docs import field_meanings
from paragan.core.schema import FieldInfo, list_fields
from paragan.recipes import RECIPES

HELP_COLUMNS = "100"

# page -> title, introduction, public names
API_PAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "training": (
        "Training",
        "Train two networks from Python. [Python API](../python_api.md) has examples.",
        (
            *("Estimator", "Config", "ScalingManager", "with_policy", "Run"),
            *("DataOptions", "DeviceOptions", "EvaluationOptions", "show_run"),
        ),
    ),
    "models": (
        "Models and scores",
        "Sample from a trained model, and score images. See [models](../models.md) and [scores](../scores.md).",
        ("load", "Model", "compare"),
    ),
    "own_loop": (
        "Your own loop",
        "Train any modules on many ranks in a loop of your own. See [your own loop](../replicas.md) and "
        "[DistributedDataParallel](../ddp.md).",
        (
            *("Replica", "join", "rng", "shard", "save", "AdaptiveWeight", "Balancer"),
            *("ddp_hook", "check_replicas", "ReplicasDiffer"),
        ),
    ),
    "objectives": (
        "Objectives",
        "Losses of G and D. See [objectives](../objectives.md) and [custom code](../custom_code.md).",
        ("Adversarial", "Reconstruction", "Batch", "DiscriminatorOutput", "Loss"),
    ),
    "optimizers": (
        "Optimizers",
        "How each player learns. See [optimizers](../optimizers.md).",
        ("PlayerOptim", "DiscriminatorOptim", "Adam", "SGD", "RMSprop", "ParamGroup"),
    ),
    "data": ("Data", "Data sets. See [data](../data.md).", ("load_data", "from_arrays", "Dataset")),
    "loggers": (
        "Loggers",
        "Send statistics, samples, scores and models elsewhere. See [loggers](../loggers.md).",
        ("Logger", "RunInfo"),
    ),
    "errors": (
        "Errors",
        "What calls raise. On the command line each is one line and an exit status.",
        ("UsageError", "RunError", "Interrupted"),
    ),
}

# group of fields -> the page that explains it
GROUP_PAGES = {
    "data": "data.md",
    "nets": "networks.md",
    "objective": "objectives.md",
    "g": "optimizers.md",
    "d": "optimizers.md",
    "strategy": "sync.md",
    "evaluation": "scores.md",
    "output": "run_folder.md",
    "health": "health.md",
    "on_divergence": "health.md",
    "device": "accelerators.md",
    "ramp": "batch_scaling.md",
}

logger = get_plugin_logger("reference_pages")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the reference."""
    pages = {name: "\n".join(format_api_page(*page)) for name, page in API_PAGES.items()}
    pages["commands"] = "\n".join(format_commands())
    pages["fields"] = "\n".join(format_fields())
    pages["recipes"] = "\n".join(format_recipes())
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    for problem in find_api_problems():
        logger.warning(problem)
    return files


# The Python API ---------------------------------------------------------------------------------------


def format_api_page(title: str, introduction: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of a page about these public names."""
    yield from (f"# {title}", "", introduction, "", "| name | |", "|---|---|")
    for name in names:
        summary = " ".join((inspect.getdoc(getattr(paragan, name)) or "").partition("\n\n")[0].split())
        yield f"| [`paragan.{name}`][paragan.{name}] | {_escape(summary)} |"
    for name in names:
        yield from ("", f"::: paragan.{name}")


def find_api_problems() -> Iterator[str]:
    """Yield a line for every public name that no page shows, and for every public object without a docstring."""
    shown = {name for _, _, names in API_PAGES.values() for name in names}
    for name in sorted(shown.symmetric_difference(paragan.__all__)):
        yield f"paragan.{name}: is exported or in API_PAGES, and not both"
    for name in sorted(paragan.__all__):
        for path in find_undocumented(getattr(paragan, name), f"paragan.{name}"):
            yield f"{path}: has no docstring"


def find_undocumented(value: Any, path: str) -> Iterator[str]:
    """Yield the path of a public object without a docstring: the value, its fields, methods and properties."""
    if not value.__doc__:
        yield path
    if not inspect.isclass(value):
        return
    if dataclasses.is_dataclass(value):
        meanings = field_meanings(value)
        names = [field.name for field in dataclasses.fields(value) if not field.name.startswith("_")]
        yield from (f"{path}.{name}" for name in names if name not in meanings and name != "name")
    for name, member in vars(value).items():
        function = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
        if inspect.isfunction(function) and not name.startswith("_") and not function.__doc__:
            yield f"{path}.{name}"


# The command line -------------------------------------------------------------------------------------


def format_commands() -> Iterator[str]:
    """Yield the lines of the page about all commands: what `--help` prints."""
    yield from ("# Commands", "", "What `paragan COMMAND --help` prints.")
    with mock.patch.dict(os.environ, {"COLUMNS": HELP_COLUMNS}):
        for command, parser in list_commands("paragan", build_parser()):
            yield from ("", f"## {command}", "", "```text", parser.format_help().rstrip(), "```")


def list_commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield name and parser of a command, and of all commands below it."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, below in action.choices.items():
                yield from list_commands(f"{name} {command}", below)


def format_recipes() -> Iterator[str]:
    """Yield the lines of the page about the named recipes."""
    yield from ("# Recipes", "", "`paragan train RECIPE`; `-n` shows a recipe with all its fields.", "")
    yield from ("| recipe | |", "|---|---|")
    for name, recipe in RECIPES.items():
        yield f"| `{name}` | {_escape((recipe.__doc__ or '').splitlines()[0])} |"


# Fields of a run --------------------------------------------------------------------------------------


def format_fields() -> Iterator[str]:
    """Yield the lines of the page about every field of a run: a table for each group."""
    groups: dict[str, list[FieldInfo]] = defaultdict(list)
    for field in list_fields(Run, skip_repeats=True):
        groups[field.name.partition(".")[0]].append(field)
    single = [fields[0] for fields in groups.values() if len(fields) == 1]
    yield from ("# Fields of a run", "", "Any can be set: `paragan train RECIPE --nets.width=64`, or in a `run.yaml`.")
    yield "In brackets: the choice that has the field. `g.optimizer` and `d.optimizer` can also be any optimizer of "
    yield "the pytorch-optimizer library, with its arguments as fields."
    yield from ("", "## The run", "", *_format_table(single))
    for group, fields in groups.items():
        if len(fields) > 1:
            page = GROUP_PAGES.get(group)
            link = (f"See [{page}](../{page}).", "") if page else ()
            yield from ("", f"## {group}", "", *link, *_format_table(fields))


def _format_table(fields: list[FieldInfo]) -> Iterator[str]:
    yield from ("| field | meaning, values, default |", "|---|---|")
    for field in fields:
        default = f"; default `{_escape_bar(field.default)}`" if field.default else ""
        yield f"| `{field.name}` | {_escape(field.meaning)}<br>*{_escape(field.values)}*{default} |"


def _escape(text: str) -> str:
    """Return the text for a cell of a table."""
    return _escape_bar(text).replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[")


def _escape_bar(text: str) -> str:
    return text.replace("|", "\\|")
