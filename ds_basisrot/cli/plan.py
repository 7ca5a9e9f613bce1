"""`ds-basisrot plan`: what BasisRotation and an asynchronous pipeline will cost for a model, before any job starts."""

import argparse
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_basisrot.cli import check
from ds_basisrot.cli.arguments import count
from ds_basisrot.cli.errors import CommandError
from ds_basisrot.cli.output import add_json_argument, amount, check_json_target, console, table, write_json

if TYPE_CHECKING:
    from torch import nn

NAME = "plan"
HELP = "say what BasisRotation will cost for a model, memory and arithmetic, and what each rank or pipeline stage has of it"

DESCRIPTION = """\
Builds the model without storage and says which matrices BasisRotation will rotate, and what that costs in memory and arithmetic. State of
a matrix [m, n] in numbers: 2mn for the moments, m^2 and n^2 for the bases of the sides that are rotated, and with second order about
k(k + 128) / 2 (k^2 up to 128) for the covariance of each rotated side of length k. A number takes 4 bytes; of momentum and bases, 2 with
"state_dtype": "bfloat16". With --ranks also what each rank keeps, computes and exchanges at the configuration's ZeRO stage, where a matrix
has one owner. It takes all parameters for one group of the optimizer, and the model for what one pipeline stage holds. With --stages also
the weights that each stage of an asynchronous pipeline stashes, with any optimizer: stage k of P keeps ceil((P-1-k) / a) + 1 versions with
a microbatches per update (gradient_accumulation_steps), the last stage none."""

TRAINING_MADDS = 3
"""For each weight of a linear map and token: one forward, two backward."""

# Rows of the table for ranks: what it is, its key in the figures, its unit.
OF_EACH_RANK = (
    ("state of rotated matrices", "rotation_state_bytes", "B"),
    ("with AdamW's state of the others", "state_bytes", "B"),
    ("multiply-adds of an update, with refreshes", "update_madds", ""),
    ("sent in an update, and as much received", "exchanged_bytes", "B"),
)

# Of DeepSpeed's ZeRO options, those that put parameters elsewhere in a flat buffer.
OTHER_ORDER = ("round_robin_gradients", "parameter_alignment")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("config", type=Path, metavar="DS_CONFIG.json", help="the file that the job gives to DeepSpeed")
    parser.add_argument(
        "--model", required=True, metavar="MODULE:CALLABLE",
        help="returns the model, or a pipeline's list of layers or LayerSpecs; MODULE may be in the current folder",
    )  # fmt: skip
    parser.add_argument(
        "--arg", action="append", default=[], metavar="KEY=VALUE", help="keyword argument of CALLABLE, VALUE as JSON or else text; repeat"
    )
    parser.add_argument("--ranks", type=count, metavar="N", help="data-parallel ranks that share the parameters as ZeRO does")
    parser.add_argument("--stages", type=count, metavar="P", help="stages of an asynchronous pipeline that share the layers")
    parser.add_argument(
        "--partition", metavar="METHOD",
        help="PipelineModule's partition_method, with --stages: uniform, parameters or type:REGEX (parameters, as in DeepSpeed)",
    )  # fmt: skip
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    from ds_basisrot.cli.model_source import build_on_meta  # here and below: the other commands need not wait for torch
    from ds_basisrot.cli.rank_plan import rank_plan

    _check_together(options)
    config = _checked(check.load(options.config), options.config)
    optimizer_options = _optimizer_options(config, options)
    check_json_target(options.json)
    model = build_on_meta(options.model, options.arg)
    zero = config.get("zero_optimization") or {}
    figures: dict[str, Any] = {"model": options.model}
    if optimizer_options is not None:
        figures |= {"options": optimizer_options, **_cost_plan(model, optimizer_options, options.config)}
    if options.ranks is not None:
        figures["ranks"] = rank_plan(model, optimizer_options, int(zero.get("stage", 0)), options.ranks)
    if options.stages is not None:
        figures["stages"] = _stage_plan(model, config, options)

    if "totals" in figures:
        _print(figures, options.json)
    if "ranks" in figures:
        _print_ranks(figures["ranks"], zero, options.json)
    if "stages" in figures:
        _print_stages(figures["stages"], config, options.json)
    write_json(options.json, figures)


