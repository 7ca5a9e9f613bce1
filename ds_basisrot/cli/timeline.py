"""`ds-basisrot timeline`: prints the no-flush schedule of every stage, and the staleness that follows from it."""

import argparse

from ds_basisrot.cli.arguments import count
from ds_basisrot.cli.errors import CommandError

NAME = "timeline"
HELP = "print the no-flush schedule of each stage and its staleness"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", type=count, required=True, metavar="P", help="pipeline stages")
    parser.add_argument("--gas", type=count, default=1, metavar="A", help="gradient_accumulation_steps: microbatches per update (1)")
    parser.add_argument("--calls", type=count, default=2, metavar="N", help="calls of train_batch() to show (2)")


def run(options: argparse.Namespace) -> None:
    from ds_basisrot.pipeline.schedule import AsyncSchedule  # here: the other commands need not wait for it

    try:
        schedule = AsyncSchedule(options.stages, options.gas)
    except ValueError as error:
        raise CommandError(error) from error
    print(schedule.format(calls=options.calls))
    print()
    print(staleness_table([schedule.staleness(stage) for stage in range(options.stages)], options.gas))


def staleness_table(staleness: list[int], gas: int) -> str:
    """One line per stage: staleness in microbatches (`staleness[stage]`), and in updates of `gas` microbatches, mean over an update."""
    lines = [f"{'stage':>5}  {'staleness (microbatches)':>24}  {'staleness (updates, mean)':>25}"]
    lines += [f"{stage:>5}  {tau:>24}  {tau / gas:>25.4g}" for stage, tau in enumerate(staleness)]
    return "\n".join(lines)
