"""`ds-basisrot check`: says what a DeepSpeed configuration file will activate, or what is wrong with it, before any job starts."""

import argparse
from pathlib import Path

from ds_basisrot.cli.errors import CommandError
from ds_basisrot.common import json_text

NAME = "check"
HELP = "check the optimizer and pipeline blocks of a DeepSpeed configuration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="DS_CONFIG.json", help="the file that the job gives to DeepSpeed")


def run(options: argparse.Namespace) -> None:
    # Here, as the other commands need not wait for it.
    from ds_basisrot.common.blocks import ConfigError
    from ds_basisrot.deepspeed_plugin.config import describe_training, validate, without_auto

    config = load(options.config)
    try:
        config, left = without_auto(config)
        lines = [*validate(config), describe_training(config, left)]
    except ConfigError as error:
        raise CommandError(f"{options.config}: {error}") from error
    if left:
        lines.append('"auto", for Hugging Face\'s Trainer or accelerate to fill in: ' + ", ".join(left))
    print("\n".join(lines))


def load(path: Path) -> dict:
    """The configuration in `path`; CommandError where that is no readable JSON object or names a key twice."""
    try:
        config = json_text.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # includes undecodable text
        raise CommandError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise CommandError(f"{path} must hold a JSON object, as DeepSpeed's configuration does, not a {type(config).__name__}")
    return config
