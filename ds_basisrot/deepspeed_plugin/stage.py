"""Runs the actions of the no-flush schedule on one stage: a small loop over DeepSpeed's own forward, backward and step."""

from typing import Any

import torch
from torch import Tensor

from ..common.blocks import PipelineOptions
from ..pipeline.lagged_norms import LaggedNorms
from ..pipeline.stage_loop import CallEnded, StageLoop
from ..pipeline.stop_requests import StopRequests
from ..pipeline.transport import Transport
from ..pipeline.weight_versions import WeightVersions
from ..pipeline.wire import Control, Payload, Sort, as_tuple
from .microbatches import Feeds
from .tied_weights import TiedWeights

LOSS = 0
"""Of the float32 fields of a gradient message; the norms of all stages follow. Those of an activation are the norms alone."""


OTHER_DATA = (
    "train_batch(): the {} stage was given another iterator than before, or its data has ended, and the {} stage's has not; give both the "
    "same microbatches, and change iterators in the same call"
)


class OutOfData(CallEnded):
    """There is not enough data for one more update, on every stage."""


class _Abandoned(CallEnded):
    """The stage after this one says that what is in flight is dropped."""


class Stage(StageLoop):
    """A stage of a PipelineEngine.

    Args:
        engine: whose forward, backward and step are used.
        transport, versions, norms, tied, stop_requests: of this stage.
        options: of the pipeline block.
    """

    def __init__(
        self,
        engine: Any,
        transport: Transport,
        versions: WeightVersions,
        norms: LaggedNorms,
        tied: TiedWeights,
        stop_requests: StopRequests,
        options: PipelineOptions,
    ):
        super().__init__(engine.stage_id, engine.num_stages, transport, versions, norms, stop_requests)
        self.engine, self.options = engine, options
        self.used_restored = False
        """On the first stage: what a checkpoint had read ahead comes before the iterator; it says so with the next activation."""
        self._tied = tied
        self._losses: dict[int, Tensor] = {}
        self._feeds: Feeds | None = None
        self._first = self._read_up_to = self._needed = 0

    # -- calls -------------------------------------------------------------------------------------------------------------------------

    def train(self, first: int, accumulation: int, filled: bool, feeds: Feeds | None, read_up_to: int) -> bool:
        """The actions of one call. Returns True where it was abandoned: the pipeline is empty then, and the call to be made anew.

        Args:
            first: first microbatch that the call trains.
            filled: whether the pipeline is.
            feeds: the data, on the first and last stage.
            read_up_to: microbatches that are read up to in this call, counted from `first`.

        Raises:
            OutOfData: the first stage says so.
        """
        self._first, self._feeds, self._read_up_to, self._needed = first, feeds, read_up_to, accumulation
        self._losses.clear()
        try:
            self.call(first, accumulation, filled, lambda: self.engine.global_steps)
        except _Abandoned:
            self.drop()
            return True
        return False

    def mean_loss(self) -> Tensor:
        """Mean loss of the microbatches of the last call."""
        losses = [self._losses[m] for m in sorted(self._losses)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()

    def abandon(self, first: int) -> None:
        """On the first and last stage, at the start of a call: drop what is in flight. The stages between learn it from the last one."""
        self.exchange(lambda: self._abandon(first))
        self.forget()

    def _abandon(self, first: int) -> None:
        if self.stages > 1 and self.is_first:
            self.transport.send_activation(-1, self.control(Sort.ABANDON), self.norms.known, None)
            self.transport.post_gradient(first)
            control, *_ = self.transport.receive_gradient()
            if control.sort is not Sort.ABANDON:
                raise RuntimeError(OTHER_DATA.format("first", "last"))
        elif self.stages > 1:
            self.transport.receive_activation(first)
            self.transport.post_activation()
            self.transport.send_gradient(first, self.control(Sort.ABANDON), self.norms.fields, None)
            self.transport.drop_activations()

    def send_stop(self) -> None:
        """On the first stage, before the pipeline fills: there is not enough data for an update."""
        if self.stages > 1:
            self.transport.send_activation(-1, self.control(Sort.STOP), self.norms.known, None)
            self.transport.finish_activations()

    # -- messages ----------------------------------------------------------------------------------------------------------------------

    def control(self, sort: Sort = Sort.NORMAL) -> Control:
        return Control(sort, self.stop.after, int(self.stop.wanted), int(self.used_restored))

    def gradient_fields(self, microbatch: int) -> Tensor:
        self.norms.fields[LOSS] = self._losses[microbatch]
        return self.norms.fields

    def activation_received(self, control: Control) -> None:
        self.used_restored = self.used_restored or bool(control.used_restored)
        if control.sort is Sort.STOP:
            if not self.is_last:
                self.send_stop()
            raise OutOfData

    def activation_sent(self, microbatch: int) -> None:
        self.used_restored = False

    def gradient_received(self, microbatch: int, control: Control, fields: Tensor) -> None:
        if control.sort is Sort.ABANDON:
            if self.is_first:
                raise RuntimeError(OTHER_DATA.format("last", "first"))
            self.transport.send_gradient(microbatch, self.control(Sort.ABANDON), self.norms.fields, None)
            raise _Abandoned
        self._losses[microbatch] = fields[LOSS].clone()  # a view would keep all of the message

    # -- forward, backward, update -----------------------------------------------------------------------------------------------------

    def forward(self, microbatch: int) -> None:
        engine, buffers = self.engine, self.engine.pipe_buffers
        if self.is_first:
            self._take_inputs(microbatch)
        if microbatch in self.holes:
            if self.is_last:
                raise RuntimeError(OTHER_DATA.format("first", "last"))
            return
        if self.is_last:
            buffers["labels"][0] = self._labels(microbatch)
        buffers["inputs"][0] = self.inputs[microbatch]
        if not self.options.weight_stashing and self.index < self.stages - 1 and torch.is_autocast_enabled(engine.device.type):
            raise RuntimeError(
                "weight_stashing false: under autocast, backward would see copies of the old weights; leave autocast or stash"
            )
        with self.versions.forward(microbatch):
            engine._exec_forward_pass(0)
        if self.is_last:
            self._losses[microbatch] = self._scalar_loss().detach().to(torch.float32, copy=True)
        self.outputs[microbatch], buffers["outputs"][0], buffers["inputs"][0] = buffers["outputs"][0], None, None

    def _take_inputs(self, microbatch: int) -> None:
        index = microbatch - self._first
        if self._feeds.fill(self._read_up_to, self._needed) > index:
            self.inputs[microbatch] = _fresh(self._feeds[index][0])
        else:
            self.holes.add(microbatch)

    def _labels(self, microbatch: int) -> Any:
        if self.index > 0:
            self._feeds.settle(self.used_restored)
            self.used_restored = False
        index = microbatch - self._first
        if self._feeds.fill(self._read_up_to, self._needed) <= index:
            raise RuntimeError(
                "train_batch(): the data iterator of the last stage ended before that of the first; both must give the same microbatches"
            )
        return self._feeds[index][1]

    def _scalar_loss(self) -> Tensor:
        loss = self.engine.loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise RuntimeError(f"async_1f1b needs one scalar loss from loss_fn or the last layer, got {type(loss).__name__}")
        return loss.reshape(())

    def backward(self, microbatch: int) -> None:
        engine, outputs = self.engine, self.outputs.pop(microbatch)
        if not self.is_last:
            engine.pipe_buffers["outputs"][0] = outputs
            engine.grad_layer = self.gradients if isinstance(outputs, tuple) else self.gradients[0]
        with self.versions.backward(microbatch):
            engine._exec_backward_pass(0)
        engine.grad_layer, self.gradients = None, []
        inputs = self.inputs[microbatch]
        if self.is_first:
            del self.inputs[microbatch]
        elif all(t.grad is None for t in as_tuple(inputs)):
            raise RuntimeError(f"stage {self.index} gives its input no gradient: async_1f1b cannot train the stages before it")

    def update(self) -> None:
        engine, update = self.engine, self.engine.global_steps
        if self._tied:
            self._tied.begin_update()
        if engine.is_data_parallel or engine.zero_optimization():
            engine._exec_reduce_grads()
        engine._exec_optimizer_step()
        if self._tied:
            self._tied.end_update(update, self.norms.factor)
        self.versions.changed()


def _fresh(inputs: Payload) -> Payload:
    """The same inputs as leaves without gradients of an earlier forward."""
    fresh = tuple(t.detach().requires_grad_(t.requires_grad) for t in as_tuple(inputs))
    return fresh if isinstance(inputs, tuple) else fresh[0]
