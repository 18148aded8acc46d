"""Advice: what the program's messages tell the user to do, and the tests that do it.

A message of the program gives advice where one of its sentences begins with a verb ("Use --lanes 1"). A test follows it
with a `Case` of a command line, or inside `advises`: it gets the refusal, and then does what the message says.
`missing_tests` reads both from the source files, so that no message can be added without a test.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import pytest

from paragan.core.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
VERBS = (
    "Add|Ask|Build|Call|Check|Choose|Close|Continue|Convert|Copy|Correct|Create|Declare|Delete|Drop|Export|Fix|Free|"
    "Give|Import|Install|Keep|Leave|Let|Lower|Make|Move|Name|Open|Pass|Point|Put|Raise|Read|Register|Remove|Rename|"
    "Repeat|Resize|Resume|Return|Run|Sample|Save|Say|Score|See|Set|Sort|Start|Take|Train|Try|Turn|Unset|Use|Wait|Write"
)
ADVICE = re.compile(rf"(?:^|[.:;,!?)] |\n)((?:{VERBS}) \S.*|did you mean .*)", re.DOTALL)


class Case(NamedTuple):
    """A command line, a part of the line that refuses it, and the changes that this line advises."""

    arguments: str
    advice: str
    follow: tuple[str, ...]


def change(arguments: list[str], follow: str) -> list[str]:
    """Return the arguments as this piece of advice changes them: `~word` removes those that begin with it."""
    words = shlex.split(follow)
    removed = tuple(word[1:] for word in words if word.startswith("~"))
    kept = [argument for argument in arguments if not argument.lstrip("-").startswith(removed or "~")]
    return [*kept, *(word for word in words if not word.startswith("~"))]


def case_id(case: Case) -> str:
    return case.arguments.replace(" ", ",") or "nothing"


def advises(advice: str, error: type[Exception] = UsageError) -> AbstractContextManager[object]:
    """Return a context in which `error` must be raised with this advice, which the test follows after it."""
    return pytest.raises(error, match=re.escape(advice))


# messages of the program ------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """A message with advice in the source: `{...}` stand for what is filled in."""

    location: str
    text: str

    @property
    def advice(self) -> str:
        match = ADVICE.search(self.text)
        assert match
        return match[1]


def messages_with_advice(folder: Path) -> list[Message]:
    """Return the messages with advice of the Python files in `folder`."""
    return [message for file in sorted(folder.rglob("*.py")) for message in _messages_of(file)]


def _messages_of(file: Path) -> Iterator[Message]:
    tree = ast.parse(file.read_text())
    passed_over: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            passed_over.add(node.value)
        if isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog"):
            passed_over.update(ast.walk(node.value))
        if isinstance(node, ast.JoinedStr):
            passed_over.update(part for part in ast.walk(node) if part is not node)
    for node in ast.walk(tree):
        if node in passed_over or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        text = _text(node)
        is_help = text.count("\n") > 1
        if ADVICE.search(text) and not is_help:
            yield Message(f"{file.relative_to(ROOT)}:{node.lineno}", text)


def _text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{...}" for part in node.values)


# tests that follow them -------------------------------------------------------------------------------------------


def followed_advice(folder: Path) -> list[str]:
    """Return the advice of all cases and of all calls of `advises` in the test files of `folder`."""
    followed = []
    for file in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                position = {"Case": 1, "advises": 0}.get(node.func.id)
                advice = node.args[position] if position is not None and len(node.args) > position else None
                if isinstance(advice, ast.Constant | ast.JoinedStr):
                    followed.append(_text(advice))
    return followed


def missing_tests(messages: list[Message], followed: list[str]) -> list[str]:
    """Return a line for every message whose advice is not in `followed`.

    Advice that could be that of several messages belongs to the one with which it shares most characters. Where it is
    equally near to several that differ, it belongs to none: the test must then name what was wrong, too.
    """
    covered: set[str] = set()
    for advice in followed:
        nearest = _nearest([message.text for message in messages], advice, lambda text: text)
        if not nearest:
            nearest = _nearest([message.text for message in messages], advice, lambda text: Message("", text).advice)
        if len(nearest) == 1:
            covered |= nearest
    return [f"{message.location}: {message.text}" for message in messages if message.text not in covered]


def _nearest(texts: list[str], advice: str, part: Callable[[str], str]) -> set[str]:
    lengths = {text: len(part(text).replace("{...}", "")) for text in texts if _has(advice, part(text))}
    return {text for text, length in lengths.items() if length == max(lengths.values())}


def _has(advice: str, part: str) -> bool:
    """Return whether `advice` contains the text of a message, in which Python names options as fields."""
    pieces, text, end = _pieces(part), _fields(advice), 0
    for piece in pieces:
        start = text.find(piece, end)
        if start < 0:
            return False
        end = start + len(piece)
    return True


@functools.cache
def _pieces(part: str) -> list[str]:
    """Return the text of a message between what is filled in."""
    return _fields(part).strip().removesuffix("{...}").split("{...}")


@functools.cache
def _fields(text: str) -> str:
    text = re.sub(r"(?<![\w-])--(?=[\w{])", "", text)
    return text.replace("=True", "=true").replace("=False", "=false")


def main(prefixes: list[str]) -> None:
    """Write the messages whose advice no test follows, of files whose paths begin with one of `prefixes`."""
    missing = missing_tests(messages_with_advice(ROOT / "paragan"), followed_advice(ROOT / "tests"))
    for line in missing:
        if line.startswith(tuple(prefixes or [""])):
            sys.stdout.write(line.replace("\n", "\\n") + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
