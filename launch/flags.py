"""The flags of pretrain_gpt.py, and everything about them that can be checked before torch is loaded."""

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from run_folder import RunFolder
from text_data import Text, load_text

DS_CONFIG = Path(__file__).resolve().parent / "ds_config" / "basis_rotation.json"


@dataclass(frozen=True)
class Job:
    """What the checked flags ask for.

    flags: as parsed, every default filled in.
    ds_config: the JSON, with --lr written into it.
    updates_done: updates behind the checkpoint to resume from, 0 for a new run.
    """

    flags: argparse.Namespace
    ds_config: dict
    text: Text
    folder: RunFolder
    updates_done: int


def read_job(argv: list[str] | None = None) -> Job:
    """Parse and check the flags.

    Raises:
        ValueError: something about them cannot work; the message is one line that says what to change.
    """
    flags = _parser().parse_args(argv)
    ds_config = _read_ds_config(flags)
    flags.stages = _stages(flags)
    if flags.warmup is None:
        flags.warmup = min(100, flags.updates // 10)
    if flags.warmup >= flags.updates:
        raise ValueError(f"--warmup {flags.warmup} leaves nothing of --updates {flags.updates}: make it smaller")
    text = load_text(flags.data, flags.context)
    folder = RunFolder(flags.runs_dir / flags.name)
    if not flags.resume:
        folder.check_unused()
        return Job(flags, ds_config, text, folder, updates_done=0)
    updates_done = folder.check_resumable(model_flags(flags))
    if updates_done >= flags.updates:
        raise ValueError(f"--resume: {folder.path} has {updates_done} updates already; --updates is their number in all, give more")
    return Job(flags, ds_config, text, folder, updates_done)


def model_flags(flags: argparse.Namespace) -> dict[str, int]:
    """The flags that the weights and the order of the data depend on: a resumed run must have the same."""
    return {flag: getattr(flags, flag) for flag in ("layers", "width", "heads", "context", "stages", "seed")}


def refuse(message: str) -> NoReturn:
    """End this process with exit code 2 and one line on stderr.

    Every process of a job meets the same mistake. The first one on a machine speaks, upon which the launcher ends the
    others; one that is still here after some seconds is alone with its mistake and speaks too.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank > 0:
        time.sleep(5)
    print(f"pretrain_gpt.py: error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(2)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the flags)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        description="Train a small GPT on text as a DeepSpeed pipeline. Start it with `deepspeed --num_gpus N` or `torchrun`.",
        allow_abbrev=False,
    )
    count = {"type": _whole(1), "metavar": "N"}
    run = parser.add_argument_group("run")
    run.add_argument("--ds-config", type=Path, metavar="JSON", default=DS_CONFIG, help="selects optimizer and schedule (%(default)s)")
    run.add_argument("--name", default="gpt", help="of the run's folder (%(default)s)")
    run.add_argument("--runs-dir", type=Path, metavar="DIR", default=Path("runs"), help="where the run folders are (%(default)s)")
    run.add_argument("--resume", action="store_true", help="go on from the last checkpoint of this --name")
    run.add_argument("--save-interval", **count, default=1000, help="updates between checkpoints; the last one is saved (%(default)s)")
    run.add_argument(
        "--eval-interval", **count, default=100, help="updates between held-out losses; the last one is measured (%(default)s)"
    )
    run.add_argument("--eval-batches", **count, default=8, help="microbatches in a held-out loss (%(default)s)")
    run.add_argument("--threads", **count, default=1, help="CPU threads of each process (%(default)s)")
    run.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher passes it

    training = parser.add_argument_group("training")
    training.add_argument("--updates", **count, default=4000, help="optimizer updates in all, before and after a resume (%(default)s)")
    training.add_argument("--lr", type=_rate, help="peak learning rate (the JSON's)")
    training.add_argument(
        "--warmup", type=_whole(0), metavar="N", help="updates of linear warm-up before the cosine (a tenth, at most 100)"
    )
    training.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="text files (the Python standard library)")
    training.add_argument("--seed", type=_whole(0), default=0, help="of the initial weights and of the order of the data (%(default)s)")

    model = parser.add_argument_group("model")
    model.add_argument("--stages", **count, help="pipeline stages (as many as processes)")
    model.add_argument("--layers", **count, default=8, help="transformer blocks (%(default)s)")
    model.add_argument("--width", **count, default=64, help="of the residual stream (%(default)s)")
    model.add_argument("--heads", **count, default=4, help="of each attention (%(default)s)")
    model.add_argument("--context", **count, default=64, help="bytes in a sequence (%(default)s)")
    return parser


def _whole(least: int):
    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return whole_number


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return rate


def _read_ds_config(flags: argparse.Namespace) -> dict:
    path = flags.ds_config
    try:
        ds_config = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"--ds-config {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--ds-config {path} is not JSON: {error}") from None
    optimizer = ds_config.get("optimizer") if isinstance(ds_config, dict) else None
    if not isinstance(optimizer, dict) or "type" not in optimizer:
        raise ValueError(f'--ds-config {path} has no "optimizer" block: add {{"optimizer": {{"type": ..., "params": {{"lr": ...}}}}}}')
    for flag, given in (("--lr", flags.lr), ("--warmup", flags.warmup)):
        if given is not None and "scheduler" in ds_config:
            raise ValueError(f'{flag}: the "scheduler" block of {path} sets the learning rate; change it there, or remove it')
    if not isinstance(optimizer.get("params", {}), dict):
        raise ValueError(f'--ds-config {path}: "params" of the "optimizer" block must be an object {{...}}')
    if flags.lr is not None:
        optimizer.setdefault("params", {})["lr"] = flags.lr
    return ds_config


def _stages(flags: argparse.Namespace) -> int:
    """The number of stages, once it fits the model and the number of processes."""
    if flags.width % flags.heads:
        raise ValueError(f"--width {flags.width} is not a multiple of --heads {flags.heads}")
    if "WORLD_SIZE" not in os.environ:
        raise ValueError("start it with a launcher: deepspeed --num_gpus N, or torchrun --nproc_per_node N")
    processes = int(os.environ["WORLD_SIZE"])
    stages = flags.stages or processes
    if stages > flags.layers:
        raise ValueError(f"--stages {stages} is more than --layers {flags.layers}: every stage needs a block of its own")
    if processes % stages:
        raise ValueError(f"{processes} processes are not a multiple of --stages {stages}: start as many as stages, or a multiple of it")
    return stages
