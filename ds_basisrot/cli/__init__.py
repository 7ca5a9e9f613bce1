"""`ds-basisrot`: one command, one file of this folder for each subcommand."""

import argparse
import os
import sys

from ds_basisrot import __version__
from ds_basisrot.cli import bench, check, plan, simulate, timeline
from ds_basisrot.cli.errors import CommandError

# Each subcommand module has `NAME`, `HELP`, `add_arguments(parser)` and `run(options)`, which prints and raises CommandError.
SUBCOMMANDS = (check, plan, simulate, timeline, bench)


class _OneLineParser(argparse.ArgumentParser):
    """Wrong arguments get one line on stderr, without the whole usage text, and exit code 2."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: list[str] | None = None) -> int:
    """Run one `ds-basisrot` command.

    Args:
        argv: the arguments after the program's name; default: those of this process.

    Returns:
        The exit code: 0, or 2 after a one-line error on stderr. Wrong arguments raise SystemExit(2).
    """
    options = _parser().parse_args(argv)
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except CommandError as error:
        print(f"ds-basisrot {options.command}: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="ds-basisrot", description="Tools around asynchronous pipelines and basis rotation.")
    parser.add_argument("--version", action="version", version=f"ds-basisrot {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for module in SUBCOMMANDS:
        command = commands.add_parser(module.NAME, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
