"""The picture of `ds-basisrot timeline`: one lane per stage over time, and beside it what each stage pays."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from ds_basisrot.pipeline.chrome_trace import BACKWARD, FORWARD, UPDATE
from ds_basisrot.pipeline.timeline import Figures, Span, Timeline

# Colours of even and odd microbatches.
COLOURS = {FORWARD: ("#4c8bc4", "#8fbbe0"), BACKWARD: ("#e08a3c", "#f2bc86"), UPDATE: ("#202020", "#202020")}
NAMES = {FORWARD: "forward", BACKWARD: "backward", UPDATE: "update"}

DPI = 110
WIDTH_INCHES = 15.0
LANE_INCHES, LEAST_INCHES, MOST_INCHES = 0.34, 2.0, 5.2
"""Height of a lane, and of all lanes together."""

MOST_RECTANGLES = 20_000
"""More are painted as an image, each pixel with the mean colour of its time."""

CLEAR_PIXELS = 12
"""If a microbatch is narrower than this, a second panel shows a part of the run."""

ZOOM_MICROBATCHES, ZOOM_STAGES = 16, 48
"""What the second panel shows at most."""

DIGIT_PIXELS, TEXT_PIXELS = 6.5, 12.0
"""Of a microbatch's number: width of a digit, height."""

Lanes = Sequence[Sequence[Span]]


