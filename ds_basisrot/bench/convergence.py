"""Training runs under the exact delays of the asynchronous pipeline, to compare optimizers on the same weights and batches."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ..pipeline.simulator import PipelineSimulator
from .optimizer_block import OptimizerBlock
from .text import Text
from .tiny_gpt import cut, next_byte_loss, tiny_gpt

MAX_GRAD_NORM = 1.0
FINAL_LR = 0.1
HELD_OUT_SEQUENCES = 128

# A held-out loss goes through so many bytes at a time: enough to use the processor well, few enough for its caches.
EVALUATED_BYTES = 1024


@dataclass(frozen=True)
class Setting:
    """What all runs of a comparison share.

    Attributes:
        stages: pipeline stages, 1 for training without staleness.
        updates: optimizer updates of each stage.
        layers, width, heads: of the model.
        context: bytes in a sequence.
        batch: sequences in an update.
        eval_every: updates between two held-out losses; the last update always has one.
    """

    stages: int
    updates: int
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    eval_every: int

    @property
    def warmup(self) -> int:
        """Updates of linear warm-up: a tenth, at most 100."""
        return min(100, self.updates // 10)

    def lr_share(self, update: int) -> float:
        """The share of the peak learning rate that `update` (0-based) is made with: warm-up, then half a cosine down to a tenth."""
        if update < self.warmup:
            return (update + 1) / self.warmup
        progress = min(1.0, (update - self.warmup) / max(1, self.updates - self.warmup))
        return FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))

    def build(self, seed: int) -> list[nn.Sequential]:
        """The stages, with the initial weights of this seed.

        Raises:
            ValueError: naming the field that does not fit.
        """
        if self.width % self.heads:
            raise ValueError(f"width: must be a multiple of heads ({self.heads}), got {self.width}")
        return cut(tiny_gpt(self.layers, self.width, self.heads, self.context, seed), self.stages)

    def batches(self, text: Text, seed: int) -> Tensor:
        """The sequences of every update of this seed: uint8 `[updates, batch, context + 1]`."""
        return text.training_sequences(self.updates * self.batch, self.context, seed).unflatten(0, (self.updates, self.batch))


@dataclass
class Curve:
    """The course of one run. A run ends early where a loss is not finite; the last `held_out_loss` is None then.

    Attributes:
        seed: of the initial weights and the batches.
        updates: updates made before each entry of the two below.
        held_out_loss, training_loss: nats per byte; the training loss is the mean over the updates since the entry before.
        optimizer_ms: milliseconds per update in the optimizers of all stages, mean.
        seconds: duration of the whole run.
    """

    seed: int
    updates: list[int] = field(default_factory=list)
    held_out_loss: list[float | None] = field(default_factory=list)
    training_loss: list[float | None] = field(default_factory=list)
    optimizer_ms: float = 0.0
    seconds: float = 0.0

    @property
    def final_loss(self) -> float | None:
        """The held-out loss after the last update, None where the run ended early."""
        return self.held_out_loss[-1]

    def updates_to(self, loss: float | None) -> int | None:
        """Updates until a held-out loss was at most `loss`, as far as it was evaluated; None if it never was."""
        return next((u for u, own in zip(self.updates, self.held_out_loss) if None not in (own, loss) and own <= loss), None)


def run(setting: Setting, block: OptimizerBlock, text: Text, seed: int, on_update: Callable[[], None] = lambda: None) -> Curve:
    """Train one model from its initial weights.

    Args:
        on_update: called after each update.

    Raises:
        ValueError: a setting or parameters that do not fit.
    """
    began = time.perf_counter()
    stages = setting.build(seed)
    optimizers = block.build(stages)
    timer = _Timer(optimizers)
    simulator = PipelineSimulator(
        stages,
        next_byte_loss,
        optimizers,
        max_grad_norm=MAX_GRAD_NORM,
        clip_scope="stage",
        lr_schedulers=[LambdaLR(optimizer, setting.lr_share) for optimizer in optimizers],
    )
    held_out = text.held_out_sequences(HELD_OUT_SEQUENCES, setting.context)
    curve, losses = Curve(seed), []
    for update, sequences in enumerate(setting.batches(text, seed), start=1):
        losses.append(simulator.train_batch([[_split(sequences)]]))
        on_update()
        finite = math.isfinite(losses[-1])
        if update % setting.eval_every == 0 or update == setting.updates or not finite:
            loss = _held_out_loss(stages, held_out)
            finite = finite and math.isfinite(loss)
            curve.updates.append(update)
            curve.held_out_loss.append(loss if finite else None)
            curve.training_loss.append(statistics.fmean(losses) if finite else None)
            losses = []
            if not finite:
                break
    curve.optimizer_ms = 1e3 * timer.seconds / simulator.updates
    curve.seconds = time.perf_counter() - began
    return curve


@torch.no_grad()
def _held_out_loss(stages: Sequence[nn.Module], sequences: Tensor) -> float:
    """Mean loss of the stages' newest weights."""
    total = 0.0
    for part in sequences.split(max(1, EVALUATED_BYTES // sequences.shape[1])):
        x, labels = _split(part)
        for stage in stages:
            x = stage(x)
        total += next_byte_loss(x, labels).item() * len(part)
    return total / len(sequences)


def _split(sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and labels, which are the inputs one byte later: int64 `[batch, context]` each."""
    sequences = sequences.long()
    return sequences[:, :-1], sequences[:, 1:]


class _Timer:
    """Adds up the seconds that optimizers spend in `step()`."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self.seconds = 0.0
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._start)
            optimizer.register_step_post_hook(self._stop)

    def _start(self, *_) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_) -> None:
        self.seconds += time.perf_counter() - self._started