def _check_together(options: argparse.Namespace) -> None:
    """Refuse options that say nothing together, or nothing alone."""
    if None not in (options.ranks, options.stages):
        raise CommandError("--ranks: takes the model for what one pipeline stage holds; plan ranks and --stages one at a time")
    if options.partition is not None and options.stages is None:
        raise CommandError("--partition: cuts the model into pipeline stages; give their number with --stages")


def _checked(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The configuration without what a client will fill in."""
    from ds_basisrot.common.blocks import ConfigError
    from ds_basisrot.deepspeed_plugin.config import validate, without_auto

    try:
        config, _ = without_auto(config)
        validate(config)
    except ConfigError as error:
        raise CommandError(f"{path}: {error}") from error
    return config


def _optimizer_options(config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any] | None:
    """BasisRotation's options, as the configuration and its defaults say; None for another optimizer, where stages are asked for."""
    from ds_basisrot.common.blocks import is_basis_rotation, optimizer_params
    from ds_basisrot.optim.basis_rotation import BasisRotation

    block = config.get("optimizer") or {}
    if not is_basis_rotation(block.get("type")):
        if options.stages is not None:
            return None
        raise CommandError(
            f'{options.config}: optimizer.type: is {block.get("type")!r}; set it to "BasisRotation", whose costs are planned here'
        )
    defaults = {name: p.default for name, p in inspect.signature(BasisRotation).parameters.items() if p.default is not p.empty}
    return {**defaults, **optimizer_params(block)}


def _cost_plan(model: "nn.Module", optimizer_options: dict[str, Any], path: Path) -> dict[str, Any]:
    from ds_basisrot.cli.cost_plan import cost_plan

    try:
        return cost_plan(model, optimizer_options)
    except ValueError as error:
        where = "optimizer.params." if str(error).startswith("rotate") else ""
        raise CommandError(f"{path}: {where}{error}") from error


def _stage_plan(model: "nn.Module", config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    from ds_basisrot.cli.layer_list import layers_of
    from ds_basisrot.cli.stage_plan import stage_plan

    layers = layers_of(model)
    if layers is None:
        raise CommandError(
            f"--stages: needs a sequence of layers, but {options.model} returns a {type(model).__name__}; name what returns the list of "
            "layers that PipelineModule gets, or an nn.Sequential"
        )
    accumulation = config.get("gradient_accumulation_steps", 1)
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise CommandError(f"{options.config}: gradient_accumulation_steps: must be a whole number of at least 1, got {accumulation!r}")
    return stage_plan(layers, config, options.stages, accumulation, options.partition or "parameters")


def _print(figures: dict[str, Any], json_target: str | None) -> None:
    options, totals, out = figures["options"], figures["totals"], console(json_target)
    title = f"{options['source']}, {options['geometry']}; multiply-adds; each row: all its matrices together"
    rows = table(title, ("parameters", "part", "shape", "rotated"), ("matrices", "state", "an update", "a refresh"))
    for row in figures["rows"]:
        names = [_names(row["parameters"]), row["part"] or "-", " x ".join(map(str, row["shape"])), row["sides"]]
        costs = [amount(row["state_bytes"], "B"), amount(row["update_madds"]), amount(row["refresh_madds"])]
        rows.add_row(*names, str(row["matrices"]), *costs)
    out.print(rows)

    headings = ("state", "of AdamW's", "an update", "+ refreshes, mean", "+ refreshes, worst", "as tokens")
    others = table("geometries; multiply-adds", ["geometry"], headings)
    for geometry, each in figures["geometries"].items():
        costs = [amount(each[key]) for key in ("update_madds", "mean_refresh_madds", "worst_refresh_madds")]
        ratio = f"{each['state_bytes'] / each['adamw_state_bytes']:.2f} x"
        chosen = f"{geometry} (chosen)" if geometry == options["geometry"] else geometry
        others.add_row(chosen, amount(each["state_bytes"], "B"), ratio, *costs, _tokens(each))
    out.print(others)

    for line in (
        f"rotated: {totals['rotated_parameters']} parameters, {totals['rotated_matrices']} matrices, {amount(totals['rotated_numbers'])} "
        f"numbers, state {amount(totals['rotated_state_bytes'], 'B')}",
        f"AdamW: {totals['other_parameters']} parameters, {amount(totals['other_numbers'])} numbers, "
        f"state {amount(totals['other_state_bytes'], 'B')}",
        f"together: state {amount(totals['state_bytes'], 'B')}; plain AdamW: {amount(totals['adamw_state_bytes'], 'B')}",
        f"refreshes: every {options['refresh_period']} updates, "
        + ("spread over them" if options["stagger"] else 'all at once ("stagger": false)'),
        "as tokens: so many tokens in a batch make forward and backward of the rotated weights as costly as the update with its refreshes",
    ):
        out.print(line, markup=False)
    if options["refresh_allocation"] != "uniform":
        out.print(f"refresh_allocation {options['refresh_allocation']!r}: the stages differ; the mean over all of them is as above")


def _print_ranks(figures: dict[str, Any], zero: dict[str, Any], json_target: str | None) -> None:
    out, matrices, work = console(json_target), figures["matrices"], figures["update_madds"]
    rows = table(f"ZeRO {figures['stage']}, data-parallel ranks: {figures['ranks']}", ["of a rank"], ("mean", "most", "most / mean"))
    for label, key, unit in OF_EACH_RANK:
        each = figures[key]
        rows.add_row(label, amount(each["mean"], unit), amount(each["most"], unit), f"{each['imbalance']:.3f}")
    out.print(rows)
    lines = [
        f"{matrices['moving']} of {matrices['all']} matrices move to their owner and back, {matrices['cut']} of them because they are cut "
        f"and {matrices['moving'] - matrices['cut']} for balance, in {figures['messages']} messages each way",
        "most multiply-adds: of the busiest rank of each update, for which the others wait, on average over a period",
    ]
    if work["imbalance_at_once"] < 0.9 * work["imbalance"]:
        lines.append(
            f'with "stagger": false these would be {work["imbalance_at_once"]:.2f} x the mean instead of {work["imbalance"]:.2f} x, as all '
            "ranks would refresh in the same updates, which would be slow; the fewer matrices a rank has, the more that gains"
        )
    lines += [f"zero_optimization.{key} is set: other matrices may be cut than this says" for key in OTHER_ORDER if zero.get(key)]
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)


def _print_stages(figures: dict[str, Any], config: dict[str, Any], json_target: str | None) -> None:
    out, by_stage = console(json_target), figures["by_stage"]
    title = f"stashed weights, {len(by_stage)} stages cut by {figures['partition']}"
    rows = table(title, ["stage"], ("layers", "number", "weights", "versions", "stash"))
    for stage, each in enumerate(by_stage):
        start, stop = each["layers"]
        sizes = [amount(each["weight_bytes"], "B"), str(each["versions"]), amount(each["stash_bytes"], "B")]
        rows.add_row(str(stage), f"{start} to {stop - 1}", str(stop - start), *sizes)
    out.print(rows)
    weights, stash = amount(figures["weight_bytes"], "B"), amount(figures["stash_bytes"], "B")
    most = amount(max(each["stash_bytes"] for each in by_stage), "B")
    lines = [
        f"together: weights {weights}, and beside them stash {stash}, at most {most} on a stage; of trained weights only, "
        f"{figures['element_bytes']} bytes each; microbatches per update: {figures['accumulation']}",
    ]
    if "gradient_accumulation_steps" not in config:
        lines.append("gradient_accumulation_steps is not in the file: taken as 1")
    if not figures["weight_stashing"]:
        lines.append("pipeline.weight_stashing is false: nothing is stashed, and backwards run on the newest weights")
    if (config.get("pipeline") or {}).get("schedule") != "async_1f1b":
        lines.append('pipeline.schedule is not "async_1f1b": as the file stands, the pipeline flushes and stashes nothing')
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)


def _names(parameters: list[str]) -> str:
    from ds_basisrot.cli.cost_plan import name_pattern

    patterns = list(dict.fromkeys(map(name_pattern, parameters)))
    return patterns[0] if len(patterns) == 1 else f"{patterns[0]} and {len(patterns) - 1} more"


def _tokens(totals: dict[str, Any]) -> str:
    if not totals["rotated_numbers"]:
        return "-"
    return amount((totals["update_madds"] + totals["mean_refresh_madds"]) / (TRAINING_MADDS * totals["rotated_numbers"]))
