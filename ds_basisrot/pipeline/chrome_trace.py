"""Traces for chrome://tracing and Perfetto: the same events for simulated and real pipelines, written while a job runs, then merged."""

import atexit
import json
import math
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

FORWARD, BACKWARD, UPDATE, WAIT = "F", "B", "U", "wait"
"""Names of events."""

COLOURS = {FORWARD: "thread_state_running", BACKWARD: "thread_state_iowait", UPDATE: "black", WAIT: "grey"}
"""chrome://tracing's names of colours; Perfetto colours events by their names."""

FLUSH_NS = 1_000_000_000
FLUSH_SPANS = 1024

SIMULATED_PID = 1_000_000
"""Process of a simulated pipeline: no replica's, so that it can be merged with a real run's."""

RANK_FILES = "stage_*-replica_*.trace.json"
"""Matches the names of `rank_file`."""

_dumps = json.JSONEncoder(separators=(",", ":"), default=str).encode


def rank_file(folder: str | Path, stage: int, replica: int) -> Path:
    """Where the rank of a `stage` and data-parallel `replica` writes its trace."""
    return Path(folder) / f"stage_{stage:03d}-replica_{replica:03d}.trace.json"


class Writer:
    """The trace of one rank, appended to a file about once a second.

    The file is a JSON array, one event a line, whose closing bracket comes with `close()`, at the latest when Python ends; viewers read it
    without. What a killed job leaves behind lacks its last second. A file that is there already is replaced. If the disk fails in the
    middle of a job, the trace ends with a warning and the job goes on.

    Args:
        path: the file; folders on the way are made.
        stage: 0-based; the trace's thread.
        replica: data-parallel replica; the trace's process.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str | Path, stage: int, replica: int):
        self.path, self._stage, self._replica = Path(path), stage, replica
        self._spans: list[tuple[str, int, int, int, dict[str, Any]]] = []
        self._flush_at = time.time_ns() + FLUSH_NS
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] | None = self.path.open("w", encoding="utf-8")
        self._file.write("[\n" + ",\n".join(_names(stage, replica, f"replica {replica}")))
        self._file.flush()
        atexit.register(self.close)

    def span(self, name: str, microbatch: int, start_ns: int, end_ns: int, **args: Any) -> None:
        """Add an event.

        Args:
            name: "F", "B", "U", "wait" or another; events of a stage do not overlap, but one may lie within another.
            microbatch: counted from the start of training.
            start_ns, end_ns: by `time.time_ns()`, so that the ranks of a machine line up; written in whole microseconds.
            **args: more to show with the event, such as version=3.
        """
        spans = self._spans
        spans.append((name, microbatch, start_ns, end_ns, args))
        if end_ns >= self._flush_at or len(spans) >= FLUSH_SPANS:
            self.flush()

    def flush(self) -> None:
        """Write what has been added so far."""
        spans, self._spans = self._spans, []
        self._flush_at = time.time_ns() + FLUSH_NS
        self._write("".join(f",\n{_event(self._stage, self._replica, *span)}" for span in spans))

    def close(self) -> None:
        """Write the rest and the closing bracket. Nothing is written afterwards."""
        self.flush()
        self._write("\n]\n")
        self._end()

    def _write(self, text: str) -> None:
        if self._file is None or not text:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            warnings.warn(f"cannot write the trace {self.path}: {error.strerror}; it ends here", RuntimeWarning, stacklevel=3)
            self._end()

    def _end(self) -> None:
        atexit.unregister(self.close)
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:  # what could not be written is tried again, and was warned of
                pass


def write_simulated(path: str | Path, lanes: Sequence[Iterable[tuple]]) -> None:
    """Write the trace of a simulated pipeline.

    Args:
        path: the file.
        lanes: for each stage its spans (stage, name, microbatch, version, start_ms, end_ms), as timeline.Span.

    Raises:
        OSError: the file cannot be written.
    """
    with _Array(path) as array:
        for stage, lane in enumerate(lanes):
            for line in _names(stage, SIMULATED_PID, "simulated"):
                array.add(line)
            for _, name, microbatch, version, start_ms, end_ms in lane:
                start_ns, end_ns = round(start_ms * 1e6), round(end_ms * 1e6)
                array.add(_event(stage, SIMULATED_PID, name, microbatch, start_ns, end_ns, {"version": version}))


@dataclass
class Lane:
    """What one stage of one process did, summed over its events, in microseconds."""

    process: str
    stage: int
    first_us: float = math.inf
    last_us: float = 0
    us: Counter = field(default_factory=Counter)
    """Time by the name of the event."""
    events: Counter = field(default_factory=Counter)
    """Number by the name of the event."""

    @property
    def total_us(self) -> float:
        """From the first event to the end of the last."""
        return max(0, self.last_us - self.first_us)

    @property
    def busy_us(self) -> int:
        """Time in forwards, backwards and updates."""
        return self.us[FORWARD] + self.us[BACKWARD] + self.us[UPDATE]

    def add(self, event: dict[str, Any]) -> None:
        """Count a span."""
        self.first_us, self.last_us = min(self.first_us, event["ts"]), max(self.last_us, event["ts"] + event["dur"])
        self.us[event["name"]] += event["dur"]
        self.events[event["name"]] += 1


def merge(paths: Iterable[str | Path], out: str | Path | None) -> list[Lane]:
    """Put traces into one file.

    Args:
        paths: traces of ranks, also of killed ones, or simulated ones.
        out: the file to write; None only sums up.

    Returns:
        What each stage of each process did, sorted by process and stage; stages without events are left out.

    Raises:
        ValueError: naming a file that is no such trace, or `out` where it is one of `paths`.
        OSError: a file cannot be read or written.
    """
    paths = [Path(path) for path in paths]
    if out is not None and Path(out).resolve() in [path.resolve() for path in paths]:
        raise ValueError(f"{out} is one of the traces to merge; write to another file")
    processes: dict[int, str] = {}
    lanes: dict[tuple[int, int], Lane] = {}
    with _Array(out) as array:
        for event in (event for path in paths for event in read(path)):
            array.add(_dumps(event))
            key = event["pid"], event["tid"]
            if event["ph"] == "X":
                lanes.setdefault(key, Lane(processes.get(key[0], str(key[0])), key[1])).add(event)
            elif event["name"] == "process_name":
                processes[key[0]] = event["args"]["name"]
    return [lanes[key] for key in sorted(lanes)]


def read(path: str | Path) -> Iterator[dict[str, Any]]:
    """The events of a trace; of one that was cut off, those that were written completely.

    Raises:
        ValueError: naming the file and line, where it is no trace as they are written here.
        OSError: it cannot be read.
    """
    cut_off = None
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        if file.readline().strip() not in ("[", ""):
            raise ValueError(f"{path}, line 1: not a trace of a pipeline; it must begin with [")
        for number, line in enumerate(file, 2):
            text = line.strip().rstrip(",")
            if text in ("", "]"):
                continue
            if cut_off is not None:
                raise ValueError(f"{path}, line {cut_off}: not an event of a pipeline's trace")
            event = _parsed(text)
            if event is None:
                cut_off = number  # fine if it is the last line
            else:
                yield event


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        event = json.loads(text)
    except ValueError:
        return None
    keys = {"name", "ph", "pid", "tid"}
    complete = isinstance(event, dict) and keys <= event.keys() and (event["ph"] != "X" or {"ts", "dur"} <= event.keys())
    return event if complete else None


class _Array:
    """A file with a JSON array, one item a line; no file for the path None."""

    def __init__(self, path: str | Path | None):
        self._path, self._separator = path, "[\n"

    def __enter__(self) -> "_Array":
        self._file = None if self._path is None else Path(self._path).open("w", encoding="utf-8")
        return self

    def add(self, item: str) -> None:
        if self._file is not None:
            self._file.write(self._separator + item)
            self._separator = ",\n"

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()


def _names(stage: int, pid: int, process: str) -> list[str]:
    """The events that name a process and a stage and put them in order."""
    named = {
        "process_name": {"name": process}, "process_sort_index": {"sort_index": pid},
        "thread_name": {"name": f"stage {stage}"}, "thread_sort_index": {"sort_index": stage},
    }  # fmt: skip
    return [_dumps({"name": name, "ph": "M", "pid": pid, "tid": stage, "args": args}) for name, args in named.items()]


def _event(stage: int, pid: int, name: str, microbatch: int, start_ns: int, end_ns: int, args: dict[str, Any]) -> str:
    # both ends are rounded down, not the duration: spans that touch still do, and viewers drop spans that overlap
    start_us = start_ns // 1000
    more = "".join(f',"{key}":{value if type(value) is int else _dumps(value)}' for key, value in args.items())
    return (
        f'{{"name":{_quoted(name)},"ph":"X","pid":{pid},"tid":{stage},"ts":{start_us},"dur":{end_ns // 1000 - start_us},'
        f'"args":{{"microbatch":{microbatch}{more}}}{_colour(name)}}}'
    )


@cache
def _quoted(name: str) -> str:
    return _dumps(name)


@cache
def _colour(name: str) -> str:
    return f',"cname":"{COLOURS[name]}"' if name in COLOURS else ""
