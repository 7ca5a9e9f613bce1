"""`ds-basisrot timeline`: an event simulation of a pipeline as text, table, picture and trace; the traces of a real run in one file."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_basisrot.cli.arguments import count, nonnegative
from ds_basisrot.cli.errors import CommandError
from ds_basisrot.cli.output import add_json_argument, amount, check_json_target, console, table, write_json
from ds_basisrot.pipeline.chrome_trace import BACKWARD, FORWARD, RANK_FILES, UPDATE, WAIT, Lane, merge, write_simulated
from ds_basisrot.pipeline.timeline import SCHEDULES, Figures, Schedule, Times, per_stage_values, simulate, steady_calls

NAME = "timeline"
HELP = "show what each stage of a pipeline does when: bubbles, staleness, stashed weights; merge the traces of a real run"

DESCRIPTION = """\
Simulates a pipeline, event by event, with given times per stage, under the schedule without flushes (async_1f1b) or DeepSpeed's 1F1B
(1f1b), and counts on the events what holds in the steady state: how stale gradients are, how long each stage idles, how many versions of
its weights it keeps. Sends block nobody, and what a message takes is the latency alone. With --merge: sums up the traces that the ranks
of a real run wrote ("pipeline": {"trace": DIR}) and puts them into one file. Traces open in chrome://tracing and Perfetto."""

# What a simulation takes; with --merge none of these may be given.
DEFAULTS = {
    "schedule": "async_1f1b", "gas": 1, "calls": None, "forward_ms": [1.0], "backward_ms": [2.0], "update_ms": [0.0], "latency_ms": 0.0,
    "weight_bytes": None, "picture": None,
}  # fmt: skip

TEXT_CALLS = 2
"""Calls shown as text unless --calls says otherwise."""

TEXT_STAGES = 32
"""More stages than this are not shown as text."""

TABLE_STAGES = 20
"""More stages than this are not all in the table."""

