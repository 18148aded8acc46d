"""Progress of a run on the terminal."""

from __future__ import annotations

import math
import os
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

IS_RANK_OF_OPEN_MPI = "OMPI_COMM_WORLD_SIZE" in os.environ  # has a terminal, whatever mpirun itself writes to
PLAIN_INTERVAL_S = 10.0
SCIENTIFIC_ABOVE = 1e5  # losses beyond are written as 1.23e+05


class RunConsole:
    """A live line on a terminal; a line every ten seconds elsewhere; nothing on disabled ranks.

    suffix          : further text of every progress line
    max_remaining_s : what a time budget leaves, a bound on the remaining time that is shown
    """

    def __init__(self, enabled: bool = True, console: Console | None = None):
        self.console = console or Console(
            quiet=not enabled, highlight=False, soft_wrap=True, force_terminal=False if IS_RANK_OF_OPEN_MPI else None
        )
        self.suffix = ""
        self.max_remaining_s = math.inf
        self._bar: Progress | None = None
        self._last_print_s = 0.0
        self._total_kimg = 0.0

    def set_enabled(self, enabled: bool) -> None:
        """Enable or disable output of this rank."""
        if self.console.quiet == enabled:
            self.stop()
            self.console.quiet = not enabled

    def print(self, text: str = "") -> None:
        """Print a line that stays."""
        self.console.print(Text(text))

    @property
    def _decimals(self) -> int:
        """Digits of kimg after the point."""
        return 1 if self._total_kimg >= 10 else 3

    def start(self, kimg: float, total_kimg: float) -> None:
        """Start showing progress."""
        self.stop()
        self._total_kimg = total_kimg
        if self.console.is_terminal and not self.console.quiet:
            self._bar = Progress(
                TextColumn(f"{{task.completed:.{self._decimals}f}}/{{task.total:g}} kimg"),
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
        text = format_stats(row)
        if self.suffix:
            text += f"  {self.suffix}"
        if self._bar:
            self._bar.update(self._task, completed=row["Progress/kimg"], shown=text)
        elif time.monotonic() - self._last_print_s >= PLAIN_INTERVAL_S:
            self._last_print_s = time.monotonic()
            remaining_s = (self._total_kimg - row["Progress/kimg"]) * row["Timing/sec_per_kimg"]
            remaining = format_duration(min(self.max_remaining_s, remaining_s))
            kimg = f"{row['Progress/kimg']:.{self._decimals}f}/{self._total_kimg:g} kimg"
            self.print(f"{kimg}  {text}  {remaining} left")

    def show_scoring_progress(self, num_scored: int, total: int) -> None:
        """Show how many images have been scored."""
        text = f"scored {num_scored:,} of {total:,}"
        if self._bar:
            self._bar.update(self._task, shown=text)
        elif num_scored and time.monotonic() - self._last_print_s >= PLAIN_INTERVAL_S:
            self._last_print_s = time.monotonic()
            self.print(text)

    def stop(self) -> None:
        """Stop showing progress."""
        if self._bar:
            self._bar.stop()
            self._bar = None


def format_stats(row: dict[str, float]) -> str:
    """Format the main values of a line of stats: 1,234 img/s  G 0.693  D 1.386."""
    rate = row["Timing/img_per_sec"]
    parts = [f"{rate:,.0f} img/s" if rate >= 10 else f"{rate:.2g} img/s"]
    for name, key in (("G", "Loss/G/loss"), ("D", "Loss/D/loss")):
        if key in row:
            parts.append(f"{name} {row[key]:.3f}" if abs(row[key]) < SCIENTIFIC_ABOVE else f"{name} {row[key]:.3g}")
    eval_s = row.get("Timing/eval_s", 0.0)
    if eval_s:
        parts.append(f"scores {eval_s:.3g} s")
    distances = [value for key, value in row.items() if key.startswith("Consensus/")]
    if distances:
        parts.append(f"ranks apart {max(distances):.2%}")
    return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03."""
    seconds = round(max(seconds, 0))
    hours, minutes = divmod(seconds // 60, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{seconds % 60:02d}"
    return f"{minutes}:{seconds % 60:02d}"
