"""Delayed-gradient training of all stages in one process: the slow, obvious oracle that every real engine is compared with."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .schedule import AsyncSchedule, forward_version, staleness


class PipelineSimulator:
    """Trains a pipeline as the asynchronous schedule does, from the version rule alone.

    Microbatch m is forwarded at stage k with the weights after floor(max(cut, m - tau_k) / accumulation) updates, tau_k = P - 1 - k, and
    its gradient goes into update floor(m / accumulation). Whole weights of past versions are kept and put into the modules; nothing is
    shared with the engine's own way of stashing.

    Args:
        stages: one module per stage; the output of one is the input of the next.
        loss_fn: (output of the last stage, labels) -> scalar loss.
        optimizers: one per stage. Those that share refreshes with other stages (BasisRotation) are told about all stages.
        accumulation: microbatches per update.
        weight_stashing: False back-propagates every stage on its newest weights (activations still come from older ones).
        max_grad_norm: clip each stage's gradient to this norm; 0 does not clip (DeepSpeed's default is 1.0).
        lr_schedulers: stepped after each update.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        loss_fn: Callable[[Any, Any], Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        accumulation: int = 1,
        weight_stashing: bool = True,
        max_grad_norm: float = 0.0,
        lr_schedulers: Iterable[Any] = (),
    ):
        if accumulation < 1:
            raise ValueError(f"accumulation: must be >= 1, got {accumulation}")
        if len(stages) != len(optimizers):
            raise ValueError(f"stages and optimizers: one optimizer per stage, got {len(stages)} and {len(optimizers)}")
        self.stages, self.optimizers, self.loss_fn = list(stages), list(optimizers), loss_fn
        self.accumulation, self.weight_stashing, self.max_grad_norm = accumulation, weight_stashing, max_grad_norm
        self.lr_schedulers = list(lr_schedulers)
        self.trained = self._cut = 0  # microbatches
        self._live = [[p.data for p in self._weights(k)] for k in range(len(stages))]
        self._history = [{0: [t.clone() for t in live]} for live in self._live]  # [stage][version][parameter]
        self.updates = 0
        self._share_refreshes()

    def train_batch(self, replicas: Sequence[Sequence[tuple[Any, Any]]]) -> float:
        """One update of every stage.

        Args:
            replicas: for each data-parallel replica its `accumulation` microbatches (inputs, labels).

        Returns:
            The mean loss of the microbatches.

        Raises:
            ValueError: a replica has another number of microbatches.
        """
        if any(len(microbatches) != self.accumulation for microbatches in replicas):
            raise ValueError(f"train_batch: each replica needs {self.accumulation} microbatches, got {[len(m) for m in replicas]}")
        gradients, losses = [], []
        for microbatches in replicas:
            self._zero_grad()
            for index, (inputs, labels) in enumerate(microbatches):
                losses.append(self._forward_backward(self.trained + index, inputs, labels))
            gradients.append([[None if p.grad is None else p.grad.clone() for p in self._weights(k)] for k in range(len(self.stages))])
        self._set_mean_gradients(gradients)
        for k, optimizer in enumerate(self.optimizers):
            if self.max_grad_norm > 0:
                torch.nn.utils.clip_grad_norm_(self._weights(k), self.max_grad_norm)
            optimizer.step()
        for scheduler in self.lr_schedulers:
            scheduler.step()
        self.trained += self.accumulation
        self.updates += 1
        for k, history in enumerate(self._history):
            history[self.updates] = [p.data.clone() for p in self._weights(k)]
            oldest = self._version(k, self.trained)
            for version in [v for v in history if v < oldest]:
                del history[version]
        return sum(losses) / len(losses)

    def cut(self) -> None:
        """Drop the forwards in flight, as writing a checkpoint does: they run again with the present weights."""
        self._cut = self.trained

    def _share_refreshes(self) -> None:
        """Tell each optimizer how late every stage is in updates, on average, and what refreshing all bases of every stage costs."""
        schedule, sharing = AsyncSchedule(len(self.stages), self.accumulation), [hasattr(o, "share_refreshes") for o in self.optimizers]
        late = [schedule.staleness(k) / self.accumulation for k in range(len(self.stages))]
        costs = [optimizer.refresh_cost() if shares else 0 for optimizer, shares in zip(self.optimizers, sharing)]
        for k, optimizer in enumerate(self.optimizers):
            if sharing[k]:
                optimizer.share_refreshes(late, costs, k)

    def _version(self, stage: int, microbatch: int) -> int:
        return forward_version(microbatch, staleness(stage, len(self.stages)), self.accumulation, self._cut)

    def _forward_backward(self, microbatch: int, inputs: Any, labels: Any) -> float:
        for k in range(len(self.stages)):
            for p, then in zip(self._weights(k), self._history[k][self._version(k, microbatch)]):
                p.data = then.clone()
        x = inputs
        for stage in self.stages:
            x = stage(x)
        loss = self.loss_fn(x, labels)
        if not self.weight_stashing:
            for k in range(len(self.stages)):
                for p, newest in zip(self._weights(k), self._history[k][self.updates]):
                    p.data.copy_(newest)  # in place: what autograd saved of the weights changes with them
        (loss / self.accumulation).backward()
        for k in range(len(self.stages)):
            for p, live in zip(self._weights(k), self._live[k]):
                p.data = live
        return loss.item()

    def _set_mean_gradients(self, gradients: list[list[list[Tensor | None]]]) -> None:
        for k in range(len(self.stages)):
            for index, p in enumerate(self._weights(k)):
                parts = [g[k][index] for g in gradients if g[k][index] is not None]
                p.grad = sum(part / len(gradients) for part in parts) if parts else None

    def _zero_grad(self) -> None:
        for k in range(len(self.stages)):
            for p in self._weights(k):
                p.grad = None

    def _weights(self, stage: int) -> list[nn.Parameter]:
        return [p for p in self.stages[stage].parameters() if p.requires_grad]
