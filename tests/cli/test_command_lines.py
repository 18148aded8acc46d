"""Every `paragan ...` command line of the documents, the examples and the help texts parses.

A line is taken apart as a shell would do it, given to the parser of the program, and what it leaves over is checked
against the fields of a run: `--nets.width=64` names a field, `--metrics` of `paragan sample` does not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from paragan.cli.common import parse_settings
from paragan.cli.main import build_parser
from paragan.cli.train import resolve_run
from paragan.config.run import Run
from paragan.core.errors import UsageError
from paragan.core.schema import list_fields
from paragan.recipes import RECIPES

# Commands that take fields of the run beside their own options.
FIELD_COMMANDS = {"train", "merge", "plan", "bench step"}

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

LAUNCHERS = r"python3?|torchrun|srun|sbatch|mpirun|podman run|docker run|nohup|time|env"
STARTS = re.compile(rf"(?:\w+=\S* +)*(?:(?:{LAUNCHERS}) .*)?(?:\S*/)?paragan(?= |$)")
PLACEHOLDER = re.compile(r"[A-Za-z]|[A-Z][A-Z0-9_]*")  # N, K, RUN_DIR, HOST0: where a reader puts a value
# Options of other programs that the documents name, and documents about other programs.
FOREIGN_OPTIONS = {"--G_shared"}
SLURM_OPTIONS = {"--no-kill", "--kill-on-bad-exit", "--signal", "--requeue", "--gpus-per-task"}
FOREIGN_DOCUMENTS = {"docs/coming_from.md"}

GROUPS_OF_ANY = ("g.optimizer.", "d.optimizer.")  # have the fields of pytorch-optimizer's classes too


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """One command line, and where it is written."""

    where: str  # file:line, or the command whose help has it
    text: str
    mention: bool  # names a command in a sentence, and may leave out arguments

    def __str__(self) -> str:
        return f"{self.where} {self.text}"


# Command lines in texts -------------------------------------------------------------------------------


def commands_in_markdown(text: str, name: str) -> Iterator[CommandLine]:
    """Yield the command lines of a Markdown file: of code blocks, fenced or indented, and of code spans."""
    lines = text.splitlines()
    prose: list[str] = []
    fenced = False
    block: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            prose.append("")
        elif fenced or line.startswith("    "):
            block.append((number, line))
            prose.append("" if fenced else line)
        else:
            prose.append(line)
    yield from commands_in_block(block, name)
    yield from commands_in_spans("\n".join(prose), name)


def commands_in_block(lines: list[tuple[int, str]], name: str) -> Iterator[CommandLine]:
    """Yield the lines that are commands, with those that a backslash continues. lines: (number, text)."""
    waiting = ""
    first = 0
    for number, line in lines:
        if not waiting:
            first = number
        text = re.sub(r"^\s*(?:#\s*)?(?:\$ )?", "", line) if not waiting else line.strip()
        if text.rstrip().endswith("\\"):
            waiting += text.rstrip()[:-1].rstrip() + " "
            continue
        text, waiting = waiting + text, ""
        for command in _commands_of(text):
            yield CommandLine(f"{name}:{first}", command, mention=False)
        for span in re.findall(r"`([^`]+)`", text):
            for command in _commands_of(span):
                yield CommandLine(f"{name}:{first}", command, mention=True)


def commands_in_spans(text: str, name: str) -> Iterator[CommandLine]:
    """Yield the commands between backquotes, where a span may go on in the next line."""
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        for command in _commands_of(" ".join(match[1].split())):
            yield CommandLine(f"{name}:{text[: match.start()].count(chr(10)) + 1}", command, mention=True)


def _commands_of(line: str) -> Iterator[str]:
    """Yield the commands of one line of a shell, without comments."""
    line = re.split(r"\s#(?:\s|$)", line)[0].strip()
    for part in re.split(r"\s(?:&&|\|\||[|;])(?:\s|$)", line):
        command = re.split(r"\s{2,}", part.strip())[0]  # help texts put two blanks before what a line is for
        if STARTS.match(command):
            yield command


def arguments_of(command: str) -> list[str]:
    """Return the words after `paragan`.

    Placeholders stay, `[--out F]` becomes its content, and `...` is a value after an option and nothing elsewhere.
    """
    command = re.sub(r"(?<!\S)\[([^\]]+)\](?!\S)", r"\1", command)
    words = shlex.split(command)
    start = next(i for i, word in enumerate(words) if word == "paragan" or word.endswith("/paragan"))
    if words[0] in ("podman", "docker"):  # the first is the image
        start = max(i for i, word in enumerate(words) if word == "paragan")
    words = words[start + 1 :]
    redirect = next((i for i, word in enumerate(words) if word in (">", ">>", "2>", "<", "&")), len(words))
    result: list[str] = []
    for word in words[:redirect]:
        if word not in ("...", "…"):
            result.append(word)
        elif result and result[-1].startswith("--"):
            result.append("X")
    return result


# The program ------------------------------------------------------------------------------------------


parser = functools.cache(build_parser)


@functools.cache
def field_names() -> frozenset[str]:
    """Return every dotted field of a run, of every network, optimizer and strategy."""
    return frozenset(field.name for field in list_fields(Run))


@functools.cache
def field_groups() -> frozenset[str]:
    """Return the groups that the fields stand in: of `g.optimizer.lr` these are `g` and `g.optimizer`."""
    parts = [name.split(".") for name in field_names()]
    return frozenset(".".join(path[:length]) for path in parts for length in range(1, len(path)))


def subcommands(of: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands below `of`, by name."""
    actions = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


