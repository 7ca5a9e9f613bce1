"""What rank 0 shows: a bar (or plain lines, where stdout is not a terminal) while a run goes on, and a table at its end."""

import time
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

PLAIN_LINE_EVERY_S = 5.0


class ProgressLine:
    """Loss, updates per second and remaining time of a run that goes from `done` to `total` updates."""

    def __init__(self, done: int, total: int):
        self._first, self._total = done, total
        self._started = self._shown = time.monotonic()
        self._held_out = None
        self._bar = None
        console = Console()
        if console.is_terminal:
            self._bar = Progress(BarColumn(), TextColumn("{task.description}"), console=console)
            self._task = self._bar.add_task("starting", completed=done, total=total)
            self._bar.start()

    def show(self, update: int, loss: float, updates_per_s: float, held_out_loss: float | None) -> None:
        """Report update number `update` (1-based)."""
        self._held_out = held_out_loss if held_out_loss is not None else self._held_out
        now = time.monotonic()
        if self._bar is None and update != self._total and now - self._shown < PLAIN_LINE_EVERY_S:
            return
        self._shown = now
        left_s = (now - self._started) / (update - self._first) * (self._total - update)
        held_out = "" if self._held_out is None else f"  held out {self._held_out:.4f}"
        left = timedelta(seconds=round(left_s))
        line = f"update {update}/{self._total}  loss {loss:.4f}{held_out}  {updates_per_s:.1f} updates/s  left {left}"
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.update(self._task, completed=update, description=line)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_table(summary: dict) -> None:
    """The end of a run in one table; `summary` is what summary.json holds."""
    table = Table(title=f"{summary['name']}: {summary['updates']} updates of {summary['optimizer']}", show_header=False)
    table.add_row("loss, first and last 10 updates", f"{summary['first_loss']:.4f} -> {summary['last_loss']:.4f}")
    table.add_row("held-out loss", f"{summary['held_out_loss']:.4f}")
    table.add_row("updates per second", f"{summary['updates_per_s']:.1f}")
    table.add_row("staleness per stage (microbatches)", " ".join(map(str, summary["staleness_microbatches"])))
    Console().print(table)
    print(f"picture: {summary['picture']}", flush=True)  # outside the table, which would break a long path in two
