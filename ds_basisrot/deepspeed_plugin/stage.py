"""Runs the actions of the no-flush schedule on one stage: a small loop over DeepSpeed's own forward, backward and step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..common.blocks import PipelineOptions
from ..pipeline import chrome_trace
from ..pipeline.actions import run
from ..pipeline.lagged_norms import LaggedNorms
from ..pipeline.schedule import AsyncSchedule, Kind
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


class OutOfData(Exception):
    """There is not enough data for one more update, on every stage."""


class _Abandoned(Exception):
    """The stage after this one says that what is in flight is dropped."""


class Stage:
    """The state of one stage between and within calls: what is in flight, and how each action is done.

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
        self.engine, self.versions, self.options = engine, versions, options
        self.used_restored = False
        """On the first stage: what a checkpoint had read ahead comes before the iterator; it says so with the next activation."""
        self._transport, self._norms, self._tied, self._stop = transport, norms, tied, stop_requests
        self._index, self._stages = engine.stage_id, engine.num_stages
        self._inputs: dict[int, Payload] = {}
        self._outputs: dict[int, Payload] = {}
        self._gradients: list[Tensor] = []
        self._losses: dict[int, Tensor] = {}
        self._feeds: Feeds | None = None
        self._first = self._read_up_to = self._needed = 0
        self._holes: set[int] = set()
        self.trace: chrome_trace.Writer | None = None
        self._handlers: dict[Kind, Callable[[int], None]] = {
            Kind.POST_ACTIVATION: lambda _: self._transport.post_activation(),
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.POST_GRAD: self._transport.post_gradient,
            Kind.RECV_GRAD: self._receive_gradient,
            Kind.BACKWARD: self._backward,
            Kind.SEND_GRAD: self._send_gradient,
            Kind.UPDATE: self._update,
        }

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
            actions = AsyncSchedule(self._stages, accumulation).call(self._index, first, filled)
            run(actions, self._handlers, self.trace, lambda: self.engine.global_steps)
        except _Abandoned:
            self._transport.drop_activations()
            self._forget()
            return True
        self._transport.finish_gradients()
        return False

    def mean_loss(self) -> Tensor:
        """Mean loss of the microbatches of the last call."""
        return torch.stack([self._losses[m] for m in sorted(self._losses)]).mean()

    def drain(self) -> None:
        """Between two calls, on all stages: drop what is in flight."""
        self._transport.drop_activations()
        self._forget()

    def abandon(self, first: int) -> None:
        """On the first and last stage, at the start of a call: drop what is in flight. The stages between learn it from the last one."""
        if self._stages > 1 and self._index == 0:
            self._transport.send_activation(-1, self._control(Sort.ABANDON), self._norms.known, None)
            self._transport.post_gradient(first)
            control, *_ = self._transport.receive_gradient()
            if control.sort is not Sort.ABANDON:
                raise RuntimeError(OTHER_DATA.format("first", "last"))
        elif self._stages > 1:
            self._transport.receive_activation(first)
            self._transport.post_activation()
            self._transport.send_gradient(first, self._control(Sort.ABANDON), self._gradient_fields(None), None)
            self._transport.drop_activations()
        self._forget()

    def send_stop(self) -> None:
        """On the first stage, before the pipeline fills: there is not enough data for an update."""
        if self._stages > 1:
            self._transport.send_activation(-1, self._control(Sort.STOP), self._norms.known, None)
            self._transport.finish_activations()

    def _forget(self) -> None:
        self._transport.forget()
        self.versions.drop()
        self._inputs.clear()
        self._outputs.clear()
        self._holes.clear()

    # -- messages ----------------------------------------------------------------------------------------------------------------------

    def _control(self, sort: Sort) -> Control:
        return Control(sort, self._stop.after, int(self._stop.wanted), int(self.used_restored))

    def _gradient_fields(self, loss: Tensor | None) -> Tensor:
        if loss is not None:
            self._norms.fields[LOSS] = loss
        return self._norms.fields

    def _receive_activation(self, microbatch: int) -> None:
        control, norms, inputs = self._transport.receive_activation(microbatch)
        self._norms.from_previous(norms)
        self._stop.heard(0, control.stop_after)
        if control.used_restored:
            self.used_restored = True
        if control.sort is Sort.STOP:
            if self._index < self._stages - 1:
                self.send_stop()
            raise OutOfData
        if control.sort is Sort.NORMAL:
            self._inputs[microbatch] = inputs
        else:
            self._holes.add(microbatch)

    def _send_activation(self, microbatch: int) -> None:
        hole = microbatch in self._holes
        control = self._control(Sort.HOLE if hole else Sort.NORMAL)
        self._transport.send_activation(microbatch, control, self._norms.known, None if hole else self._outputs[microbatch])
        self.used_restored = False

    def _receive_gradient(self, microbatch: int) -> None:
        control, fields, self._gradients = self._transport.receive_gradient()
        self._norms.from_next(fields[1:])
        self._stop.heard(control.stop_wanted, -1)
        if control.sort is Sort.ABANDON:
            if self._index == 0:
                raise RuntimeError(OTHER_DATA.format("last", "first"))
            self._transport.send_gradient(microbatch, self._control(Sort.ABANDON), self._gradient_fields(None), None)
            raise _Abandoned
        self._losses[microbatch] = fields[LOSS]

    def _send_gradient(self, microbatch: int) -> None:
        fields = self._gradient_fields(self._losses[microbatch])
        self._transport.send_gradient(microbatch, self._control(Sort.NORMAL), fields, self._inputs.pop(microbatch))

    # -- forward, backward, update -----------------------------------------------------------------------------------------------------

    def _forward(self, microbatch: int) -> None:
        engine, buffers = self.engine, self.engine.pipe_buffers
        if engine.is_first_stage():
            self._take_inputs(microbatch)
        if microbatch in self._holes:
            if engine.is_last_stage():
                raise RuntimeError(OTHER_DATA.format("first", "last"))
            return
        if engine.is_last_stage():
            buffers["labels"][0] = self._labels(microbatch)
        buffers["inputs"][0] = self._inputs[microbatch]
        if not self.options.weight_stashing and self._index < self._stages - 1 and torch.is_autocast_enabled(engine.device.type):
            raise RuntimeError(
                "weight_stashing false: under autocast, backward would see copies of the old weights; leave autocast or stash"
            )
        with self.versions.forward(microbatch):
            engine._exec_forward_pass(0)
        if engine.is_last_stage():
            self._losses[microbatch] = self._scalar_loss().detach().float()
        self._outputs[microbatch], buffers["outputs"][0], buffers["inputs"][0] = buffers["outputs"][0], None, None

    def _take_inputs(self, microbatch: int) -> None:
        index = microbatch - self._first
        if self._feeds.fill(self._read_up_to, self._needed) > index:
            self._inputs[microbatch] = _fresh(self._feeds[index][0])
        else:
            self._holes.add(microbatch)

    def _labels(self, microbatch: int) -> Any:
        if self._index > 0:
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

    def _backward(self, microbatch: int) -> None:
        engine, outputs = self.engine, self._outputs.pop(microbatch)
        if not engine.is_last_stage():
            engine.pipe_buffers["outputs"][0] = outputs
            engine.grad_layer = self._gradients if isinstance(outputs, tuple) else self._gradients[0]
        with self.versions.backward(microbatch):
            engine._exec_backward_pass(0)
        engine.grad_layer, self._gradients = None, []
        inputs = self._inputs[microbatch]
        if engine.is_first_stage():
            del self._inputs[microbatch]
        elif all(t.grad is None for t in as_tuple(inputs)):
            raise RuntimeError(f"stage {self._index} gives its input no gradient: async_1f1b cannot train the stages before it")

    def _update(self, _: int) -> None:
        engine, update = self.engine, self.engine.global_steps
        if self._tied:
            self._tied.begin_update()
        if engine.is_data_parallel or engine.zero_optimization():
            engine._exec_reduce_grads()
        engine._exec_optimizer_step()
        if self._tied:
            self._tied.end_update(update, self._norms.factor)
        self.versions.changed()


def _fresh(inputs: Payload) -> Payload:
    """The same inputs as leaves without gradients of an earlier forward."""
    fresh = tuple(t.detach().requires_grad_(t.requires_grad) for t in as_tuple(inputs))
    return fresh if isinstance(inputs, tuple) else fresh[0]
