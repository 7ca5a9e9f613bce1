"""`ds-basisrot simulate`: what an optimizer's options do to convergence under the staleness of an asynchronous pipeline."""

import argparse
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_basisrot import __version__
from ds_basisrot.cli.arguments import count, nonnegative
from ds_basisrot.cli.errors import CommandError
from ds_basisrot.cli.output import add_json_argument, amount, check_json_target, console, progress, write_json
from ds_basisrot.common import json_text

if TYPE_CHECKING:
    from ds_basisrot.bench.convergence import Curve

NAME = "simulate"
HELP = "compare optimizers under an asynchronous pipeline's staleness, in one process"

DESCRIPTION = """\
Trains a small GPT over bytes once for each optimizer and seed, in one process, with exactly the delays of the asynchronous schedule: the
gradient that stage k of P applies is P-1-k updates late. All optimizers get the same initial weights and the same batches. Gradients are
clipped to norm 1 on each stage; the learning rate warms up over a tenth of the updates (at most 100) and falls to a tenth along a cosine.
The default comparison takes about four minutes on one core. This says what an option does at this size, not how much it does at yours."""

DEFAULT_OPTIMIZERS = {
    "AdamW": {"type": "AdamW", "params": {"fused": True}},
    **{geometry: {"type": "BasisRotation", "params": {"geometry": geometry}} for geometry in ("bilateral", "auto", "unilateral")},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "--optimizer", action="append", type=_named_block, metavar='NAME={"type": ..., "params": {...}}',
        help="one to compare, as in DeepSpeed's JSON: BasisRotation, AdamW, NAdam or SGD; repeat; the first is the one that others are "
        "measured against (AdamW, and BasisRotation in its three geometries)",
    )  # fmt: skip
    parser.add_argument("--stages", type=count, default=8, metavar="P", help="pipeline stages; 1 trains without staleness (8)")
    parser.add_argument("--updates", type=count, default=1000, metavar="N", help="updates of 1 microbatch each (1000)")
    parser.add_argument("--lr", type=nonnegative, default=1e-3, metavar="LR", help="peak learning rate where a block has none (1e-3)")
    parser.add_argument(
        "--seeds", "--seed", type=_seeds, default=[0], metavar="N,...", help="of initial weights and batches; several show the spread (0)"
    )
    parser.add_argument("--layers", type=count, default=8, metavar="N", help="Transformer blocks (8)")
    parser.add_argument("--width", type=count, default=64, metavar="N", help="of the residual stream (64)")
    parser.add_argument("--heads", type=count, default=4, metavar="N", help="of each attention (4)")
    parser.add_argument("--context", type=count, default=64, metavar="N", help="bytes in a sequence (64)")
    parser.add_argument("--batch", type=count, default=8, metavar="N", help="sequences in an update (8)")
    parser.add_argument("--eval-every", type=count, default=25, metavar="N", help="updates between held-out losses (25)")
    parser.add_argument("--threads", type=count, default=1, metavar="N", help="torch's threads (1, the fastest at the default size)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what to train on (the Python standard library's sources)")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    import torch  # here and below: the other commands need not wait for it

    from ds_basisrot.bench import convergence
    from ds_basisrot.bench.optimizer_block import OptimizerBlock
    from ds_basisrot.bench.text import read_text

    shape = {name: getattr(options, name) for name in ("stages", "updates", "layers", "width", "heads", "context", "batch", "eval_every")}
    setting, blocks = convergence.Setting(**shape), {}
    try:
        stages = setting.build(seed=0)
    except ValueError as error:
        raise CommandError(f"--{error}") from error
    for name, block in _contestants(options.optimizer).items():
        try:
            blocks[name] = OptimizerBlock.read(block, options.lr)
            blocks[name].build(stages)  # the faults that only show on a model
        except ValueError as error:
            raise CommandError(f"--optimizer {name}: {error}") from error
    try:
        text = read_text(options.text, options.context)
    except ValueError as error:
        raise CommandError(f"--text: {error}") from error
    check_json_target(options.json)
    torch.set_num_threads(options.threads)

    curves: dict[str, list[Curve]] = {name: [] for name in blocks}
    with progress(len(blocks) * len(options.seeds) * options.updates) as on_update:
        for name, block in blocks.items():
            for seed in options.seeds:
                description = f"{name}, seed {seed}"
                curves[name].append(convergence.run(setting, block, text, seed, lambda d=description: on_update(d)))

    figures = {
        "settings": {
            **shape, "lr": options.lr, "seeds": options.seeds, "threads": options.threads, "warmup": setting.warmup,
            "max_grad_norm": convergence.MAX_GRAD_NORM, "held_out_sequences": convergence.HELD_OUT_SEQUENCES,
            "parameters": sum(p.numel() for stage in stages for p in stage.parameters()),
        },
        "text": {"source": text.source, "bytes": len(text.train) + len(text.held_out), "sha256": text.sha256},
        "versions": {"ds_basisrot": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "optimizers": {
            name: {"type": block.type, "params": block.params, **_figures(curves[name], next(iter(curves.values())))}
            for name, block in blocks.items()
        },
    }  # fmt: skip
    _print(figures, options.json)
    write_json(options.json, figures)


def _figures(curves: "Sequence[Curve]", references: "Sequence[Curve]") -> dict[str, Any]:
    """What the runs of one optimizer say, seed by seed and over all seeds; `references` are the first optimizer's runs."""
    runs = [
        {
            **vars(curve),
            "final_loss": curve.final_loss,
            "minus_first": None if None in (curve.final_loss, first.final_loss) else curve.final_loss - first.final_loss,
            "updates_to_first": curve.updates_to(first.final_loss),
        }
        for curve, first in zip(curves, references)
    ]
    compared = ("final_loss", "minus_first", "updates_to_first", "optimizer_ms", "seconds")
    return {**{key: _spread([each[key] for each in runs]) for key in compared}, "runs": runs}


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean and range over the seeds, None where one of them has no value."""
    if None in values:
        return None
    return {"mean": statistics.fmean(values), "lowest": min(values), "highest": max(values)}


def _print(figures: dict[str, Any], json_target: str | None) -> None:
    from rich.markup import escape
    from rich.table import Table

    settings, text, out = figures["settings"], figures["text"], console(json_target)
    first = escape(next(iter(figures["optimizers"])))
    table = Table(
        title=f"{settings['updates']} updates of {settings['batch']} x {settings['context']} bytes at {settings['stages']} stages, "
        f"{settings['layers']} blocks of width {settings['width']}"
    )
    table.add_column("optimizer")
    for heading in ("held-out loss", f"minus {first}'s", f"updates to {first}'s last loss", "optimizer, ms per update", "s per run"):
        table.add_column(heading, justify="right")
    for name, each in figures["optimizers"].items():
        table.add_row(
            escape(name),
            _words(each["final_loss"], "{:.3f}", "not finite"),
            _words(each["minus_first"], "{:+.3f}", "-"),
            _words(each["updates_to_first"], "{:.0f}", "not reached" if each["minus_first"] else "-"),
            f"{each['optimizer_ms']['mean']:.1f}",
            f"{each['seconds']['mean']:.1f}",
        )
    out.print(table)
    seeds = settings["seeds"]
    spread = (
        f"mean (lowest to highest) of seeds {', '.join(map(str, seeds))}"
        if len(seeds) > 1
        else f"seed {seeds[0]} alone: differences of a few hundredths mean nothing, see --seeds"
    )
    for line in (
        spread,
        f"{amount(settings['parameters'])} parameters; losses in nats per byte, held-out ones every {settings['eval_every']} updates; "
        f"threads: {settings['threads']}",
        f"text: {text['source']}, {amount(text['bytes'], 'B')}, sha256 {text['sha256']}",
    ):
        out.print(line, markup=False)


def _words(spread: dict[str, float] | None, form: str, missing: str) -> str:
    if spread is None:
        return missing
    mean, lowest, highest = (form.format(spread[key]) for key in ("mean", "lowest", "highest"))
    return mean if spread["lowest"] == spread["highest"] else f"{mean} ({lowest} to {highest})"


def _contestants(given: Sequence[tuple[str, Any]] | None) -> dict[str, Any]:
    if given is None:
        return DEFAULT_OPTIMIZERS
    names = [name for name, _ in given]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise CommandError(f"--optimizer: the name {repeated!r} is given twice; give each its own")
    return dict(given)


def _named_block(argument: str) -> tuple[str, Any]:
    name, equals, text = argument.partition("=")
    name = name.strip()
    if not (equals and name) or name.startswith("{"):
        raise argparse.ArgumentTypeError(f'must be NAME={{"type": "AdamW", "params": {{...}}}}, got {argument!r}')
    try:
        return name, json_text.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name}: not valid JSON: {error}; put the whole argument in single quotes") from None


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = [-1]
    if min(seeds) < 0 or max(seeds) >= 2**32 or len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"must be different whole numbers from 0 to 2^32 - 1, such as 0,1, not {text!r}")
    return seeds
