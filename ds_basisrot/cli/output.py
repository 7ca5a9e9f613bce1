"""Where a subcommand's tables and its --json figures go, and how numbers are written in tables."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ds_basisrot.cli.errors import CommandError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PLAIN_WIDTH = 160
"""Columns of a table that does not go to a terminal."""


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """The option --json, for `console` and `write_json`."""
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE as JSON; - for stdout, the tables then go to stderr")


def console(json_target: str | None) -> "Console":
    """For tables: on stdout, unless the JSON goes there."""
    from rich.console import Console  # here: commands without tables need not wait for it

    to_stderr = json_target == "-"
    terminal = (sys.stderr if to_stderr else sys.stdout).isatty()
    return Console(stderr=to_stderr, highlight=False, width=None if terminal else PLAIN_WIDTH)


def table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> "Table":
    """An empty table with these columns, as narrow as can be."""
    from rich import box
    from rich.table import Table

    result = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for heading in texts:
        result.add_column(heading)
    for heading in numbers:
        result.add_column(heading, justify="right")
    return result


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar over `total` updates on a terminal; call what this yields after each, with what is going on.

    It is drawn between the updates, never by a thread of its own that would take time from them.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    errors = Console(stderr=True)
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} updates"), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=errors, auto_refresh=False, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda description: bar.update(task, advance=1, description=description, refresh=True)


def check_json_target(target: str | None) -> None:
    """Find out before the work whether `target` can be written; a file that is there keeps its content until then.

    Raises:
        CommandError: naming the option.
    """
    if target not in (None, "-"):
        _open(target, "a").close()


def write_json(target: str | None, figures: dict[str, Any]) -> None:
    """Write `figures` to the file `target`, to stdout for "-", to nowhere for None."""
    if target is None:
        return
    text = json.dumps(figures, indent=2)
    if target == "-":
        print(text, file=sys.stdout)
    else:
        with _open(target, "w") as file:
            file.write(text + "\n")


def _open(target: str, mode: str) -> IO[str]:
    try:
        return Path(target).open(mode, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json: cannot write {target}: {error.strerror}") from error


def amount(value: float, unit: str = "") -> str:
    """A number with three digits and a decimal prefix: 1234567 is "1.23 M", with the unit B "1.23 MB"."""
    for power, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * power:
            return f"{value / power:#.3g}".rstrip(".") + f" {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()
