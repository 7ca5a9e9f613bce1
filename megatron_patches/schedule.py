"""The no-flush schedule in place of Megatron's non-interleaved one: forwards stay in flight between two calls, updates are Megatron's."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, get_model_type
from torch import Tensor

from ds_basisrot.common.blocks import ConfigError, PipelineOptions
from ds_basisrot.common.log import log
from ds_basisrot.pipeline.actions import open_trace, run
from ds_basisrot.pipeline.channels import Lanes
from ds_basisrot.pipeline.lagged_norms import LaggedNorms
from ds_basisrot.pipeline.schedule import AsyncSchedule, Kind, staleness
from ds_basisrot.pipeline.stash import stash_versions
from ds_basisrot.pipeline.stop_requests import StopRequests
from ds_basisrot.pipeline.transport import Transport
from ds_basisrot.pipeline.weight_versions import WeightVersions
from ds_basisrot.pipeline.wire import Control, Sort

from . import names, stopping
from .feed import Feed
from .tied_embeddings import TiedEmbeddings, are_tied

DATA_ENDED = "the data ended in the last step; stop training there, or pass an iterator that goes on"

LOSS_FIELDS = 1  # of a gradient message before the norms; Megatron reports losses on the last stage alone, so it stays zero


class AsyncPipeline:
    """One stage of a model under the asynchronous schedule, between and within calls.

    A call trains `num_microbatches` microbatches and ends with reduced gradients, as Megatron's schedule does; `optimizer.step()` after it
    is the stage's update. Between calls a stage of staleness tau has the forwards of tau microbatches in flight.

    Args:
        model: the chunk of this rank, wrapped in DistributedDataParallel.
        options: of the pipeline block.
        norms: what this stage knows of all stages' gradient norms.
        optimizer: whose `step` follows each call.
    """

    def __init__(self, model: torch.nn.Module, options: PipelineOptions, norms: LaggedNorms, optimizer: Any):
        self.model, self.norms = model, norms
        self.listens = False
        """Whether something may ask the job to stop before its last step."""
        self.trained = self.updates = 0  # microbatches whose gradient is in an update, and updates, on every stage
        self.last: int | None = None
        """The last microbatch of the job, where it is known: none after it is read."""
        self._group = parallel_state.get_pipeline_model_parallel_group()
        self.stage, self.stages = self._group.rank(), self._group.size()
        self.staleness = staleness(self.stage, self.stages)
        # Of the ranks of a stage, tensor-parallel ones included.
        self._replica = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True).rank()
        device = next(model.parameters()).device
        pipelines = _all_pipelines(self._group)
        lanes = Lanes(pipelines, self._group, control_apart=device.type != "cpu")
        self._transport = Transport(lanes, self.staleness, device, activation_fields=self.stages, gradient_fields=LOSS_FIELDS + self.stages)
        self._stashing = options.weight_stashing and self.staleness > 0
        self.stop = StopRequests(self.stages)
        self._learning = [p for p in model.parameters() if p.requires_grad]
        self.versions = WeightVersions(self._learning, self._stashing)
        self.tied: TiedEmbeddings | None = None
        if are_tied(model):
            self.tied = TiedEmbeddings(model, pipelines, self._group, norms)
            self.tied.attach(optimizer)
        self._trace = None
        if options.trace is not None:
            try:
                self._trace = open_trace(options.trace, self.stage, self._replica)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        self._model_type = (get_model_type(model),) if names.family().backward_takes_model_type else ()
        self._filled, self._accumulation = False, 0
        self._feed = Feed(None)
        self._holes: set[int] = set()
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._gradients: list[Tensor] = []
        self._call: _Call | None = None
        self._handlers: dict[Kind, Callable[[int], None]] = {
            Kind.POST_ACTIVATION: lambda _: self._transport.post_activation(),
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.POST_GRAD: self._transport.post_gradient,
            Kind.RECV_GRAD: self._receive_gradient,
            Kind.BACKWARD: self._backward,
            Kind.SEND_GRAD: self._send_gradient,
            Kind.UPDATE: lambda _: None,  # Megatron's optimizer.step() after the call
        }

    @property
    def stops(self) -> bool:
        """Whether the last update was the one after which all stages stop."""
        return self.stop.due(self.updates)

    @property
    def in_flight(self) -> bool:
        """Whether forwards are."""
        return self._filled

    def train(self, forward_step_func: Callable, data_iterator: Iterator[Any] | None, microbatches: int, **finalize: Any) -> list[Any]:
        """Forward and back-propagate as many microbatches as one update takes.

        Args:
            forward_step_func: as for Megatron's schedules.
            data_iterator: of this rank.
            microbatches: per update.
            finalize: further arguments for `finalize_model_grads_func`.

        Returns:
            On the last stage what the loss function reported of each microbatch, elsewhere an empty list.
        """
        self._choose_data(data_iterator)
        if self._holes:
            raise RuntimeError(DATA_ENDED)
        if self._filled and not all(p.requires_grad for p in self._learning):
            raise RuntimeError("parameters were frozen while microbatches are in flight; call megatron_patches.drain() on all ranks before")
        if self._filled and microbatches != self._accumulation:
            self.drain()
        if microbatches != self._accumulation:
            self._accumulation = microbatches
            self._say_memory()
        if self.stage == 0 and self.listens:
            self.stop.agreed = stopping.hear_replicas(self.stop.wanted)
            self.stop.decide(self.updates, microbatches)
        self.versions.changed()
        self.versions.prepare()
        config = get_model_config(self.model)
        self._call = _Call(forward_step_func, microbatches, self.trained, config)
        _start_timer(config, "forward-backward")
        actions = AsyncSchedule(self.stages, microbatches).call(self.stage, self.trained, self._filled)
        run(actions, self._handlers, self._trace, lambda: self.updates)
        self._transport.finish_gradients()
        self.trained += microbatches
        self._filled, self._learning = True, [p for p in self._learning if p.requires_grad]
        self._feed.trained(self.trained)
        self._call.reductions.finish(self.model)
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func([self.model], None, pg_collection=_groups_without_embeddings(), **finalize)
        if self.tied is not None:
            self.tied.put_sum(self.updates, microbatches)
        self.updates += 1
        _stop_timer(config, "forward-backward")
        return self._call.reports

    def _say_memory(self) -> None:
        versions, size = stash_versions(self.stage, self.stages, self._accumulation), self.versions.weight_bytes
        if self._stashing and self._replica == 0:
            log(f"stage {self.stage}: weight stash: {versions} versions of {size} bytes, {versions * size} bytes", rank=dist.get_rank())

    def drain(self) -> None:
        """Drop the forwards in flight, on all stages; their data is kept and forwarded again with newer weights."""
        if not self._filled:
            return
        self._transport.drop_activations()
        self._transport.forget()
        self.versions.drop()
        self._inputs.clear()
        self._outputs.clear()
        self._holes.clear()
        self._filled = False

    def _choose_data(self, data_iterator: Iterator[Any] | None) -> None:
        if data_iterator is self._feed.source:
            return
        if self._feed.reads_ahead:
            raise RuntimeError(
                "another data iterator than in the last step: async_1f1b has read ahead from that one; call megatron_patches.drain() and "
                "then megatron_patches.forget_data() on all ranks before"
            )
        self._feed = Feed(data_iterator)

    def state(self) -> dict[str, Any]:
        """What a resumed run needs; nothing may be in flight."""
        tied = None if self.tied is None else self.tied.state()
        return {"updates": self.updates, "norms": self.norms.known.cpu(), "tied": tied}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Take in what `state` gave; None: begin anew."""
        if state is None:
            self.norms.known.zero_()
            if self.tied is not None:
                self.tied.restore([])
            return
        self.updates = state["updates"]
        self.norms.known.copy_(state["norms"])
        if self.tied is not None:
            self.tied.restore(state["tied"])

    def forget_data(self) -> None:
        """Give up what was read ahead; nothing may be in flight."""
        if self._filled:
            raise RuntimeError("forget_data(): microbatches are in flight; call drain() on all ranks before")
        self._feed = Feed(None)

    # -- messages ----------------------------------------------------------------------------------------------------------------------

    def _control(self, sort: Sort = Sort.NORMAL) -> Control:
        return Control(sort, self.stop.after, int(self.stop.wanted))

    def _receive_activation(self, microbatch: int) -> None:
        control, norms, tensor = self._transport.receive_activation(microbatch)
        self.norms.from_previous(norms)
        self.stop.heard(0, control.stop_after)
        if control.sort is Sort.NORMAL:
            self._inputs[microbatch] = tensor
        else:
            self._holes.add(microbatch)

    def _send_activation(self, microbatch: int) -> None:
        if microbatch in self._holes:
            self._transport.send_activation(microbatch, self._control(Sort.HOLE), self.norms.known, None)
            return
        output = self._outputs[microbatch]
        self._transport.send_activation(microbatch, self._control(), self.norms.known, output)
        schedules.deallocate_output_tensor(output, self._call.config.deallocate_pipeline_outputs)

    def _receive_gradient(self, microbatch: int) -> None:
        control, fields, self._gradients = self._transport.receive_gradient()
        self.stop.heard(control.stop_wanted, -1)
        self.norms.from_next(fields[LOSS_FIELDS:])

    def _send_gradient(self, microbatch: int) -> None:
        self._transport.send_gradient(microbatch, self._control(), self.norms.fields, self._inputs.pop(microbatch))

    # -- forward and backward ----------------------------------------------------------------------------------------------------------

    def _forward(self, microbatch: int) -> None:
        call, first = self._call, self.stage == 0
        needed = microbatch < self.trained + call.microbatches
        self._feed.begin(microbatch)
        if first and not needed and not self._data_go_on(microbatch):
            self._holes.add(microbatch)
        if microbatch in self._holes:
            if needed:
                raise RuntimeError(DATA_ENDED)
            return
        inputs = None if first else self._inputs[microbatch]
        with self.versions.forward(microbatch):
            outputs, _ = schedules.forward_step(
                call.forward_step_func,
                self._feed if self._feed.source is not None else None,
                self.model,
                call.microbatches,
                [inputs],
                call.reports,
                call.config,
                cp_group_size=parallel_state.get_context_parallel_world_size(),
                is_first_microbatch=call.first_forward,
                current_microbatch=microbatch % call.microbatches,
                is_last_stage=self.stage == self.stages - 1,
            )
        call.first_forward = False
        self._outputs[microbatch] = outputs[0]

    def _data_go_on(self, microbatch: int) -> bool:
        """On the first stage, before it reads ahead: whether there is something, on all tensor-parallel ranks, of which one reads."""
        if self.last is not None:
            return microbatch <= self.last
        goes_on, group = self._feed.has_next(), parallel_state.get_tensor_model_parallel_group()
        if group.size() > 1:
            flag = torch.tensor(int(goes_on), device=self.norms.known.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
            goes_on = bool(flag.item())
        return goes_on

    def _backward(self, microbatch: int) -> None:
        call, last = self._call, microbatch == self.trained + self._call.microbatches - 1
        inputs = self._inputs.get(microbatch)
        if last:
            call.reductions.begin(self.stage)
        gradient = self._gradients[0] if self._gradients else None
        with self.versions.backward(microbatch):
            schedules.backward_step([inputs], [self._outputs.pop(microbatch)], [gradient], *self._model_type, call.config)
        self._gradients = []


class _Call:
    """What belongs to one call."""

    def __init__(self, forward_step_func: Callable, microbatches: int, first: int, config: Any):
        self.forward_step_func, self.microbatches, self.config = forward_step_func, microbatches, config
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

    def begin(self, stage: int) -> None:
        """Before the last backward."""
        if self._grad_sync is None or stage == 0:
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


def _all_pipelines(own: Any) -> list[list[int]]:
    """The global ranks of the stages of every pipeline of the job; of the own one alone where no groups need to be made."""
    ranks = dist.get_process_group_ranks(own)
    if dist.get_backend(own) == "gloo":
        return [ranks]
    pipelines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, ranks)
    return sorted({tuple(each) for each in pipelines})


def _groups_without_embeddings() -> ProcessGroupCollection:
    """The groups that gradients are finalized over. Those that tie the embeddings of two stages are left out: the stages do not meet."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    groups.embd = groups.pos_embd = _Alone()
    return groups


class _Alone:
    """A process group that nobody else is in."""

    @staticmethod
    def size() -> int:
        """Ranks in it."""
        return 1


def _start_timer(config: Any, name: str) -> None:
    if config.timers is not None:
        config.timers(name, log_level=1).start()


def _stop_timer(config: Any, name: str) -> None:
    if config.timers is not None:
        config.timers(name).stop()
