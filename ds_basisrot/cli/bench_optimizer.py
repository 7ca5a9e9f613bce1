"""`ds-basisrot bench optimizer`: how long an update takes, beside AdamW, SOAP and Muon."""

import argparse
import contextlib
import os
import platform
from pathlib import Path
from typing import Any

from ds_basisrot.cli.arguments import count
from ds_basisrot.cli.choices import chosen
from ds_basisrot.cli.errors import CommandError
from ds_basisrot.cli.output import add_json_argument, amount, check_json_target, console, progress, table, write_json

NAME = "optimizer"
HELP = "measure the optimizer's speed beside others on this machine"

DESCRIPTION = """\
Times the updates of BasisRotation in its variants, of fused AdamW, and of SOAP and Muon (from pytorch-optimizer, where installed) on the
weight matrices of Transformer blocks: per block four [w, w], one [4w, w], one [w, 4w]. All train the same weights on the same gradients and
take turns, one update each. The first update (cold start) is reported apart, one period warms up, then --updates count. Times differ
between machines and hours; what this tells are ratios within one run. "Quiet" is without disturbance by other programs: for each place in
the period, the fastest of the periods; the share of the peak rate of matrix products is that of the quiet mean."""

SEED = 0

# (what is compared, (optimizer, figure), (optimizer, figure)): the first figure divided by the second, of all updates and of quiet ones.
COMPARISONS = (
    ("second-bilateral to SOAP, mean", ("second-bilateral", "mean_ms"), ("SOAP", "mean_ms")),
    ("second-auto to SOAP, mean", ("second-auto", "mean_ms"), ("SOAP", "mean_ms")),
    ("second-bilateral-T1 to SOAP, mean", ("second-bilateral-T1", "mean_ms"), ("SOAP", "mean_ms")),
    ("second-bilateral, 95th percentile to median", ("second-bilateral", "p95_ms"), ("second-bilateral", "median_ms")),
    ("SOAP, 95th percentile to median", ("SOAP", "p95_ms"), ("SOAP", "median_ms")),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("--width", type=count, default=384, metavar="W", help="width of the blocks (384)")
    parser.add_argument("--blocks", type=count, default=4, metavar="N", help="Transformer blocks (4)")
    parser.add_argument("--period", type=count, default=10, metavar="T", help="updates between two bases of a matrix (10)")
    parser.add_argument("--updates", type=count, metavar="N", help="updates that count, whole periods (three periods)")
    parser.add_argument("--threads", type=count, metavar="N", help="torch's threads (torch's own choice)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (cpu)")
    parser.add_argument("--only", metavar="NAME,...", help="these optimizers alone, named as in the table")
    add_json_argument(parser)


def run(options: argparse.Namespace) -> None:
    import torch  # here and below: the other commands need not wait for it

    from ds_basisrot.bench.contestants import NAMES, contestants

    updates = options.updates or 3 * options.period
    if updates % options.period:
        raise CommandError(
            f"--updates: must be a multiple of --period ({options.period}), so that the mean is over whole periods, got {updates}; "
            f"try {-(-updates // options.period) * options.period}"
        )
    names = list(NAMES) if options.only is None else chosen("--only", "optimizer", options.only, NAMES)
    device = _device(options.device)
    check_json_target(options.json)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    block_shapes = [(options.width, options.width)] * 4 + [(4 * options.width, options.width), (options.width, 4 * options.width)]
    present, missing = contestants(names, block_shapes * options.blocks, options.period)
    if not present:
        raise CommandError(f"--only: nothing to measure; {next(iter(missing.values()))}")

    optimizers, (peak_flops, peak_product) = _measure(present, block_shapes, options.blocks, updates, options.period, device)
    figures = {
        "settings": {
            "width": options.width, "blocks": options.blocks, "block_shapes": [list(shape) for shape in block_shapes],
            "updates": updates, "period": options.period, "device": str(device), "seed": SEED,
            "percentile": "linear interpolation between order statistics, at position 0.95 (n - 1)",
        },
        "machine": _machine(device),
        "peak": {"flops_per_s": peak_flops, "product": peak_product},
        "optimizers": optimizers,
        "comparisons": {
            label: {
                kind: optimizers[first][kind][figure] / optimizers[second][kind][other] for kind in ("all", "quiet")
            }
            for label, (first, figure), (second, other) in COMPARISONS
            if first in optimizers and second in optimizers
        },
        "missing": missing,
    }  # fmt: skip
    _print(figures, options.json)
    write_json(options.json, figures)


def _measure(present: list, block_shapes: list[tuple[int, int]], blocks: int, updates: int, period: int, device) -> tuple[dict, tuple]:
    """The figures of each optimizer by its name, and the peak (flops per second, sizes of that product)."""
    from ds_basisrot.bench.timing import NotTrained, matmul_peak, measure, rounds_of

    before = matmul_peak(block_shapes, device)
    with progress(sum(len(rounds_of(each, updates, period)) for each in present)) as on_update:
        try:
            timings = measure(present, block_shapes, blocks, updates, period, device, SEED, on_update)
        except NotTrained as error:
            raise CommandError(error) from error
    peak = max(before, matmul_peak(block_shapes, device))  # twice, for a machine that is busy for a while

    optimizers: dict[str, dict[str, Any]] = {}
    for each in present:
        timing = timings[each.name]
        statistics, quiet = timing.statistics(), timing.quiet_statistics()
        flops = None if each.update_madds is None else 2 * each.update_madds
        optimizers[each.name] = {
            "options": each.options,
            "updates": len(timing.update_ms),
            "all": statistics,
            "quiet": quiet,
            "first_update_ms": timing.first_update_ms,
            "state_bytes": timing.state_bytes,
            "update_flops": flops,
            "share_of_peak": None if flops is None else flops / quiet["mean_ms"] * 1e3 / peak[0],
            "update_ms": timing.update_ms,
            "warm_up_ms": timing.warm_up_ms,
        }
    for kind in ("all", "quiet"):
        soap_ms = optimizers["SOAP"][kind]["mean_ms"] if "SOAP" in optimizers else None
        for figures in optimizers.values():
            figures[kind]["mean_to_soap"] = None if soap_ms is None else figures[kind]["mean_ms"] / soap_ms
    return optimizers, peak


def _print(figures: dict[str, Any], json_target: str | None) -> None:
    settings, machine, peak, out = figures["settings"], figures["machine"], figures["peak"], console(json_target)
    title = f"{settings['blocks']} x 6 matrices of width {settings['width']}, a new basis every {settings['period']} updates; times in ms"
    columns = ("mean", "median", "95%", "slowest", "first", "quiet", "mean/SOAP", "quiet/SOAP", "of peak", "state")
    rows = table(title, ["optimizer"], columns)
    for name, each in figures["optimizers"].items():
        whole, quiet = each["all"], each["quiet"]
        times = [*(whole[key] for key in ("mean_ms", "median_ms", "p95_ms", "max_ms")), each["first_update_ms"], quiet["mean_ms"]]
        ratios = ["-" if kind["mean_to_soap"] is None else f"{kind['mean_to_soap']:.3f}" for kind in (whole, quiet)]
        share = "-" if each["share_of_peak"] is None else f"{each['share_of_peak']:.0%}"
        rows.add_row(name, *(f"{time_ms:.4g}" for time_ms in times), *ratios, share, amount(each["state_bytes"], "B"))
    out.print(rows)
    for name, reason in figures["missing"].items():
        out.print(f"{name} left out: {reason}", markup=False)
    for label, ratios in figures["comparisons"].items():
        out.print(f"{label}: {ratios['all']:.3f}, quiet {ratios['quiet']:.3f}")
    out.print(
        f"{machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}; "
        f"peak {amount(peak['flops_per_s'], 'flop/s')} in fp32 at {' x '.join(map(str, peak['product']))}",
        markup=False,
    )


def _device(text: str):
    import torch

    try:
        device = torch.device(text)
        torch.zeros(1, device=device).item()  # a device without storage, such as "meta", fails here
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: torch built without it
        raise CommandError(f"--device: cannot use {text!r}: {str(error).splitlines()[0]}") from error
    return device


def _machine(device) -> dict[str, Any]:
    import torch

    return {
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
