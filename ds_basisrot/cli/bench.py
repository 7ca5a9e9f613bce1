"""`ds-basisrot bench`: measurements on this machine, one file of this folder for each subject."""

import argparse

from ds_basisrot.cli import bench_optimizer, bench_pipeline

NAME = "bench"
HELP = "measure the optimizer's speed, or the pipeline schedule's, on this machine"

# Each has `NAME`, `HELP`, `add_arguments(parser)` and `run(options)`, as subcommands have.
SUBJECTS = (bench_optimizer, bench_pipeline)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(dest="subject", metavar="subject", required=True)
    for module in SUBJECTS:
        subject = subjects.add_parser(module.NAME, help=module.HELP)
        module.add_arguments(subject)
        subject.set_defaults(measure=module.run)


def run(options: argparse.Namespace) -> None:
    options.measure(options)
