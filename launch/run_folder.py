"""The folder a run leaves behind: model.json, metrics.csv, checkpoints/, summary.json and loss.png.

Imports no torch, so that a name already taken or nothing to resume is reported before torch is loaded.
"""

import csv
import json
import os
from pathlib import Path

FIELDS = ("update", "loss", "held_out_loss", "lr", "updates_per_s", "tokens")
AVERAGED_UPDATES = 10
TAG = "update_{:06d}"


class RunFolder:
    """One run's folder. Only rank 0 writes to it, except for checkpoints/, where DeepSpeed lets every rank write its part."""

    def __init__(self, path: Path):
        self.path = path
        self.model = path / "model.json"
        self.metrics = path / "metrics.csv"
        self.checkpoints = path / "checkpoints"
        self.summary = path / "summary.json"
        self.picture = path / "loss.png"

    def check_unused(self) -> None:
        """Raises ValueError where a run has already left something: nothing is ever overwritten."""
        if (self.checkpoints / "latest").exists():
            raise ValueError(f"{self.path} already holds a run: go on with it by --resume, or give another --name")
        if self.metrics.exists() or self.checkpoints.exists():
            raise ValueError(f"{self.path} holds a run that saved no checkpoint: give another --name, or remove the folder")

    def check_resumable(self, model: dict[str, int]) -> int:
        """The number of updates the last checkpoint has behind it.

        Raises:
            ValueError: there is no checkpoint, or it is of a model that other flags describe.
        """
        try:
            updates = int((self.checkpoints / "latest").read_text().strip().removeprefix(TAG.split("{")[0]))
            saved = json.loads(self.model.read_text())
        except (OSError, ValueError):
            raise ValueError(f"nothing to resume in {self.path}: no checkpoint there") from None
        other = [flag for flag in model if model[flag] != saved.get(flag)]
        if other:
            was, now = (" ".join(f"--{flag} {values.get(flag)}" for flag in other) for values in (saved, model))
            raise ValueError(f"--resume: {self.path} was trained with {was}, not with {now}")
        return updates

    def start(self, model: dict[str, int], updates_done: int) -> "Metrics":
        """Make the folder (or go on with it) and open its metrics.csv."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.model.write_text(json.dumps(model, indent=1) + "\n")
        return Metrics(self.metrics, updates_done)

    def finish(self, summary: dict, title: str) -> dict:
        """Write summary.json (completed with the losses that metrics.csv holds) and loss.png; returns the summary."""
        rows = read_metrics(self.metrics)
        losses = [row["loss"] for row in rows]
        first, last = losses[:AVERAGED_UPDATES], losses[-AVERAGED_UPDATES:]
        held_out = [row["held_out_loss"] for row in rows if row["held_out_loss"] is not None]
        summary = {
            "updates": rows[-1]["update"],
            "first_loss": sum(first) / len(first),
            "last_loss": sum(last) / len(last),
            "held_out_loss": held_out[-1],
            **summary,
        }
        self.summary.write_text(json.dumps(summary, indent=1) + "\n")
        draw_losses(rows, title, self.picture)
        return summary


class Metrics:
    """metrics.csv, one row per update, on disk as soon as it is written.

    Rows after `updates_done` are dropped when it opens: they belong to updates that the resumed checkpoint does not have
    and that are now made again.
    """

    def __init__(self, path: Path, updates_done: int):
        kept = [row for row in read_metrics(path) if row["update"] <= updates_done] if path.exists() else []
        replacement = path.with_suffix(".csv.new")
        with replacement.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(kept)
        os.replace(replacement, path)
        self._file = path.open("a", newline="")
        self._writer = csv.DictWriter(self._file, FIELDS)

    def write(self, **row) -> None:
        """Append one row; the keys are FIELDS, and None becomes an empty cell."""
        self._writer.writerow(row)
        self._file.flush()


def read_metrics(path: Path) -> list[dict]:
    """The whole rows of metrics.csv as numbers, empty cells as None; a last line cut short by a crash is left out."""
    with path.open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    rows = []
    for row in csv.DictReader(lines):
        numbers = {field: float(cell) if cell else None for field, cell in row.items()}
        rows.append({**numbers, "update": int(row["update"]), "tokens": int(row["tokens"])})
    return rows


def draw_losses(rows: list[dict], title: str, picture: Path) -> None:
    """Training loss (thin), its moving average, and held-out loss (points) over updates, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    updates = np.array([row["update"] for row in rows])
    losses = np.array([row["loss"] for row in rows])
    measured = [row for row in rows if row["held_out_loss"] is not None]
    window = max(1, len(rows) // 40)

    figure, axes = plt.subplots(figsize=(8, 4.5), constrained_layout=True)
    axes.plot(updates, losses, color="tab:blue", alpha=0.3, linewidth=0.6, label="training, each update")
    if window > 1:
        smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(updates[window // 2 :][: len(smooth)], smooth, color="tab:blue", label=f"training, mean of {window} updates")
    at, held_out = [row["update"] for row in measured], [row["held_out_loss"] for row in measured]
    axes.plot(at, held_out, "o", color="tab:orange", markersize=4, label="held out")
    axes.set(xlabel="update", ylabel="loss (nats per byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    plt.close(figure)
