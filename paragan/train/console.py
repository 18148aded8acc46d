"""What a person sees while a run goes on."""

from __future__ import annotations

import math
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

PLAIN_EVERY_S = 10.0
MANY = 1e5  # a loss beyond is written by its power of ten


class Screen:
    """A live line on a terminal; a line every ten seconds elsewhere; nothing on ranks that do not speak."""

    def __init__(self, speaks: bool = True, console: Console | None = None):
        self.console = console or Console(quiet=not speaks, highlight=False, soft_wrap=True)
        self.about = ""  # what else there is to say in every line
        self.left_s = math.inf  # that a budget of time leaves
        self._bar: Progress | None = None
        self._shown = 0.0
        self._duration = 0.0

    def speak(self, speaks: bool) -> None:
        """Whether this rank speaks, from here on."""
        if self.console.quiet == speaks:
            self.stop()
            self.console.quiet = not speaks

    def say(self, text: str = "") -> None:
        """A line that stays."""
        self.console.print(Text(text))

    def start(self, kimg: float, duration: float) -> None:
        self.stop()
        self._duration = duration
        if self.console.is_terminal and not self.console.quiet:
            self._bar = Progress(
                TextColumn("{task.completed:.1f}/{task.total:g} kimg"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self.console,
            )
            self._task = self._bar.add_task("", total=duration, shown="")
            self._bar.update(self._task, completed=kimg)
            self._bar.start()

    def tick(self, line: dict[str, float]) -> None:
        """Show a line of stats."""
        shown = describe(line) + (f"  {self.about}" if self.about else "")
        if self._bar:
            self._bar.update(self._task, completed=line["Progress/kimg"], shown=shown)
        elif time.monotonic() - self._shown >= PLAIN_EVERY_S:
            self._shown = time.monotonic()
            left = min(self.left_s, (self._duration - line["Progress/kimg"]) * line["Timing/sec_per_kimg"])
            self.say(f"{line['Progress/kimg']:.1f}/{self._duration:g} kimg  {shown}  {clock(left)} left")

    def count(self, number: int, of: int) -> None:
        """Show how many images were scored."""
        shown = f"scored {number:,} of {of:,}"
        if self._bar:
            self._bar.update(self._task, shown=shown)
        elif number and time.monotonic() - self._shown >= PLAIN_EVERY_S:
            self._shown = time.monotonic()
            self.say(shown)

    def stop(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None


def describe(line: dict[str, float]) -> str:
    rate = line["Timing/img_per_sec"]
    parts = [f"{rate:,.0f} img/s" if rate >= 10 else f"{rate:.2g} img/s"]
    losses = {name: line[key] for name, key in (("G", "Loss/G/loss"), ("D", "Loss/D/loss")) if key in line}
    parts += [f"{name} {loss:.3f}" if abs(loss) < MANY else f"{name} {loss:.3g}" for name, loss in losses.items()]
    scored = line.get("Timing/eval_s", 0.0)
    parts += [f"scores {scored:.3g} s"] if scored else []
    apart = [value for key, value in line.items() if key.startswith("Consensus/")]
    return "  ".join([*parts, *([f"ranks apart {max(apart):.2%}"] if apart else [])])


def clock(seconds: float) -> str:
    seconds = round(max(seconds, 0))
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours}:{minutes:02d}:{seconds % 60:02d}" if hours else f"{minutes}:{seconds % 60:02d}"
