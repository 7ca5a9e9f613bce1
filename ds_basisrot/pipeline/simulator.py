"""Delayed-gradient training of all stages in one process: the slow, obvious oracle that every real engine is compared with."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .simulated_clipping import ClipHistory
from .simulated_ties import apply, exchange, find_ties
from .weight_prediction import predicted_changes


class PipelineSimulator:
    """Trains a pipeline as the asynchronous schedule does, from the version rule alone.

    Microbatch m is forwarded at stage k with the weights after those updates that stage k had made when it had trained max(cut, m - tau_k)
    microbatches, tau_k = P - 1 - k, and its gradient goes into the update of its call: with `accumulation` microbatches in every update,
    after floor(max(cut, m - tau_k) / accumulation) updates and into update floor(m / accumulation). Whole weights of past versions are kept
    and put into the modules, norms and gradients under way are kept in lists; nothing is shared with the engine's way of doing it.

    An optimizer may update copies of the stage's parameters, say in float32. It then has a method `take_gradients()`, which is called once
    before `step()`, moves the parameters' gradients to the copies and returns the copies, in the order of the parameters. Clipping and
    tying act on the copies' gradients.

    Args:
        stages: one module per stage; the output of one is the input of the next.
        loss_fn: (output of the last stage, labels) -> scalar loss.
        optimizers: one per stage. Those that share refreshes with other stages (BasisRotation) are told about all stages.
        accumulation: microbatches per update.
        weight_stashing: False back-propagates every stage on its newest weights (activations still come from older ones).
        max_grad_norm: clip each stage's gradient to this norm; 0 does not clip (DeepSpeed's default is 1.0).
        clip_scope: whose norm that is: "stage", the stage's own, or "lagged_global", that of all stages, of which a stage knows its own of
            this update and those of the others that have arrived: from stage j < k with the last activation that stage k forwarded, from
            j > k with the last gradient. Norms that are not finite do not travel.
        tied: pairs ((stage i, parameter's name in that stage), (stage j, name)), i < j, of equal parameters that stay equal. In update u
            both apply the sum of their gradients of updates v <= u - D that are not applied yet, D = ceil((j - i) / accumulation), each
            clipped by the smaller of the two stages' factors of update v.
        lr_correction_updates: N > 0 divides the learning rate of update u by max(1, tau_k / accumulation) ** (1 - min(u / N, 1)).
        delay_compensation: lambda > 0 adds lambda * accumulation * g**2 * (w_now - w_then) to each microbatch's gradient g (of its loss /
            accumulation): w_then are the weights it was forwarded with, w_now the newest.
        weight_prediction: forward and back-propagate on weights predicted ceil(tau_k / accumulation) of Adam's updates ahead, from the
            optimizer's state and learning rate at that version; for Adam, AdamW and BasisRotation.
        lr_schedulers: stepped after each update.

    Raises:
        ValueError: arguments out of range, or that do not go together.
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
        clip_scope: str = "lagged_global",
        tied: Sequence[tuple[tuple[int, str], tuple[int, str]]] = (),
        lr_correction_updates: int = 0,
        delay_compensation: float = 0.0,
        weight_prediction: bool = False,
        lr_schedulers: Iterable[Any] = (),
    ):
        if len(stages) != len(optimizers):
            raise ValueError(f"stages and optimizers: one optimizer per stage, got {len(stages)} and {len(optimizers)}")
        for name, value in (("lr_correction_updates", lr_correction_updates), ("delay_compensation", delay_compensation)):
            if value < 0:
                raise ValueError(f"{name}: must be >= 0, got {value}")
        for name, value in (("delay_compensation", delay_compensation), ("weight_prediction", weight_prediction)):
            if value and not weight_stashing:
                raise ValueError(f"{name}: needs weight_stashing, which is off; switch one of them")
        if lr_correction_updates and tied:
            raise ValueError("lr_correction_updates: tied weights need one learning rate on both stages; leave it at 0")
        self.stages, self.optimizers, self.loss_fn = list(stages), list(optimizers), loss_fn
        self.weight_stashing, self.delay_compensation, self.weight_prediction = weight_stashing, delay_compensation, weight_prediction
        self.lr_correction_updates = lr_correction_updates
        self.lr_schedulers = list(lr_schedulers)
        self._tau = [len(stages) - 1 - k for k in range(len(stages))]
        self._clipping = ClipHistory(len(stages), max_grad_norm, clip_scope)
        self._ties = find_ties(stages, tied)
        self._trained_after, self._cut = [0], 0  # microbatches: trained when n updates had been made, by n; at the last cut
        self._live = [[p.data for p in self._weights(k)] for k in range(len(stages))]
        self._history: list[dict[int, list[Tensor]]] = [{} for _ in stages]  # [stage][version][parameter]
        self._forwarded: list[dict[int, list[Tensor]]] = [{} for _ in stages]  # the same, what microbatches are forwarded with
        self.set_accumulation(accumulation)

    @property
    def updates(self) -> int:
        """Updates made by every stage."""
        return len(self._trained_after) - 1

    @property
    def trained(self) -> int:
        """Microbatches whose gradient is in an update, for each replica."""
        return self._trained_after[-1]

    def train_batch(self, replicas: Sequence[Sequence[tuple[Any, Any]]]) -> float:
        """One update of every stage.

        Args:
            replicas: for each data-parallel replica its `accumulation` microbatches (inputs, labels), of any shape each.

        Returns:
            The mean loss of the microbatches.

        Raises:
            ValueError: a replica has another number of microbatches.
        """
        if any(len(microbatches) != self.accumulation for microbatches in replicas):
            raise ValueError(f"train_batch: each replica needs {self.accumulation} microbatches, got {[len(m) for m in replicas]}")
        gradients, losses = [], []
        for microbatches in replicas:
            total: list[list[Tensor | None]] = [[None] * len(self._weights(k)) for k in range(len(self.stages))]
            for index, (inputs, labels) in enumerate(microbatches):
                loss, parts = self._forward_backward(self.trained + index, inputs, labels)
                losses.append(loss)
                total = [[_add(a, b) for a, b in zip(*pair)] for pair in zip(total, parts)]
            gradients.append(total)
        self._set_mean_gradients(gradients)
        self._clip_and_tie()
        for k in range(len(self.stages)):
            self._step(k)
        for scheduler in self.lr_schedulers:
            scheduler.step()
        self._trained_after.append(self.trained + self.accumulation)
        self._note_weights()
        return sum(losses) / len(losses)

    def cut(self) -> None:
        """Drop the forwards in flight, as writing a checkpoint does: they run again with the present weights."""
        self._cut = self.trained

    def set_accumulation(self, accumulation: int) -> None:
        """Cut, and go on with another number of microbatches per update; optimizers are told how late the stages are from now on.

        Raises:
            ValueError: it is less than 1.
        """
        if accumulation < 1:
            raise ValueError(f"accumulation: must be >= 1, got {accumulation}")
        self.accumulation = accumulation
        self.cut()
        self._share_refreshes()
        self._note_weights()

    def _share_refreshes(self) -> None:
        """Tell each optimizer how late every stage is in updates, on average, and what refreshing all bases of every stage costs."""
        sharing = [hasattr(o, "share_refreshes") for o in self.optimizers]
        late = [tau / self.accumulation for tau in self._tau]
        costs = [optimizer.refresh_cost() if shares else 0 for optimizer, shares in zip(self.optimizers, sharing)]
        for k, optimizer in enumerate(self.optimizers):
            if sharing[k]:
                optimizer.share_refreshes(late, costs, k)

    def _version(self, stage: int, microbatch: int) -> int:
        """Updates that the stage had made when it forwarded the microbatch."""
        return bisect_right(self._trained_after, max(self._cut, microbatch - self._tau[stage])) - 1

    def _note_weights(self) -> None:
        """Keep the present weights as a version, with what is forwarded on it, and forget the versions that no microbatch will see."""
        for k, (history, forwarded) in enumerate(zip(self._history, self._forwarded)):
            history[self.updates] = [p.data.clone() for p in self._weights(k)]
            changes = self._predicted_changes(k)
            forwarded[self.updates] = [w + changes[p] if p in changes else w for p, w in zip(self._weights(k), history[self.updates])]
            oldest = self._version(k, self.trained)
            for version in [v for v in history if v < oldest]:
                del history[version], forwarded[version]

    def _predicted_changes(self, stage: int) -> dict[nn.Parameter, Tensor]:
        if not self.weight_prediction or self._tau[stage] == 0:
            return {}
        return predicted_changes(self.optimizers[stage], -(-self._tau[stage] // self.accumulation))

    def _forward_backward(self, microbatch: int, inputs: Any, labels: Any) -> tuple[float, list[list[Tensor | None]]]:
        """The loss of a microbatch, and the gradient of loss / accumulation for each stage's parameters."""
        then = [self._forwarded[k][self._version(k, microbatch)] for k in range(len(self.stages))]
        newest = [history[self.updates] for history in self._history]
        for k in range(len(self.stages)):
            for p, weight in zip(self._weights(k), then[k]):
                p.data, p.grad = weight.clone(), None
        x = inputs
        for stage in self.stages:
            x = stage(x)
        loss = self.loss_fn(x, labels)
        if not self.weight_stashing:
            for k in range(len(self.stages)):
                for p, weight in zip(self._weights(k), newest[k]):
                    p.data.copy_(weight)  # in place: what autograd saved of the weights changes with them
        (loss / self.accumulation).backward()
        for k in range(len(self.stages)):
            for p, live in zip(self._weights(k), self._live[k]):
                p.data = live
        gradients = [
            [self._compensated(p.grad, now, old) for p, now, old in zip(self._weights(k), newest[k], then[k])]
            for k in range(len(self.stages))
        ]
        return loss.item(), gradients

    def _compensated(self, gradient: Tensor | None, now: Tensor, then: Tensor) -> Tensor | None:
        if gradient is None or not self.delay_compensation:
            return gradient
        g, change = gradient.float(), now.float() - then.float()
        return (g + self.delay_compensation * self.accumulation * g * g * change).to(gradient.dtype)

    def _set_mean_gradients(self, gradients: list[list[list[Tensor | None]]]) -> None:
        for k in range(len(self.stages)):
            for index, p in enumerate(self._weights(k)):
                parts = [g[k][index] for g in gradients if g[k][index] is not None]
                p.grad = sum(part / len(gradients) for part in parts) if parts else None

    def _clip_and_tie(self) -> None:
        """From the mean gradients of this update to what the optimizers apply."""
        holders: dict[nn.Parameter, nn.Parameter] = {}  # what the optimizer applies the gradient of, by the stage's parameter
        for k, optimizer in enumerate(self.optimizers):
            weights = self._weights(k)
            holders.update(zip(weights, optimizer.take_gradients() if hasattr(optimizer, "take_gradients") else weights))
        for tie in self._ties:
            exchange(tie, [holders[p] for p in tie.copies], self.updates, self.accumulation)
        gradients = [[holders[p].grad for p in self._weights(k) if holders[p].grad is not None] for k in range(len(self.stages))]
        self._clipping.clip(gradients, [self._norms_heard_of(k) for k in range(len(self.stages))])
        for tie in self._ties:
            apply(tie, [holders[p] for p in tie.copies], self._clipping.factors)

    def _norms_heard_of(self, stage: int) -> list[int]:
        """Of how many updates of each other stage this one has heard when it clips."""
        forwarded_last = self.trained + self.accumulation - 1 + self._tau[stage]
        return [self._version(j, forwarded_last) if j < stage else self.updates for j in range(len(self.stages))]

    def _step(self, stage: int) -> None:
        """The optimizer's step, at the corrected learning rate; schedulers and logs keep theirs."""
        groups = self.optimizers[stage].param_groups
        rates = [group["lr"] for group in groups]
        remaining = 1 - min(self.updates / self.lr_correction_updates, 1) if self.lr_correction_updates else 0
        for group in groups:
            group["lr"] = group["lr"] / max(1, self._tau[stage] / self.accumulation) ** remaining
        self.optimizers[stage].step()
        for group, rate in zip(groups, rates):
            group["lr"] = rate

    def _weights(self, stage: int) -> list[nn.Parameter]:
        return [p for p in self.stages[stage].parameters() if p.requires_grad]


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
