"""A document with figures: what it states, and which of its numbers nothing accounts for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e-\d+)?")
CODE = r"```[^`]*```|`[^`]*`|^    .*$"
LINKS = r"!?\[[^]\n]*\]\([^)]*\)"
HEADS = r"^#.*$|^\|.*(?=\n\|[-|: ]+\|$)"  # of sections, and of tables
NOT_PROSE = re.compile(f"{CODE}|{LINKS}|{HEADS}", re.MULTILINE)

LOOKS_MEASURED = re.compile(
    r"[\d.]+ times (?:as (?:fast|slow|long)|faster|slower)|\bfd(?:_pixels)?(?: of)? \d[\d.]*|\btook [\d.]+"
    r"|[\d.]+ s of one core|[\d.]+ % in \w+ measurements|\bwas(?: within)? [\d.]+(?: to [\d.]+)? %|[\d.]+ s on two idle"
)


@dataclass(frozen=True)
class Document:
    """The text of a document. README.md stands for its section "Measured"."""

    source: str

    @staticmethod
    def read(page: str) -> Document:
        text = (ROOT / page).read_text("utf-8")
        if page == "README.md":
            text = text.partition("## Measured")[2].partition("\n## ")[0]
        return Document(text)

    @property
    def text(self) -> str:
        return _join_lines(self.source)

    @property
    def prose(self) -> str:
        """The text, the digits of code, links and headings replaced by as many x."""
        return _join_lines(NOT_PROSE.sub(lambda match: _mask(match[0]), self.source))

    def find_missing(self, sentences: Iterable[str]) -> list[str]:
        """Return the sentences that the text does not hold, each with what it says instead where that is clear."""
        missing = []
        for sentence in sentences:
            if sentence not in self.text:
                pattern = re.escape(NUMBER.sub("__", sentence)).replace("__", NUMBER.pattern)
                similar = re.search(pattern, self.text)
                missing.append(f"{sentence}\n  not {similar[0]}" if similar else sentence)
        return missing

    def find_uncovered(self, sentences: Iterable[str], patterns: Iterable[str] = ()) -> list[str]:
        """Return the numbers that stand in none of the sentences and match no pattern, with the words around them."""
        prose = self.prose
        return [
            f"{prose[max(0, match.start() - 40) : match.start()]}[{match[0]}]{prose[match.end() :][:30]}"
            for match in self._uncovered(NUMBER, sentences, patterns)
        ]

    def find_measurements(self, sentences: Iterable[str]) -> list[str]:
        """Return what looks measured and stands in none of the sentences."""
        return [match[0] for match in self._uncovered(LOOKS_MEASURED, sentences)]

    def _uncovered(
        self, wanted: re.Pattern[str], sentences: Iterable[str], patterns: Iterable[str] = ()
    ) -> list[re.Match[str]]:
        text, prose = self.text, self.prose
        matches = [match for sentence in sentences for match in re.finditer(re.escape(sentence), text)]
        matches += [match for pattern in patterns for match in re.finditer(pattern, prose)]
        covered = {position for match in matches for position in range(*match.span())}
        return [match for match in wanted.finditer(prose) if not covered.issuperset(range(*match.span()))]


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def _mask(text: str) -> str:
    return re.sub(r"\d", "x", text)
