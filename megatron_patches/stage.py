"""Runs the actions of the no-flush schedule on one stage: Megatron's own forward and backward steps, with the data and weights of each."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type

from ds_basisrot.pipeline.stage_loop import StageLoop

from . import names
from .feed import Feed

DATA_ENDED = "the data ended in the last step; stop training there, or pass an iterator that goes on"

LOSS_FIELDS = 1  # of a gradient message before the norms; Megatron reports losses on the last stage alone, so it stays zero


class Stage(StageLoop):
    """A stage of a Megatron model.

    Args:
        model: the chunk of this rank, wrapped in DistributedDataParallel.
        loop: what `StageLoop` takes.

    Attributes:
        feed: the data of this rank.
        last: the last microbatch of the job, where it is known: none after it is read.
    """

    def __init__(self, model: torch.nn.Module, *loop: Any):
        super().__init__(*loop)
        self.model, self.feed = model, Feed(None)
        self.last: int | None = None
        self._model_type = (get_model_type(model),) if names.family().backward_takes_model_type else ()
        self._call: Call | None = None

    def train(self, call: "Call", filled: bool, updates: Callable[[], int]) -> None:
        """The actions of one call; see `StageLoop.call`."""
        self._call = call
        self.call(call.end - call.microbatches, call.microbatches, filled, updates)

    def activation_sent(self, microbatch: int) -> None:
        if microbatch not in self.holes:
            schedules.deallocate_output_tensor(self.outputs[microbatch], self._call.config.deallocate_pipeline_outputs)

    def forward(self, microbatch: int) -> None:
        call = self._call
        needed = microbatch < call.end
        self.feed.begin(microbatch)
        if self.is_first and not needed and not self._data_go_on(microbatch):
            self.holes.add(microbatch)
        if microbatch in self.holes:
            if needed:
                raise RuntimeError(DATA_ENDED)
            return
        inputs = None if self.is_first else self.inputs[microbatch]
        with self.versions.forward(microbatch):
            outputs, _ = schedules.forward_step(
                call.forward_step_func,
                self.feed if self.feed.source is not None else None,
                self.model,
                call.microbatches,
                [inputs],
                call.reports,
                call.config,
                cp_group_size=parallel_state.get_context_parallel_world_size(),
                is_first_microbatch=call.first_forward,
                current_microbatch=microbatch % call.microbatches,
                is_last_stage=self.is_last,
            )
        call.first_forward = False
        self.outputs[microbatch] = outputs[0]

    def _data_go_on(self, microbatch: int) -> bool:
        """On the first stage, before it reads ahead: whether there is something, on all tensor-parallel ranks, of which one reads."""
        if self.last is not None:
            return microbatch <= self.last
        goes_on, group = self.feed.has_next(), parallel_state.get_tensor_model_parallel_group()
        if group.size() > 1:
            flag = torch.tensor(int(goes_on), device=self.norms.known.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
            goes_on = bool(flag.item())
        return goes_on

    def backward(self, microbatch: int) -> None:
        call = self._call
        inputs = self.inputs.get(microbatch)
        if microbatch == call.end - 1:
            call.reductions.begin(self.is_first)
        gradient = self.gradients[0] if self.gradients else None
        with self.versions.backward(microbatch):
            schedules.backward_step([inputs], [self.outputs.pop(microbatch)], [gradient], *self._model_type, call.config)
        self.gradients = []


class Call:
    """What belongs to one call.

    Args:
        forward_step_func: as for Megatron's schedules.
        first, microbatches: the first one that it trains, and how many.
        config: of the model.
    """

    def __init__(self, forward_step_func: Callable, first: int, microbatches: int, config: Any):
        self.forward_step_func, self.microbatches, self.config = forward_step_func, microbatches, config
        self.end = first + microbatches
        self.reports: list[Any] = []
        self.first_forward = True
        self.reductions = _Reductions(config)


class _Reductions:
    """When gradients are reduced over replicas: from the last backward of a call on, as in Megatron's schedules."""

    def __init__(self, config: Any):
        no_sync = config.no_sync_func
        if isinstance(no_sync, list):
            no_sync = no_sync[0]
        self._grad_sync = config.grad_sync_func[0] if isinstance(config.grad_sync_func, list) else config.grad_sync_func
        self._held: AbstractContextManager | None = no_sync() if no_sync is not None else nullcontext()
        self._held.__enter__()

    def begin(self, first_stage: bool) -> None:
        """Before the last backward."""
        if self._grad_sync is None or first_stage:
            self._release()

    def finish(self, model: torch.nn.Module) -> None:
        """After it."""
        if self._held is not None:
            self._release()
            if self._grad_sync is not None:
                self._grad_sync(model.parameters())

    def _release(self) -> None:
        held, self._held = self._held, None
        held.__exit__(None, None, None)
