"""The optimizer's diagnostics every so many updates: events for DeepSpeed's monitor, and a log line for each stage."""

from typing import Any

from ..optim.basis_rotation import BasisRotation
from ..optim.inspection import measure
from .log import log_stage, speaks

PREFIX = "Train/Samples/basis_rotation/"

# An event costs about as much as refreshing these twice, however many the model has; successive events go round all of them.
MATRICES_PER_EVENT = 8


def write_diagnostics(engine: Any, optimizer: BasisRotation, period: int) -> None:
    """Measure `optimizer` after every `period`-th update of `engine`, whatever its schedule; see `inspection.measure` for the metrics.

    Events are written where DeepSpeed writes its own: on rank 0, if a monitor is enabled. Under a pipeline they are of its stage; the log
    has a line of every stage. Training is the same with and without.
    """
    take_model_step = engine._take_model_step

    def step(*args: Any, **kwargs: Any) -> None:
        take_model_step(*args, **kwargs)
        if engine.global_steps % period == 0 and speaks(engine):
            _write(engine, measure(optimizer, MATRICES_PER_EVENT, turn=engine.global_steps // period - 1))

    engine._take_model_step = step


def _write(engine: Any, numbers: dict[str, float]) -> None:
    if engine.global_rank == 0 and engine.monitor.enabled:
        engine.monitor.write_events([(PREFIX + name, number, engine.global_samples) for name, number in numbers.items()])
    log_stage(engine, f"update {engine.global_steps}: " + ", ".join(f"{name} {number:.3g}" for name, number in numbers.items()))
