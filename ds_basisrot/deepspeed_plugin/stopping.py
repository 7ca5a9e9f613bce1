"""Stopping a DeepSpeed job after the same update on all ranks when a signal arrives."""

import signal
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


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
