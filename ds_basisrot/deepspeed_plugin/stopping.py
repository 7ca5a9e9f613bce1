"""Stopping a job at one update on all ranks when a signal arrives, without a rendezvous between the stages of an asynchronous pipeline."""

import signal
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

NEVER = -1


class StopRequests:
    """What a stage knows about the update after which all stop.

    A request travels to the first stage with the gradients. The first stage names an update that is so far ahead that its activations
    tell every stage before.

    Args:
        stages: of the pipeline.

    Attributes:
        wanted: this process was asked to stop, or has heard of one that was.
        agreed: all replicas of this stage know that one of them was.
        after: the last update, or NEVER.
    """

    def __init__(self, stages: int):
        self._stages = stages
        self.wanted = self.agreed = False
        self.after = NEVER

    def heard(self, wanted: int, after: int) -> None:
        """Take in what a neighbour's message said."""
        self.wanted = self.wanted or bool(wanted)
        if after != NEVER:
            self.after = after

    def decide(self, update: int, accumulation: int) -> None:
        """On the first stage, before it makes `update`: name the last one, if a stop is wanted on a replica."""
        if self.agreed and self.after == NEVER:
            self.after = update + (self._stages - 1) // accumulation

    def due(self, updates: int) -> bool:
        """Whether it is time, after so many updates."""
        return self.after != NEVER and updates > self.after


class StopOnSignal:
    """Tells a training loop when to save and end because of a signal: after the same update on all ranks, whatever the engine.

        stop = StopOnSignal(engine)
        for ...:
            engine.train_batch(data)
            if stop():
                engine.save_checkpoint(folder)
                break

    Every rank must call it once after each update. The signals do nothing else from then on.

    Args:
        engine: a DeepSpeed engine.
        signals: that mean to stop.
    """

    def __init__(self, engine: Any, signals: Sequence[int] = (signal.SIGTERM,)):
        self._engine, self._pipeline, self._wanted = engine, getattr(engine, "async_pipeline", None), False
        for number in signals:
            signal.signal(number, self._request)

    def _request(self, *_: Any) -> None:
        self._wanted = True
        if self._pipeline is not None:
            self._pipeline.stop_requests.wanted = True

    def __call__(self) -> bool:
        """Whether to save and end now."""
        if self._pipeline is not None:
            return self._pipeline.stop_requests.due(self._engine.global_steps)
        if not dist.is_initialized():
            return self._wanted
        wanted = torch.tensor(int(self._wanted), device=self._engine.device)
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX)
        return bool(wanted.item())