def draw(path: Path, timeline: Timeline, figures: Figures, title: str, end_ms: float) -> None:
    """Write a PNG of bounded size.

    Args:
        path: the file.
        timeline: what the lanes show.
        figures: what the panels beside them show.
        title: one line.
        end_ms: up to when the lanes are shown.

    Raises:
        OSError: the file cannot be written.
    """
    lanes, stages = timeline.lanes, len(timeline.lanes)
    height = min(max(LANE_INCHES * stages, LEAST_INCHES), MOST_INCHES)
    needs_zoom = WIDTH_INCHES * 0.6 * DPI * figures.period_ms / end_ms < CLEAR_PIXELS
    rows = 2 if needs_zoom else 1
    total = rows * (height + 0.85) + 0.75
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(WIDTH_INCHES, total), dpi=DPI)
        figure.suptitle(title, x=0.05, y=1 - 0.12 / total, ha="left", va="top", fontsize=11, parse_math=False)
        handles = [Patch(color=COLOURS[kind][0], label=name) for kind, name in NAMES.items()]
        figure.legend(
            handles=[*handles, Patch(fc="white", ec="0.6", label="idle")],
            loc="upper right", bbox_to_anchor=(0.985, 1 - 0.05 / total), ncols=4, frameon=False,
        )  # fmt: skip
        grid = GridSpec(
            rows, 4, figure, width_ratios=(7, 1, 1, 1), left=0.05, right=0.985, bottom=0.55 / total, top=1 - 0.75 / total,
            wspace=0.08, hspace=0.85 / height,
        )  # fmt: skip
        axes = figure.add_subplot(grid[0, 0])
        _draw_lanes(axes, lanes, 0, 0.0, end_ms)
        _draw_figures([figure.add_subplot(grid[0, column], sharey=axes) for column in (1, 2, 3)], figures)
        if needs_zoom:
            last_ms = min(end_ms, *(lane[-1].end_ms for lane in lanes))
            first_ms = max(0.0, last_ms - ZOOM_MICROBATCHES * figures.period_ms)
            first = max(0, min(figures.slowest - ZOOM_STAGES // 2, stages - ZOOM_STAGES))
            part = lanes[first : first + ZOOM_STAGES]
            axes.add_patch(Rectangle((first_ms, first - 0.5), last_ms - first_ms, len(part), color="black", alpha=0.25, lw=0))
            zoomed = figure.add_subplot(grid[1, :])
            _draw_lanes(zoomed, part, first, first_ms, last_ms)
            zoomed.set_title(f"the part shaded above: time of {ZOOM_MICROBATCHES} microbatches", loc="left", fontsize=9)
        figure.savefig(path, format="png")


def _draw_lanes(axes: Axes, lanes: Lanes, first_stage: int, first: float, last: float) -> None:
    """Lanes of the stages from `first_stage` on, from `first` to `last` ms."""
    top, bottom = first_stage - 0.5, first_stage + len(lanes) - 0.5
    axes.set_xlim(first, last)
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set_xlabel("ms", labelpad=1)
    axes.set_ylabel("stage")
    spans = [s for lane in lanes for s in lane if s.kind in COLOURS and s.end_ms >= first and s.start_ms <= last]
    if len(spans) > MOST_RECTANGLES:
        axes.imshow(_image(axes, lanes, first, last), extent=(first, last, bottom, top), aspect="auto", interpolation="nearest")
        axes.set_title("each pixel: the mean colour of its time", loc="left", fontsize=9)
        return
    box = axes.get_window_extent()
    pixel_ms, lane_pixels = (last - first) / box.width, box.height / len(lanes)
    half = 0.42 if lane_pixels > 6 else 0.5
    least = {FORWARD: 0.0, BACKWARD: 0.0, UPDATE: 1.5 * pixel_ms}  # updates may take no time
    for kind, colours in COLOURS.items():
        for parity in (0, 1):
            chosen = [s for s in spans if s.kind == kind and s.microbatch % 2 == parity]
            corners = [_corners(s.start_ms, max(s.end_ms, s.start_ms + least[kind]), s.stage, half) for s in chosen]
            axes.add_collection(PolyCollection(corners, facecolors=colours[parity], linewidths=0, antialiaseds=lane_pixels > 6))
    for span in spans:
        text, visible = str(span.microbatch), min(span.end_ms, last) - max(span.start_ms, first)
        if span.kind != UPDATE and lane_pixels >= TEXT_PIXELS and visible >= (len(text) * DIGIT_PIXELS + 2) * pixel_ms:
            middle = (max(span.start_ms, first) + min(span.end_ms, last)) / 2
            axes.text(middle, span.stage, text, ha="center", va="center", fontsize=7, clip_on=True)


def _corners(start: float, end: float, stage: int, half: float) -> list[tuple[float, float]]:
    return [(start, stage - half), (end, stage - half), (end, stage + half), (start, stage + half)]


def _image(axes: Axes, lanes: Lanes, first: float, last: float) -> np.ndarray:
    """Colours `[stage, column, 3]`: each kind by its share of the column's time, white for the rest."""
    edges = np.linspace(first, last, int(axes.get_window_extent().width) + 1)
    image = np.ones((len(lanes), len(edges) - 1, 3))
    for kind, colours in COLOURS.items():
        colour = np.array(matplotlib.colors.to_rgb(colours[0]))
        for stage, lane in enumerate(lanes):
            ends = np.array([(s.start_ms, s.end_ms) for s in lane if s.kind == kind])
            until = np.cumsum(ends[:, 1] - ends[:, 0])  # time of this kind until the end of each span
            done = np.stack([until - (ends[:, 1] - ends[:, 0]), until], axis=1)
            share = np.diff(np.interp(edges, ends.ravel(), done.ravel())) / np.diff(edges)
            image[stage] += share[:, None] * (colour - 1)
    return image.clip(0, 1)


def _draw_figures(panels: Sequence[Axes], figures: Figures) -> None:
    columns = {
        "staleness\n(updates, mean)": [stage.staleness_updates for stage in figures.stages],
        "weight versions\nstashed": [stage.versions for stage in figures.stages],
        "bubble\n(%)": [100 * stage.bubble for stage in figures.stages],
    }
    edges = np.arange(len(figures.stages) + 1) - 0.5
    for axes, (heading, values) in zip(panels, columns.items()):
        axes.stairs(values, edges, orientation="horizontal", fill=True, color="0.55")
        axes.set_title(heading, fontsize=9)
        axes.set_xlim(0, 100 if "%" in heading else 1.08 * max(1, *values))
        axes.tick_params(labelleft=False)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
        axes.grid(axis="x", color="0.85", lw=0.5)
