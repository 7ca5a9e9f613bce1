"""`ds-basisrot bench pipeline`: how near pipeline schedules come to having no bubbles, on real processes whose stages sleep."""

import argparse
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

from ds_basisrot import __version__
from ds_basisrot.cli.arguments import count
from ds_basisrot.cli.choices import chosen
from ds_basisrot.cli.errors import CommandError
from ds_basisrot.cli.output import add_json_argument, check_json_target, console, table, write_json

if TYPE_CHECKING:
    from ds_basisrot.bench.pipelines import Case, Setting

NAME = "pipeline"
HELP = "measure the share of the time that a pipeline's stages work, with and without flushes"

DESCRIPTION = """\
Trains a DeepSpeed pipeline of one process for each stage on this machine, once for each schedule, number of microbatches per update and
optimizer. Every stage sleeps in its forward and in its backward, as if an accelerator kept it busy, so one processor serves many stages,
and the figures are those of the schedule and of what engine and optimizer do around the work. Efficiency is forward and backward of one
microbatch divided by the measured time per microbatch in the steady state. DeepSpeed's own schedule flushes the pipeline in every update,
so of P stages it keeps at most gas / (gas + P - 1) at work. The default comparison takes less than two minutes on two cores."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--stages", type=count, default=8, metavar="P", help="pipeline stages, a process each (8)")
    parser.add_argument(
        "--gas", type=_counts, default=[1, 8], metavar="A,...", help="gradient_accumulation_steps: microbatches per update (1,8)"
    )
    parser.add_argument("--schedules", default="async_1f1b,1f1b", metavar="NAME,...", help="pipeline.schedule (async_1f1b,1f1b)")
    parser.add_argument(
        "--optimizers", default="SGD,BasisRotation", metavar="NAME,...", help="SGD, BasisRotation, AdamW or NAdam (SGD,BasisRotation)"
    )
    parser.add_argument("--forward-ms", type=_milliseconds, default=50.0, metavar="MS", help="that a forward takes (50)")
    parser.add_argument("--backward-ms", type=_milliseconds, default=100.0, metavar="MS", help="that a backward takes (100)")
    parser.add_argument(
        "--microbatches", type=count, default=40, metavar="N",
        help="measure for as long as a stage works on so many; a schedule that flushes trains fewer in that time (40)",
    )  # fmt: skip
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    from ds_basisrot.bench import pipelines  # here: the other commands need not wait for it

    schedules = chosen("--schedules", "schedule", options.schedules, list(pipelines.SCHEDULES))
    optimizers = chosen("--optimizers", "optimizer", options.optimizers, list(pipelines.OPTIMIZERS))
    if importlib.util.find_spec("deepspeed") is None:
        raise CommandError(
            'bench pipeline measures DeepSpeed\'s pipelines; install the extra "deepspeed" (pip install "ds_basisrot[deepspeed]")'
        )
    check_json_target(options.json)
    setting = pipelines.Setting(options.stages, options.forward_ms, options.backward_ms, options.microbatches)
    cases = [pipelines.Case(*each) for each in itertools.product(schedules, options.gas, optimizers)]
    print(
        f"{len(cases)} cases on {setting.stages} processes: the stages sleep {pipelines.expected_s(setting, cases):.0f} s in all",
        file=sys.stderr,
    )
    try:
        times_ms = pipelines.measure(setting, cases)
    except pipelines.JobFailed as error:
        raise CommandError(error) from error
    figures = {
        "settings": vars(setting),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "versions": {"ds_basisrot": __version__, **{name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}},
        "cases": [_figures(setting, case, time_ms) for case, time_ms in zip(cases, times_ms)],
    }
    _print(figures, options.json)
    write_json(options.json, figures)


def _figures(setting: "Setting", case: "Case", time_ms: float) -> dict[str, Any]:
    from ds_basisrot.bench.pipelines import flushing_bound

    return {
        **vars(case),
        "ms_per_microbatch": time_ms,
        "efficiency": setting.work_ms / time_ms,
        "flushing_bound": flushing_bound(case.gas, setting.stages),
    }


def _print(figures: dict[str, Any], json_target: str | None) -> None:
    settings, machine, versions, out = figures["settings"], figures["machine"], figures["versions"], console(json_target)
    title = f"{settings['stages']} stages, forward {settings['forward_ms']:g} ms, backward {settings['backward_ms']:g} ms"
    rows = table(title, ("schedule", "optimizer"), ("gas", "ms/microbatch", "efficiency", "at most with flushes"))
    for case in figures["cases"]:
        shares = [f"{case[key]:.3f}" for key in ("efficiency", "flushing_bound")]
        rows.add_row(case["schedule"], case["optimizer"], str(case["gas"]), f"{case['ms_per_microbatch']:.1f}", *shares)
    out.print(rows)
    out.print(f"{machine['cores']} cores, torch {versions['torch']}, deepspeed {versions['deepspeed']}", markup=False)


def _counts(text: str) -> list[int]:
    """Whole numbers of at least 1, separated by commas, each once."""
    return list(dict.fromkeys(map(count, text.split(","))))


def _milliseconds(text: str) -> float:
    """A duration above 0, and at most a minute."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 60_000:
        raise argparse.ArgumentTypeError(f"must be a number of milliseconds above 0 and at most 60000, not {text!r}")
    return value
