"""Runs a stage's actions one after the other, and shows them in a trace."""

import time
from collections.abc import Callable, Iterable

from . import chrome_trace
from .schedule import Action, Kind

TRACED = {
    Kind.FORWARD: chrome_trace.FORWARD,
    Kind.BACKWARD: chrome_trace.BACKWARD,
    Kind.UPDATE: chrome_trace.UPDATE,
    Kind.RECV_ACTIVATION: chrome_trace.WAIT,
    Kind.RECV_GRAD: chrome_trace.WAIT,
}
"""Actions that a trace shows, and the names of their events."""


def run(
    actions: Iterable[tuple[Action, Callable[[int], None]]], first: int, trace: chrome_trace.Writer | None, updates: Callable[[], int]
) -> None:
    """Run actions in their order.

    Args:
        actions: of one stage, and what to do with the microbatch of each.
        first: is added to their microbatches.
        trace: where to show them; None: nowhere.
        updates: how many updates the stage has made by now.
    """
    for action, handle in actions:
        microbatch = first + action.microbatch
        if trace is None:
            handle(microbatch)
            continue
        start_ns = time.time_ns()
        handle(microbatch)
        if action.kind in TRACED:
            trace.span(TRACED[action.kind], microbatch, start_ns, time.time_ns(), updates=updates())


def open_trace(folder: str, stage: int, replica: int) -> chrome_trace.Writer:
    """The trace of one rank.

    Raises:
        ValueError: the file cannot be written; one line that names the key.
    """
    path = chrome_trace.rank_file(folder, stage, replica)
    try:
        return chrome_trace.Writer(path, stage, replica)
    except OSError as error:
        raise ValueError(f"pipeline.trace: cannot write {path} ({error.strerror}); name another folder") from None
