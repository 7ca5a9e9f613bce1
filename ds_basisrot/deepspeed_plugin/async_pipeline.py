"""Runs the no-flush schedule on a DeepSpeed PipelineEngine: one small loop over actions, DeepSpeed's own forward, backward and step."""

import inspect
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import __version__
from ..pipeline.schedule import Action, AsyncSchedule, Kind, staleness
from ..pipeline.weight_versions import WeightVersions
from . import agreement, checkpoint, private_names, shared_refreshes
from .config import ConfigError, PipelineOptions, describe_async
from .log import log
from .norms import clip_by_stage, keep_norms_within_stage
from .transport import PairGroups, Payload, Transport, as_tuple

# Fields that travel back with every gradient message.
LOSS = 0
FIELDS = 1


class AsyncPipeline:
    """The asynchronous schedule of one stage. It replaces some methods of its engine, on the instance.

    `train_batch()` makes one update on every stage and returns the mean loss of the same microbatches on every stage. Between calls a stage
    holds forwards of `staleness` microbatches in flight and no backward.

    Args:
        engine: an initialised PipelineEngine.
        options: our part of its "pipeline" block.
    """

    def __init__(self, engine: Any, options: PipelineOptions):
        self.engine, self.options = engine, options
        self.stage, self.stages = engine.stage_id, engine.num_stages
        self.staleness = staleness(self.stage, self.stages)
        self._refresh_costs = agreement.agree(agreement.common_facts(engine._config._param_dict), shared_refreshes.own_cost(engine))
        self._trainable = self._trainable_parameters()
        if engine.is_first_stage() and self.stages > 1 and not self._trainable:
            raise ConfigError("num_stages: the first stage has no trainable parameter; give its layers to the next stage")
        self.versions = self._new_versions()
        self.transport = Transport(PairGroups(engine.grid.pipe_groups), self.staleness, engine.device, FIELDS)
        self.trained = 0  # microbatches whose gradient is in an update, on every stage
        self._filled = False
        self._inputs: dict[int, Payload] = {}
        self._outputs: dict[int, Payload] = {}
        self._gradients: list[Tensor] = []
        self._losses: dict[int, Tensor] = {}
        self._kept: deque[Payload] = deque()  # first stage: inputs dropped by a cut, to be forwarded again before new ones
        self._iterator: Any = None
        self._may_change_iterator = False
        self._handlers: dict[Kind, Callable[[int], None]] = {
            Kind.POST_ACTIVATION: lambda _: self.transport.post_activation(),
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: lambda m: self.transport.send_activation(self._outputs[m]),
            Kind.POST_GRAD: lambda _: self.transport.post_gradient(),
            Kind.RECV_GRAD: self._receive_gradient,
            Kind.BACKWARD: self._backward,
            Kind.SEND_GRAD: self._send_gradient,
            Kind.UPDATE: self._update,
        }
        self._attach()
        schedule = AsyncSchedule(self.stages, engine.micro_batches)
        log(
            f"version {__version__}: pipeline schedule async_1f1b (from the JSON), {self.stages} stages, {describe_async(options)}; "
            f"staleness per stage {[schedule.staleness(k) for k in range(self.stages)]} microbatches, "
            f"microbatches per update: {engine.micro_batches}",
        )
        shared_refreshes.share(engine, self._refresh_costs)

    # -- what the engine calls ---------------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        engine = self.engine
        private_names.check(engine, private_names.PIPELINE_ENGINE_ATTRIBUTES, "PipelineEngine")
        replaced = ("_exec_schedule", "eval_batch", "save_checkpoint", "load_checkpoint", "set_train_batch_size")
        self._original = {name: getattr(engine, name) for name in replaced}
        engine._train_schedule = lambda: self._next_call()
        engine._exec_schedule = self._execute
        engine._aggregate_total_loss = self._mean_loss
        engine.clip_fp32_gradients = lambda: clip_by_stage(engine)
        keep_norms_within_stage(engine)
        engine.eval_batch = self._eval_batch
        engine.save_checkpoint = self._save_checkpoint
        engine.load_checkpoint = self._load_checkpoint
        engine.set_train_batch_size = self._set_train_batch_size
        engine.reset_activation_shape = self._reset_activation_shape
        engine.drain = self.drain

    def _next_call(self) -> list[Action]:
        schedule = AsyncSchedule(self.stages, self.engine.micro_batches)
        return schedule.call(self.stage, self.trained, self._filled)

    def _execute(self, schedule: Any) -> None:
        if not isinstance(schedule, list):  # DeepSpeed's inference schedule
            self._original["_exec_schedule"](schedule)
            return
        self._check_iterator()
        self._check_trainable()
        self._losses.clear()
        self.engine._reserve_pipe_buffers(1)
        self.engine.fwd_outputs = []
        for action in schedule:
            self._handlers[action.kind](action.microbatch)
        self.trained += self.engine.micro_batches
        self._filled = True

    def _mean_loss(self) -> Tensor:
        """Mean loss of this call's microbatches over all replicas, averaged within this stage."""
        loss = torch.stack([self._losses[m] for m in sorted(self._losses)]).mean()
        if self.engine.is_data_parallel:
            dist.all_reduce(loss, group=self.engine.grid.get_data_parallel_group())
            loss /= self.engine.dp_world_size
        return loss

    def _eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's eval_batch on the newest weights; training goes on bitwise as if it had not been called."""
        module, device = self.engine.module, self.engine.device
        offset = module.micro_offset
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
            result = self._original["eval_batch"](*args, **kwargs)
        module.micro_offset = offset
        return result

    def _save_checkpoint(self, save_dir: str, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Cut, then save: a run that is resumed from here equals this one going on."""
        self.drain()
        tag = f"global_step{self.engine.global_steps}" if tag is None else str(tag)
        if save_dir:  # DeepSpeed says what is wrong without one
            checkpoint.save(self.engine, save_dir, tag, self.trained)
        return self._original["save_checkpoint"](save_dir, tag, *args, **kwargs)

    def _load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load; the script may go on with its iterator, whose microbatches read ahead come first, or with another one."""
        self.drain()
        load = self._original["load_checkpoint"]
        arguments = inspect.signature(load).bind(*args, **kwargs).arguments
        checkpoint.check(self.engine, arguments["load_dir"], arguments.get("tag"))
        path, client_state = load(*args, **kwargs)
        self._may_change_iterator = path is not None
        if path is not None and not arguments.get("load_module_only", False):
            self.trained = checkpoint.load(self.engine, path)
        return path, client_state

    def _set_train_batch_size(self, train_batch_size: int) -> None:
        self.drain()
        self._original["set_train_batch_size"](train_batch_size)
        shared_refreshes.share(self.engine, self._refresh_costs)  # staleness in updates has changed

    def _reset_activation_shape(self) -> None:
        if self.stages > 1:
            raise RuntimeError("reset_activation_shape(): async_1f1b trains microbatches of one shape for now; pad them to one")

    def drain(self) -> None:
        """Drop the forwards in flight on all stages (all ranks call it); their inputs are kept and forwarded again with newer weights.

        Public as `engine.drain()`: needed before parameters are frozen or unfrozen in the middle of a run.
        """
        if not self._filled:
            return
        self.transport.discard_posted()
        self.versions.drop()
        if self.engine.is_first_stage():
            self._kept.extendleft(self._inputs[m] for m in sorted(self._inputs, reverse=True))
        self._inputs.clear()
        self._outputs.clear()
        self._filled = False

    # -- actions -----------------------------------------------------------------------------------------------------------------------

    def _receive_activation(self, microbatch: int) -> None:
        self._inputs[microbatch] = self.transport.receive_activation()

    def _forward(self, microbatch: int) -> None:
        buffers = self._load(microbatch)
        buffers["inputs"][0] = self._inputs[microbatch]
        if not self.options.weight_stashing and self.staleness > 0 and torch.is_autocast_enabled(self.engine.device.type):
            raise RuntimeError(
                "weight_stashing false: under autocast, backward would see copies of the old weights; leave autocast or stash"
            )
        with self.versions.forward(microbatch):
            self.engine._exec_forward_pass(0)
        if self.engine.is_last_stage():
            self._losses[microbatch] = self._scalar_loss().detach().float()
        self._outputs[microbatch], buffers["outputs"][0], buffers["inputs"][0] = buffers["outputs"][0], None, None

    def _load(self, microbatch: int) -> dict[str, list]:
        """Inputs (first stage) and labels (last stage) of the next microbatch, through DeepSpeed's own loading."""
        engine, buffers = self.engine, self.engine.pipe_buffers
        if engine.is_first_stage() and self._kept:
            self._inputs[microbatch] = _fresh(self._kept.popleft())
            return buffers
        if engine.is_first_stage() or engine.is_last_stage():
            try:
                engine._exec_load_micro_batch(0)
            except StopIteration:
                raise RuntimeError(
                    f"the data iterator ended at microbatch {microbatch}: async_1f1b reads {self.staleness} microbatches ahead on the "
                    "first stage; wrap the loader in deepspeed.utils.RepeatingLoader or stop training earlier"
                ) from None
            if engine.is_first_stage():
                self._inputs[microbatch] = buffers["inputs"][0]
        return buffers

    def _scalar_loss(self) -> Tensor:
        loss = self.engine.loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise RuntimeError(f"async_1f1b needs one scalar loss from loss_fn or the last layer, got {type(loss).__name__}")
        return loss.reshape(())

    def _receive_gradient(self, microbatch: int) -> None:
        fields, self._gradients = self.transport.receive_gradient()
        self._losses[microbatch] = fields[LOSS]

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
            raise RuntimeError(f"stage {self.stage} gives its input no gradient: async_1f1b cannot train the stages before it")

    def _send_gradient(self, microbatch: int) -> None:
        fields = torch.empty(FIELDS, dtype=torch.float32, device=self.engine.device)
        fields[LOSS] = self._losses[microbatch]
        self.transport.send_gradient(fields, self._inputs.pop(microbatch))

    def _update(self, _: int) -> None:
        self.engine._exec_reduce_grads()
        self.engine._exec_optimizer_step()
        self.versions.changed()

    def _check_iterator(self) -> None:
        engine = self.engine
        if not (engine.is_first_stage() or engine.is_last_stage()):
            return
        if engine.data_iterator is None:
            raise RuntimeError(
                "train_batch(): no data iterator; pass data_iter on the first and last stage, or training_data to initialize()"
            )
        if engine.data_iterator is not self._iterator:
            if self._may_change_iterator:
                self._kept.clear()
            elif self._inputs or self._kept:
                raise RuntimeError(
                    f"train_batch(): another data iterator than before, but async_1f1b has read {len(self._inputs) + len(self._kept)} "
                    "microbatches ahead from the last one; pass one persistent iterator to every call"
                )
            self._iterator = engine.data_iterator
        self._may_change_iterator = False

    def _check_trainable(self) -> None:
        """The set of trainable parameters may change while nothing is in flight."""
        trainable = self._trainable_parameters()
        if list(map(id, trainable)) == list(map(id, self._trainable)):
            return
        if self._filled:
            raise RuntimeError("parameters were frozen or unfrozen with microbatches in flight: call engine.drain() on all ranks before")
        self._trainable = trainable
        self.versions = self._new_versions()

    def _trainable_parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.engine.module.parameters() if p.requires_grad]

    def _new_versions(self) -> WeightVersions:
        return WeightVersions(self._trainable, stashing=self.options.weight_stashing and self.staleness > 0)


def _fresh(inputs: Payload) -> Payload:
    """The same inputs as leaves without gradients of an earlier forward."""
    fresh = tuple(t.detach().requires_grad_(t.requires_grad) for t in as_tuple(inputs))
    return fresh if isinstance(inputs, tuple) else fresh[0]