def all_parsers(name: str, of: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield (name, parser) of the program and of every command below it."""
    yield name, of
    for command, below in subcommands(of).items():
        yield from all_parsers(f"{name} {command}", below)


def command_of(words: list[str]) -> tuple[str, argparse.ArgumentParser]:
    """Return the name of the command that the words call, such as `bench step`, and its parser."""
    current = parser()
    path: list[str] = []
    for word in words:
        below = subcommands(current)
        if word not in below:
            break
        path.append(word)
        current = below[word]
    return " ".join(path), current


def with_values(words: list[str], command: argparse.ArgumentParser) -> list[str]:
    """Put a number where an option that takes a number has a placeholder: `--ranks N`."""
    numeric = {name for a in command._actions if a.type in (int, float) for name in a.option_strings}
    words = list(words)
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if equals and name in numeric and PLACEHOLDER.fullmatch(value):
            words[i] = f"{name}=1"
        elif word in numeric and i + 1 < len(words) and PLACEHOLDER.fullmatch(words[i + 1]):
            words[i + 1] = "1"
    return words


def parse(line: CommandLine) -> tuple[argparse.Namespace | None, list[str], str]:
    """Parse a command line: the options, what is left over, and the command.

    The options are None where the line asks for help, or is a mention that leaves required arguments or values out.

    Raises:
        AssertionError: the parser refuses the line.
    """
    words = arguments_of(line.text)
    command, below = command_of(words)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            options, rest = parser().parse_known_args(with_values(words, below))
    except SystemExit as end:
        if end.code != 0:
            raise AssertionError(f"{line}: exits with {end.code}") from end
        return None, [], command
    except UsageError as error:
        incomplete = re.search(r"(are|is) required|expected one argument", str(error))
        if incomplete and (line.mention or "..." in line.text):
            return None, [], command
        raise AssertionError(f"{line}: {error}") from error
    return options, rest, command


def unknown_fields(settings: list[tuple[str, str]]) -> list[str]:
    """Return the fields that no run has. Parts given as `module:Class` may have any fields."""
    of_user = tuple(f"{name}." for name, value in settings if ":" in value)
    return [name for name, _ in settings if not name.startswith(of_user) and not is_field(name)]


def is_field(name: str) -> bool:
    """Return whether a run may have this dotted field or group of fields."""
    return name in field_names() or name in field_groups() or name.startswith(GROUPS_OF_ANY)


@functools.cache
def known_options() -> frozenset[str]:
    """Return the options of every command, and those of the benchmarks and examples."""
    options = {
        name for _, command in all_parsers("paragan", parser()) for a in command._actions for name in a.option_strings
    }
    for folder in ("benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            options.update(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", path.read_text("utf-8")))
    return frozenset(options) | FOREIGN_OPTIONS | SLURM_OPTIONS


# What is tested ---------------------------------------------------------------------------------------


def documented_lines() -> list[CommandLine]:
    """Return the command lines of README, documents, examples and container files."""
    lines: list[CommandLine] = []
    for path in DOCUMENTS:
        lines += commands_in_markdown(path.read_text("utf-8"), path.relative_to(ROOT).as_posix())
    examples = [path for path in sorted((ROOT / "examples").rglob("*")) if path.suffix in (".py", ".yaml", ".sh")]
    for path in examples:
        text = path.read_text("utf-8")
        lines += commands_in_block(list(enumerate(text.splitlines(), 1)), path.relative_to(ROOT).as_posix())
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        for number, cell in enumerate(nbformat.read(path, 4).cells, 1):
            shell = [(number, line.removeprefix("!")) for line in cell.source.splitlines() if line.startswith("!")]
            lines += commands_in_block(shell, f"{path.relative_to(ROOT).as_posix()}, cell")
    for name in ("Containerfile", "Makefile"):
        numbered = enumerate((ROOT / name).read_text("utf-8").splitlines(), 1)
        indented = [(number, line) for number, line in numbered if re.match(r"#?(?:  |\t)", line)]  # the rest is prose
        lines += commands_in_block(indented, name)
    return list(dict.fromkeys(lines))


def help_lines() -> list[CommandLine]:
    """Return the command lines in descriptions, epilogs and helps of options."""
    lines: list[CommandLine] = []
    for name, command in all_parsers("paragan", parser()):
        texts = [command.description, command.epilog, *(action.help for action in command._actions)]
        for text in filter(None, texts):
            if text != argparse.SUPPRESS:
                lines += commands_in_block(list(enumerate(text.splitlines(), 1)), f"`{name} --help`")
                lines += commands_in_spans(text, f"`{name} --help`")
    return list(dict.fromkeys(lines))


LINES = [*documented_lines(), *help_lines()]
each_line = pytest.mark.parametrize("line", LINES, ids=str)


def test_documents_and_helps_have_lines():
    assert len(documented_lines()) > 50
    assert len(help_lines()) > 20


def check_line(line: CommandLine) -> None:
    """Parse a line and check its fields.

    Raises:
        AssertionError: the parser refuses it, or it sets a field that no run has.
    """
    options, rest, command = parse(line)
    if options is None:
        return
    if command not in FIELD_COMMANDS:
        assert not rest, f"{line}: `paragan {command}` has no {rest[0]}"
        return
    unknown = unknown_fields(parse_settings(rest))
    assert not unknown, f"{line}: there is no field {', '.join(unknown)}"
    recipe = getattr(options, "recipe", None) or "RECIPE"
    is_name = re.fullmatch(r"[a-z][a-z0-9-]*", recipe) and not PLACEHOLDER.fullmatch(recipe)
    assert not is_name or recipe in RECIPES, f"{line}: there is no recipe {recipe}"


@each_line
def test_line_parses(line: CommandLine):
    check_line(line)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_options_and_fields_in_sentences_exist(document: Path):
    """Code spans such as `--data.mirror`, `--ranks 2` and `strategy.wire`, where they stand without a command."""
    name = document.relative_to(ROOT).as_posix()
    if name in FOREIGN_DOCUMENTS:
        return
    text = document.read_text("utf-8")
    groups = {group.partition(".")[0] for group in field_groups()}
    missing: list[str] = []
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", text):
        where = f"{name}:{text[: match.start()].count(chr(10)) + 1}"
        options = re.findall(r"(?<!\S)--[A-Za-z_][\w.-]*", match[1]) if match[1].startswith("--") else []
        for option in options:
            if option not in known_options() and not is_field(option[2:].rstrip(".").replace("-", "_")):
                missing.append(f"{where}: there is no {option}")
        field = re.fullmatch(r"(\w+(?:\.\w+)+)(?:=.*)?", match[1])
        is_file = re.search(r"\.(?:py|md|yaml|jsonl?|npz|pt|h5|html|png|zip|c)$", match[1])
        if field and not is_file and field[1].partition(".")[0] in groups and not is_field(field[1]):
            missing.append(f"{where}: there is no field {field[1]}")
    assert not missing, "\n".join(missing)


def _is_resolvable(line: CommandLine) -> bool:
    """Return whether a line of `train` names a recipe and values, so that its run can be resolved without files."""
    words = arguments_of(line.text)
    if words[:1] != ["train"] or "..." in line.text or "…" in line.text:
        return False
    of_user = any(re.search(r"=\w+(?:\.\w+)*:[A-Z]", word) for word in words)
    files = any(word.startswith("-") and ("RUN" in word or "MODEL" in word) for word in words)
    return len(words) > 1 and bool(re.fullmatch(r"[a-z][a-z0-9-]*", words[1])) and not of_user and not files


@pytest.mark.parametrize("line", [line for line in LINES if _is_resolvable(line)], ids=str)
def test_line_of_train_resolves(line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The values are right too: strategies, policies and recipes have these names, fields take such values."""
    options, rest, _ = parse(line)
    assert options is not None
    monkeypatch.chdir(tmp_path)
    try:
        resolve_run(options, rest)
    except UsageError as error:
        pytest.fail(f"{line}: {error}", pytrace=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("paragan train digits  # a first GAN", ["train", "digits"]),
        ("paragan train digits          in about a minute", ["train", "digits"]),
        ("$ paragan data inspect photos --sheet a.png", ["data", "inspect", "photos", "--sheet", "a.png"]),
        ("paragan report A B ... [--out FILE.html]", ["report", "A", "B", "--out", "FILE.html"]),
        ("paragan train x --strategy.fake_lags=[4]", ["train", "x", "--strategy.fake_lags=[4]"]),
        ("torchrun --nproc-per-node 4 -m paragan train digits", ["train", "digits"]),
        ("RANK=0 WORLD_SIZE=4 paragan train digits", ["train", "digits"]),
        ("srun paragan train x --run-dir $SCRATCH/run", ["train", "x", "--run-dir", "$SCRATCH/run"]),
        ('paragan plan digits --links "200 Mbit/s, 10 ms"', ["plan", "digits", "--links", "200 Mbit/s, 10 ms"]),
        ("paragan eval R --metrics fd && echo done", ["eval", "R", "--metrics", "fd"]),
    ],
)
def test_words_of_a_line(text: str, words: list[str]):
    (line,) = commands_in_block([(1, f"    {text}")], "x")
    assert arguments_of(line.text) == words


def test_continued_line():
    lines = ["    paragan train digits \\", "        --ranks 2 \\", "        --kimg 3   # short"]
    (line,) = commands_in_block(list(enumerate(lines, 1)), "x")
    assert arguments_of(line.text) == ["train", "digits", "--ranks", "2", "--kimg", "3"]
    assert line.where == "x:1"


def test_span_over_two_lines():
    (line,) = commands_in_markdown("Made by `paragan report\nruns/a runs/b`.", "x")
    assert arguments_of(line.text) == ["report", "runs/a", "runs/b"]


@pytest.mark.parametrize(
    "text",
    [
        "paragan train digits --strategy.wire_=int8",
        "paragan train digits --nets.width 64 --no_such_field=1",
        "paragan sample RUN --no-such-option",
        "paragan no-such-command",
        "paragan data no-such-command x",
        "paragan sample RUN --count many",
        "paragan data convert photos/",
        "paragan train no-such-recipe",
    ],
)
def test_wrong_lines_fail(text: str):
    with pytest.raises(AssertionError):
        check_line(CommandLine("x:1", text, mention=False))
