"""What a person sees while a run goes on."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

PLAIN_INTERVAL_S = 10.0
SCIENTIFIC_ABOVE = 1e5  # a loss beyond is written by its power of ten


class RunConsole:
    """A live line on a terminal; a line every ten seconds elsewhere; nothing on ranks that do not speak."""

    def __init__(self, enabled: bool = True, console: Console | None = None):
        self.console = console or Console(quiet=not enabled, highlight=False, soft_wrap=True)
        self.suffix = ""  # what else there is to say in every line
        self.max_remaining_s = math.inf  # that a budget of time leaves
        self._bar: Progress | None = None
        self._last_shown_s = 0.0
        self._total_kimg = 0.0

    def set_enabled(self, enabled: bool) -> None:
        """Whether this rank speaks, from here on."""
        if self.console.quiet == enabled:
            self.stop()
            self.console.quiet = not enabled

    def print(self, text: str = "") -> None:
        """A line that stays."""
        self.console.print(Text(text))

    def start(self, kimg: float, total_kimg: float) -> None:
        self.stop()
        self._total_kimg = total_kimg
        if self.console.is_terminal and not self.console.quiet:
            self._bar = Progress(
                TextColumn("{task.completed:.1f}/{task.total:g} kimg"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self.console,
            )
            self._task = self._bar.add_task("", total=total_kimg, shown="")
            self._bar.update(self._task, completed=kimg)
            self._bar.start()

    def show_stats(self, row: dict[str, float]) -> None:
        """Show a line of stats."""
        shown = format_stats(row) + (f"  {self.suffix}" if self.suffix else "")
        if self._bar:
            self._bar.update(self._task, completed=row["Progress/kimg"], shown=shown)
        elif time.monotonic() - self._last_shown_s >= PLAIN_INTERVAL_S:
            self._last_shown_s = time.monotonic()
            left = min(self.max_remaining_s, (self._total_kimg - row["Progress/kimg"]) * row["Timing/sec_per_kimg"])
            self.print(f"{row['Progress/kimg']:.1f}/{self._total_kimg:g} kimg  {shown}  {format_duration(left)} left")

    def show_scoring_progress(self, num_scored: int, total: int) -> None:
        """Show how many images were scored."""
        shown = f"scored {num_scored:,} of {total:,}"
        if self._bar:
            self._bar.update(self._task, shown=shown)
        elif num_scored and time.monotonic() - self._last_shown_s >= PLAIN_INTERVAL_S:
            self._last_shown_s = time.monotonic()
            self.print(shown)

    def stop(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None


def format_stats(row: dict[str, float]) -> str:
    rate = row["Timing/img_per_sec"]
    parts = [f"{rate:,.0f} img/s" if rate >= 10 else f"{rate:.2g} img/s"]
    losses = {name: row[key] for name, key in (("G", "Loss/G/loss"), ("D", "Loss/D/loss")) if key in row}
    parts += [
        f"{name} {loss:.3f}" if abs(loss) < SCIENTIFIC_ABOVE else f"{name} {loss:.3g}" for name, loss in losses.items()
    ]
    scored = row.get("Timing/eval_s", 0.0)
    parts += [f"scores {scored:.3g} s"] if scored else []
    apart = [value for key, value in row.items() if key.startswith("Consensus/")]
    return "  ".join([*parts, *([f"ranks apart {max(apart):.2%}"] if apart else [])])


def format_duration(seconds: float) -> str:
    seconds = round(max(seconds, 0))
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"
