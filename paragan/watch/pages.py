"""The pages of `paragan watch`: one of each run in some folders, and one of all runs.

    GET /             all runs; if only one run is watched, a redirect to its page
    GET /runs/NAME/   the page that `paragan report` writes, with a line about what the run does now

A page is rendered again when files of its run have changed. All pages together take at most a twentieth of the time,
since a run may be trained on the same machine.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paragan.core.errors import UsageError
from paragan.core.folder_lock import lock_owner
from paragan.report.embedded_images import EmbeddedImage, latest_grid
from paragan.report.page import LiveBar, render_page, render_run, summarize_run
from paragan.report.run_data import RunData, read_run_data
from paragan.report.scores import ScoreSeries, group_scores
from paragan.watch.run_state import RunState, read_state

INTERVAL_S = 5.0  # between two requests of an open page
IDLE_PER_RENDERING = 19.0  # seconds in which a page is not checked again, for every second that it took
MAX_RUNS = 200  # on the page of all runs
MAX_GRIDS_CHARS = 4_000_000  # of the grids on this page
RUN_PATTERNS = ("*/run.yaml", "*/*/run.yaml")
LABEL_PATTERN = re.compile(r"(.+)/(labels/\d{4,}(?:\.\d+)?)")
WATCHED_FILES = (
    *("run.yaml", "*.jsonl", "bad_files.txt", "fakes*.png", "reals.png", "figures/*.json", "samples/*"),
    "model/config.json",
)
LABEL_FILES = ("queue", "labels", "labels/*/stats.jsonl", "labels/*/metrics.jsonl", "labels/*/fakes*.png")
READ_ERRORS = (UsageError, OSError, ValueError, ArithmeticError)  # of files that are damaged, or change meanwhile
MAX_UNUSED_S = 60.0  # a page that nobody has asked for in this time is forgotten


@dataclass(frozen=True)
class Page:
    """A page and its ETag, which changes whenever the page does."""

    html: bytes
    tag: str


@dataclass(frozen=True)
class RunCard:
    """A row of the page of all runs."""

    name: str
    address: str
    summary: dict[str, Any]
    state: RunState
    scores: list[ScoreSeries]
    findings: list[str]
    grid: tuple[int, EmbeddedImage] | None  # (kimg, image)


class LivePages:
    """The pages of all runs in some folders, by their paths in the address.

    folders : run folders, and folders with run folders in them
    """

    def __init__(self, folders: Sequence[Path]):
        self.folders = [folder.resolve() for folder in folders]
        self._watches_one_run = len(folders) == 1 and (self.folders[0] / "run.yaml").is_file()
        self._pages: dict[str, _CachedPage] = {}  # by path
        self._cards: dict[str, tuple[str, RunCard | None]] = {}  # name -> (stamp, card)
        self._lock = threading.Lock()

    @property
    def start(self) -> str:
        """The path of the first page."""
        return _address(self.folders[0].name) if self._watches_one_run else "/"

    def find_runs(self) -> dict[str, Path]:
        """Return the run folders by name, the newest first."""
        found: dict[str, Path] = {}
        for folder in self.folders:
            if (folder / "run.yaml").is_file():
                found[_unused_name(folder.name, folder, found)] = folder
                continue
            for pattern in RUN_PATTERNS:
                for file in folder.glob(pattern):
                    name = _unused_name(str(file.parent.relative_to(folder)), file.parent, found)
                    found[name] = file.parent
        newest = sorted(found, key=lambda name: _modification_time(found[name] / "run.yaml"), reverse=True)
        return {name: found[name] for name in newest}

    def get(self, path: str) -> Page | None:
        """Return a page by its path, such as "/runs/00000-digits/"; None if there is none.

        Raises:
            UsageError, OSError, ValueError: files of the run cannot be read.
        """
        with self._lock:  # one page at a time: training needs the processors more
            start = time.monotonic()
            self._forget_old_pages(start)
            cached = self._pages.get(path)
            if cached:
                cached.requested_at = start
                if start < cached.idle_until:
                    return cached.page
            page = self._make(path, cached.page if cached else None)
            if page is None:
                return None
            now = time.monotonic()
            self._pages[path] = _CachedPage(page, now)
            self._pages[path].idle_until = now + IDLE_PER_RENDERING * len(self._pages) * (now - start)
            return page

    def _forget_old_pages(self, now: float) -> None:
        for path in [path for path, page in self._pages.items() if now - page.requested_at > MAX_UNUSED_S]:
            del self._pages[path]

    def _make(self, path: str, current: Page | None) -> Page | None:
        """Render a page, unless the current one is up to date. None if there is no such page."""
        if path == "/":
            stamp = self._stamp_all()
            return current if current and current.tag == stamp else Page(self._render_all(stamp), stamp)
        folder = self._find_folder(path.removeprefix("/runs/").removesuffix("/"))
        if folder is None or not path.startswith("/runs/"):
            return None
        stamp = _stamp(folder)
        return current if current and current.tag == stamp else Page(self._render_one(folder, stamp), stamp)

    def _find_folder(self, name: str) -> Path | None:
        runs = self.find_runs()
        if name in runs:
            return runs[name]
        match = LABEL_PATTERN.fullmatch(name)
        if match and match[1] in runs and (runs[match[1]] / match[2] / "run.yaml").is_file():
            return runs[match[1]] / match[2]
        return None

    def _render_one(self, folder: Path, tag: str) -> bytes:
        run_data = read_run_data(folder)
        overview = "" if self._watches_one_run else "/"
        return render_run(run_data, "/", LiveBar(read_state(run_data).to_line(), tag, INTERVAL_S, overview))

    def _stamp_all(self) -> str:
        return _hash(f"{name} {_stamp_or_error(folder)}" for name, folder in self.find_runs().items())

    def _render_all(self, tag: str) -> bytes:
        runs = self.find_runs()
        shown = dict(list(runs.items())[:MAX_RUNS])
        max_grid_chars = MAX_GRIDS_CHARS // max(len(shown), 1)
        cards = [self._card(name, folder, max_grid_chars) for name, folder in shown.items()]
        training = sum(card.state.word == "training" for card in cards if card)
        state = f"{len(runs)} runs, {training} of them training" if len(runs) != 1 else "1 run"
        return render_page(
            "overview.html",
            cards=[card for card in cards if card],
            incomparable=_incomparable_scores([card for card in cards if card]),
            unreadable=[(name, _address(name)) for name, card in zip(shown, cards) if not card],
            folders=[str(folder) for folder in self.folders],
            num_omitted=len(runs) - len(shown),
            live=LiveBar(state, tag, INTERVAL_S),
        )

    def _card(self, name: str, folder: Path, max_grid_chars: int) -> RunCard | None:
        """Return the card of a run, from memory if no file has changed; None if the run cannot be read."""
        stamp = _stamp_or_error(folder)
        if self._cards.get(name, ("", None))[0] != stamp:
            try:
                card = _make_card(name, read_run_data(folder), max_grid_chars)
            except READ_ERRORS:
                card = None  # a file is half written or was just removed, or it is the run of another version
            self._cards[name] = (stamp, card)
        return self._cards[name][1]


@dataclass
class _CachedPage:
    """A page, when it was last asked for, and until when it is not checked again (time.monotonic())."""

    page: Page
    requested_at: float
    idle_until: float = 0.0


def _make_card(name: str, run_data: RunData, max_grid_chars: int) -> RunCard:
    scores = [one for one in group_scores(run_data.scores) if one.is_current]
    findings = [f"{event.kind} at {event.kimg:g} kimg" for event in run_data.events]
    return RunCard(
        name=name,
        address=_address(name),
        summary=summarize_run(run_data),
        state=read_state(run_data),
        scores=scores[:3],
        findings=findings[-3:],
        grid=latest_grid(run_data.path, max_grid_chars),
    )


def _incomparable_scores(cards: Sequence[RunCard]) -> set[tuple[str, str]]:
    """Return (run, score) where data or protocol differ from those of the first run with a score of this name."""
    first: dict[str, ScoreSeries] = {}
    return {
        (card.name, one.name)
        for card in cards
        for one in card.scores
        if one.incomparable_with(first.setdefault(one.name, one))
    }


def _stamp(folder: Path) -> str:
    """Return a text that changes whenever a file on the page of a run does, or whoever trains it."""
    return _hash([lock_owner(folder), *_file_stamps(folder)])


def _stamp_or_error(folder: Path) -> str:
    try:
        return _stamp(folder)
    except OSError as error:
        return str(error)


def _file_stamps(folder: Path) -> Iterator[str]:
    has_labels = (folder / "labels").is_dir()
    if has_labels:
        yield f"minute {time.time() // 60:.0f}"  # a worker that died changes no file
    for pattern in (*WATCHED_FILES, *(LABEL_FILES if has_labels else ())):
        for path in sorted(folder.glob(pattern)):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue  # it was replaced in this moment
            yield f"{path.name} {stat.st_size} {stat.st_mtime_ns}"


def _modification_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # the run was removed in this moment
        return 0.0


def _hash(texts: Iterator[str] | Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode(errors="surrogateescape")).hexdigest()[:24]


def _address(name: str) -> str:
    return f"/runs/{quote(os.fsencode(name))}/"


def _unused_name(name: str, folder: Path, used: dict[str, Path]) -> str:
    """Return the name, or if another folder has it already, the whole path."""
    return str(folder).lstrip("/") if name in used and used[name] != folder else name