MOST_FORWARDS = 2_000_000
"""What a simulation of all stages may take: about 20 s and 2 GB."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--stages", type=count, metavar="P", help="simulate a pipeline of so many stages")
    what.add_argument("--merge", type=Path, metavar="DIR", help="read the traces of a real run's ranks")
    parser.add_argument("--schedule", choices=tuple(SCHEDULES), help="without flushes, or DeepSpeed's own (async_1f1b)")
    parser.add_argument("--gas", type=count, metavar="A", help="gradient_accumulation_steps: microbatches per update (1)")
    parser.add_argument(
        "--calls", type=count, metavar="N",
        help=f"calls of train_batch() to show ({TEXT_CALLS} as text; in picture and trace, until the steady state is seen)",
    )  # fmt: skip
    for option, of_what in (("--forward-ms", "forward (1)"), ("--backward-ms", "backward (2)"), ("--update-ms", "update (0)")):
        parser.add_argument(option, type=_numbers, metavar="T,...", help=f"time of one {of_what}: one number, or one for each stage")
    parser.add_argument("--latency-ms", type=nonnegative, metavar="T", help="from the sending of a message until it is received (0)")
    parser.add_argument("--weight-bytes", type=_numbers, metavar="B,...", help="of a stage, to say what stashed versions take: as above")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the stages' lanes over time")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the simulated or the merged trace")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    if options.merge is not None:
        _merge(options)
    else:
        _simulate(options)


def _simulate(options: argparse.Namespace) -> None:
    given = {name: default if getattr(options, name) is None else getattr(options, name) for name, default in DEFAULTS.items()}
    try:
        times = Times.of(options.stages, *(given[f"{name}_ms"] for name in ("forward", "backward", "update", "latency")))
        weights = given["weight_bytes"] and per_stage_values("weight_bytes", given["weight_bytes"], options.stages)
    except ValueError as error:
        name, _, message = str(error).partition(": ")
        raise CommandError(f"--{name.replace('_', '-')}: {message}") from error
    schedule = SCHEDULES[given["schedule"]](options.stages, given["gas"])
    settled, watched = steady_calls(schedule)
    calls = max(settled + watched, given["calls"] or 0)
    forwards = options.stages * (calls * given["gas"] + options.stages)
    if forwards > MOST_FORWARDS:
        raise CommandError(f"--stages, --gas, --calls: {forwards} forwards to simulate are more than {MOST_FORWARDS}; make one smaller")
    _check_targets(options)
    whole = simulate(schedule, times, calls)
    figures = whole.first(settled + watched).figures(settled)  # so they do not depend on what is shown

    out = console(options.json)
    if options.picture is None and options.trace is None:
        if options.stages > TEXT_STAGES:
            out.print(f"{options.stages} stages are too many to show as text; see --picture and --trace")
        else:
            unit = Times.of(options.stages, forward_ms=1.0, backward_ms=1.0)
            out.print(simulate(schedule, unit, given["calls"] or TEXT_CALLS).format(), markup=False, soft_wrap=True)
        out.print()
    stash = weights and [weight * stage.versions for weight, stage in zip(weights, figures.stages)]
    title = f"{given['schedule']}, stages: {options.stages}, microbatches per update: {given['gas']}"
    _print(title, figures, stash, options.json)

    shown = whole.first(given["calls"] or calls)
    if options.picture is not None:
        from ds_basisrot.cli.timeline_picture import draw  # here: nothing else needs to wait for matplotlib

        # the calls asked for, or as long as all stages are at work
        end_ms = (min if given["calls"] is None else max)(lane[-1].end_ms for lane in shown.lanes)
        draw(options.picture, shown, figures, f"{title}; {_summary(figures)}", end_ms)
        out.print(f"picture: {options.picture}", markup=False, soft_wrap=True)
    if options.trace is not None:
        write_simulated(options.trace, shown.lanes)
        out.print(f"trace: {options.trace}", markup=False, soft_wrap=True)
    write_json(options.json, _json(given["schedule"], schedule, times, figures, watched, weights, stash))


def _json(name: str, schedule: Schedule, times: Times, figures: Figures, watched: int, weights: Any, stash: Any) -> dict[str, Any]:
    per_stage = [{"stage": index, **asdict(stage)} for index, stage in enumerate(figures.stages)]
    if stash:
        per_stage = [{**stage, "weight_bytes": w, "stash_bytes": s} for stage, w, s in zip(per_stage, weights, stash)]
    return {
        "schedule": name,
        "stages": schedule.stages,
        "gradient_accumulation_steps": schedule.accumulation,
        "times": asdict(times),
        "steady_state": {"first_call": figures.first_call, "calls": watched},
        "period_ms": figures.period_ms,
        "efficiency": figures.efficiency,
        "per_stage": per_stage,
    }


def _summary(figures: Figures) -> str:
    return f"{figures.period_ms:.4g} ms per microbatch, efficiency {100 * figures.efficiency:.1f} %"


def _print(title: str, figures: Figures, stash: list[float] | None, json_target: str | None) -> None:
    out, stages = console(json_target), figures.stages
    rows = _some(len(stages), figures.slowest)
    headings = ["staleness, microbatches", "updates, mean", "bubble", "versions stashed", *(["stash"] if stash else []), "in flight"]
    result = table(f"{title}; in the steady state", [], ["stage", *headings, "work, ms"])
    for index in rows:
        stage = stages[index]
        result.add_row(
            str(index), f"{stage.staleness_microbatches:.4g}", f"{stage.staleness_updates:.4g}", f"{100 * stage.bubble:.1f} %",
            str(stage.versions), *([amount(stash[index], "B")] if stash else []), str(stage.in_flight), f"{stage.busy_ms:.4g}",
        )  # fmt: skip
    out.print(result)
    lines = [f"{_summary(figures)} (work of the slowest stage, {figures.slowest}, in that time)"]
    if len(rows) < len(stages):
        lines.append(f"{len(rows)} of {len(stages)} stages are shown; --json has all")
    if stash:
        lines.append(f"stashed weights of all stages: {amount(sum(stash), 'B')}")
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)


def _some(stages: int, always: int) -> list[int]:
    """All stages, or of many some, evenly spaced with the first and the last, and the stage `always`."""
    if stages <= TABLE_STAGES:
        return list(range(stages))
    return sorted({always, *(round(i * (stages - 1) / (TABLE_STAGES - 2)) for i in range(TABLE_STAGES - 1))})


def _merge(options: argparse.Namespace) -> None:
    for name in DEFAULTS:
        if getattr(options, name) is not None:
            raise CommandError(f"--{name.replace('_', '-')}: belongs to a simulation, with --stages; leave it out with --merge")
    if not options.merge.is_dir():
        raise CommandError(f"--merge: {options.merge} is not a folder; give the one that pipeline.trace names")
    paths = sorted(options.merge.glob(RANK_FILES))
    if not paths:
        raise CommandError(f"--merge: {options.merge} has no traces ({RANK_FILES}); give the folder that pipeline.trace names")
    _check_targets(options)
    try:
        lanes = merge(paths, options.trace)
    except ValueError as error:
        raise CommandError(f"--merge: {error}") from error
    except OSError as error:
        raise CommandError(f"--merge: {error.filename}: {error.strerror}") from error
    if not lanes:
        raise CommandError(f"--merge: nothing has happened in the traces in {options.merge}; look again after the job's first updates")
    out = console(options.json)
    figures = [_lane_figures(lane) for lane in lanes]
    result = table(
        f"{len(paths)} traces in {options.merge}", ["process"],
        ["stage", "seconds", "microbatches", "ms per microbatch", "forward", "backward", "update", "busy", "wait", "other"],
    )  # fmt: skip
    for each in figures:
        shares = [f"{100 * each['shares'][name]:.1f} %" for name in ("forward", "backward", "update", "busy", "wait", "other")]
        period = "-" if each["ms_per_microbatch"] is None else f"{each['ms_per_microbatch']:.4g}"
        result.add_row(each["process"], str(each["stage"]), f"{each['seconds']:.4g}", str(each["microbatches"]), period, *shares)
    out.print(result)
    if options.trace is not None:
        out.print(f"trace: {options.trace}", markup=False, soft_wrap=True)
    write_json(options.json, {"traces": [str(path) for path in paths], "lanes": figures})


def _lane_figures(lane: Lane) -> dict[str, Any]:
    total, microbatches = lane.total_us or 1, lane.events[BACKWARD]
    shares = {name: lane.us[kind] / total for name, kind in (("forward", FORWARD), ("backward", BACKWARD), ("update", UPDATE))}
    shares |= {"busy": lane.busy_us / total, "wait": lane.us[WAIT] / total}
    return {
        "process": lane.process,
        "stage": lane.stage,
        "seconds": lane.total_us / 1e6,
        "microbatches": microbatches,
        "ms_per_microbatch": lane.total_us / 1e3 / microbatches if microbatches else None,
        "shares": {**shares, "other": max(0.0, 1 - shares["busy"] - shares["wait"])},
    }


def _check_targets(options: argparse.Namespace) -> None:
    """Find out before the work whether the files can be written; what is there stays until then."""
    if options.picture is not None and options.picture.suffix.lower() != ".png":
        raise CommandError(f"--picture: writes a PNG; the file's name must end in .png, not {options.picture.name!r}")
    check_json_target(options.json)
    for name in ("picture", "trace"):
        path = getattr(options, name)
        try:
            if path is not None:
                path.open("a").close()
        except OSError as error:
            raise CommandError(f"--{name}: cannot write {path}: {error.strerror}") from error


def _numbers(text: str) -> list[float]:
    """One number, or several with commas between, for one per stage."""
    return [nonnegative(part) for part in text.split(",")]
