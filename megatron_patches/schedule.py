"""The no-flush schedule in place of Megatron's non-interleaved one: forwards stay in flight between two calls, updates are Megatron's."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from ds_basisrot.common.blocks import ConfigError, PipelineOptions
from ds_basisrot.common.log import log
from ds_basisrot.pipeline.actions import open_trace
from ds_basisrot.pipeline.channels import Lanes
from ds_basisrot.pipeline.lagged_norms import LaggedNorms
from ds_basisrot.pipeline.schedule import staleness
from ds_basisrot.pipeline.stash import stash_versions
from ds_basisrot.pipeline.stop_requests import StopRequests
from ds_basisrot.pipeline.transport import Transport
from ds_basisrot.pipeline.weight_versions import WeightVersions

from . import stopping
from .feed import Feed
from .stage import DATA_ENDED, LOSS_FIELDS, Call, Stage
from .tied_embeddings import TiedEmbeddings, are_tied


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
        group = parallel_state.get_pipeline_model_parallel_group()
        index, stages = group.rank(), group.size()
        late = staleness(index, stages)
        # Of the ranks of a stage, tensor-parallel ones included.
        self._replica = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True).rank()
        device = next(model.parameters()).device
        pipelines = _all_pipelines(group)
        lanes = Lanes(pipelines, group, device)
        transport = Transport(lanes, late, device, activation_fields=stages, gradient_fields=LOSS_FIELDS + stages)
        self._stashing = options.weight_stashing and late > 0
        self._learning = [p for p in model.parameters() if p.requires_grad]
        self.stop = StopRequests(stages)
        self.stage = Stage(model, index, stages, transport, WeightVersions(self._learning, self._stashing), norms, self.stop)
        self.tied: TiedEmbeddings | None = None
        if are_tied(model):
            self.tied = TiedEmbeddings(model, pipelines, group, norms)
            self.tied.attach(optimizer)
        if options.trace is not None:
            try:
                self.stage.trace = open_trace(options.trace, index, self._replica)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        self._filled, self._accumulation = False, 0

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
        if self.stage.holes:
            raise RuntimeError(DATA_ENDED)
        if self._filled and not all(p.requires_grad for p in self._learning):
            raise RuntimeError("parameters were frozen while microbatches are in flight; call megatron_patches.drain() on all ranks before")
        if self._filled and microbatches != self._accumulation:
            self.drain()
        if microbatches != self._accumulation:
            self._accumulation = microbatches
            self._say_memory()
        if self.stage.is_first and self.listens:
            self.stop.agreed = stopping.hear_replicas(self.stop.wanted)
            self.stop.decide(self.updates, microbatches)
        self.stage.versions.changed()
        self.stage.versions.prepare()
        config = get_model_config(self.model)
        call = Call(forward_step_func, self.trained, microbatches, config)
        _start_timer(config, "forward-backward")
        self.stage.train(call, self._filled, lambda: self.updates)
        self.trained += microbatches
        self._filled, self._learning = True, [p for p in self._learning if p.requires_grad]
        self.stage.feed.trained(self.trained)
        call.reductions.finish(self.model)
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func([self.model], None, pg_collection=_groups_without_embeddings(), **finalize)
        if self.tied is not None:
            self.tied.put_sum(self.updates, microbatches)
        self.updates += 1
        _stop_timer(config, "forward-backward")
        return call.reports

    def _say_memory(self) -> None:
        stage = self.stage
        versions, size = stash_versions(stage.index, stage.stages, self._accumulation), stage.versions.weight_bytes
        if self._stashing and self._replica == 0:
            log(f"stage {stage.index}: weight stash: {versions} versions of {size} bytes, {versions * size} bytes", rank=dist.get_rank())

    def drain(self) -> None:
        """Drop the forwards in flight, on all stages; their data is kept and forwarded again with newer weights."""
        if self._filled:
            self.stage.drop()
            self._filled = False

    def _choose_data(self, data_iterator: Iterator[Any] | None) -> None:
        if data_iterator is self.stage.feed.source:
            return
        if self.stage.feed.reads_ahead:
            raise RuntimeError(
                "another data iterator than in the last step: async_1f1b has read ahead from that one; call megatron_patches.drain() and "
                "then megatron_patches.forget_data() on all ranks before"
            )
        self.stage.feed = Feed(data_iterator)

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
        self.stage.feed = Feed(None)


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
