"""Find the pages of this package, and fill their statements with the figures of the results."""

from __future__ import annotations

import pkgutil
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from string import Formatter
from typing import Any

from benchmarks.lib.document import ROOT, Document
from benchmarks.results_table import read_result

MEASUREMENTS = (  # documents in which every number has its result or a reason
    "README.md",
    *sorted(f"docs/measurements/{path.name}" for path in (ROOT / "docs/measurements").glob("[!R]*.md")),
)
OTHER_DOCUMENTS = tuple(sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

# Numbers that are no results: what a pattern matches, and why it is none.
COUNTED = (
    "ranks?|hosts?|workers?|seeds?|images|fakes|labels|steps|rounds|bytes|channels|kimg|px|threads|cores|parameters"
    "|home computers|configurations|directions|times at random"
)
SETTINGS = {
    r"torch 2\.\d+": "a version",
    r"20\d\d-\d\d-\d\d": "a date",
    r"CIFAR-10\b": "a name",
    r"\b1e-4\b": "a learning rate",
    rf"\b[\d,.]+[Mk]?(?:(?:,| to|, and| and) [\d,.]+)* (?:{COUNTED})\b": "a size of the run",
    r"\bseeds? \d+(?:(?:,| and) \d+)*": "seeds",
    r"\b(?:batch|width|w =) [\d.]+": "a setting of the run",
    r"\b[\d.]+ [MGk]bit/s": "a rate of an emulated link",
    r"\b[\d.]+(?: to [\d.]+)? ms(?: one way|,? one of them with)": "a latency of an emulated link",
    r"95 % interval": "a confidence interval",
}

Statement = tuple[Any, ...]  # a text with `{}`, and the figures in it
Statements = Callable[..., Iterator[Statement]]


@dataclass(frozen=True)
class Source:
    """The statements of one document about some results, and the function that yields them."""

    results: tuple[str, ...]
    statements: Statements

    def sentences(self) -> list[str]:
        """Return the statements with the figures of the results in them."""
        statements = self.statements(*(read_result(name) for name in self.results))
        return [fill_in(text, figures) for text, *figures in statements]


@dataclass(frozen=True)
class Page:
    """A document: what it states of results, and sentences whose numbers follow from none, each with its reason."""

    path: str
    not_measured: Mapping[str, str] = field(default_factory=dict[str, str])
    sources: list[Source] = field(default_factory=list[Source])

    def states(self, *results: str) -> Callable[[Statements], Statements]:
        """Register a function that yields what the document states of these results (names in benchmarks/results/)."""

        def register(function: Statements) -> Statements:
            self.sources.append(Source(results, function))
            return function

        return register

    def read(self) -> Document:
        return Document.read(self.path)

    def sentences(self) -> list[str]:
        return [sentence for source in self.sources for sentence in source.sentences()]

    def find_uncovered(self, document: Document) -> list[str]:
        """Return the numbers of the document that are neither stated nor have a reason."""
        return document.find_uncovered([*self.sentences(), *self.not_measured], SETTINGS)


def load_pages() -> dict[str, Page]:
    """Return all documents by path, with what the modules of this package say of them."""
    names = [name for _, name, _ in pkgutil.iter_modules([str(Path(__file__).parent)]) if not name.startswith("_")]
    modules = [import_module(f"{__package__}.{name}") for name in names]
    pages = _by_path(page for module in modules for page in vars(module).values() if isinstance(page, Page))
    return {path: Page(path) for path in (*MEASUREMENTS, *OTHER_DOCUMENTS)} | pages


def _by_path(pages: Iterable[Page]) -> dict[str, Page]:
    by_path: dict[str, Page] = {}
    for page in pages:
        if by_path.setdefault(page.path, page) is not page:
            raise ValueError(f"{page.path} is the page of two modules")
    return by_path


def fill_in(text: str, figures: Sequence[Any]) -> str:
    """Return the text with the figures in its places.

    Raises:
        ValueError: there are not as many figures as places, or none.
    """
    places = sum(name is not None for _, name, _, _ in Formatter().parse(text))
    if places != len(figures) or not figures:
        raise ValueError(f"{len(figures)} figures for {places} places in {text!r}")
    return text.format(*figures)


# What several pages need ----------------------------------------------------------------------------------------------


def significant(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of two contestants within a round."""
    return statistics.median(a / b for a, b in zip(above, below))


def speeds(measured: Any) -> tuple[float, float, float]:
    """Return a spread as median, low, high."""
    return measured["median"], *measured["ci95"]


def laboratory(result: Any, name: str) -> list[Any]:
    return result["laboratories"][name]["rows"]


def by_case(result: Any, key: str) -> dict[str, Any]:
    """Return this value of the rows of a result by their case; of a case with several seeds that of the first."""
    return {row["case"]: row[key] for row in reversed(result["rows"])}


def quality_row(label: str, scores: Any, to: Any = None, fd: str = ".3f") -> Statement:
    """Return a row of a table of quality: median [lowest, highest], in bold where worse than the worst seed of `to`."""
    text = f"| {label} |"
    figures: list[float] = []
    for metric, scale, spec in (("fd", 1, fd), ("recognised", 100, ".1f"), ("diversity", 100, ".1f")):
        low, middle, high = (scale * value for value in scores[metric])
        bounds = to[metric] if to else (-float("inf"), None, float("inf"))
        worse = middle > scale * bounds[2] if metric == "fd" else middle < scale * bounds[0]
        bold = "**" * worse
        percent = " %" * (metric != "fd")
        text += f" {bold}{{:{spec}}}{percent}{bold} [{{:{spec}}}, {{:{spec}}}] |"
        figures += [middle, low, high]
    return text, *figures
