"""The asynchronous schedule of one DeepSpeed PipelineEngine: what it replaces on the engine, and what happens between two calls."""

import inspect
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch import Tensor

from .. import __version__
from ..common.agreement import agree
from ..common.blocks import ConfigError, PipelineOptions, describe_async
from ..common.log import log
from ..pipeline import weight_prediction
from ..pipeline.actions import open_trace
from ..pipeline.channels import GONE, Lanes, first_words, is_of_gloo
from ..pipeline.lagged_norms import LaggedNorms
from ..pipeline.schedule import AsyncSchedule, staleness
from ..pipeline.stash import stash_versions
from ..pipeline.stop_requests import StopRequests
from ..pipeline.transport import Transport
from ..pipeline.weight_versions import WeightVersions
from . import checkpoint, private_names, shared_refreshes
from .clipping import Clipping
from .corrections import DelayCompensation, LearningRateCorrection
from .facts import common_facts
from .log import log_stage
from .microbatches import Feeds, are_tensors
from .on_all_ranks import on_all_ranks
from .stage import OutOfData, Stage
from .tied_weights import TiedWeights

TRAIN = object()
"""Stands for our schedule where DeepSpeed hands its own from one method to the next."""


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
        self.staleness = staleness(engine.stage_id, engine.num_stages)
        self._refresh_costs = agree(common_facts(engine._config._param_dict), shared_refreshes.own_cost(engine))
        self._trainable = self._trainable_parameters()
        if engine.is_first_stage() and engine.num_stages > 1 and not self._trainable:
            raise ConfigError("num_stages: the first stage has no trainable parameter; give its layers to the next stage")
        _let_the_host_run_ahead(engine)
        own_group = engine.grid.get_pipe_parallel_group()
        lanes = Lanes(engine.grid.pipe_groups, own_group, engine.device)
        self.norms = LaggedNorms(engine.stage_id, engine.num_stages, options.clip_scope, engine.device)
        self.clipping = Clipping(engine, self.norms)
        self.clipping.parameters = self._trainable
        self.tied = TiedWeights(engine)
        self.stop_requests = StopRequests(engine.num_stages)
        fields = engine.num_stages
        self.stage = Stage(
            engine,
            Transport(lanes, self.staleness, engine.device, activation_fields=fields, gradient_fields=1 + fields),
            self._new_versions(),
            self.norms,
            self.tied,
            self.stop_requests,
            options,
        )
        self.feeds = Feeds(self._load)
        self.trained = 0  # microbatches whose gradient is in an update, on every stage
        self.saves_read_ahead = True
        self._filled = False
        self._replicas: Tensor | None = None  # of the last call: how many lack data for the next one, how many want to stop
        if options.lr_correction_updates and self.staleness > 0:
            LearningRateCorrection(engine, self.staleness, options.lr_correction_updates)
        self._compensation = DelayCompensation(engine, options.delay_compensation, lambda p: self.versions.newest(p))
        self._compensate_delays()
        if options.trace is not None:
            try:
                self.stage.trace = open_trace(options.trace, engine.stage_id, engine.grid.get_data_parallel_id())
            except ValueError as error:
                raise ConfigError(str(error)) from None
        self._attach()
        self._log_start()
        shared_refreshes.share(engine, self._refresh_costs)

    @property
    def versions(self) -> WeightVersions:
        """The weight versions of the microbatches in flight."""
        return self.stage.versions

    def _compensate_delays(self) -> None:
        if self.options.delay_compensation:
            self._compensation.attach(self._trainable)

    def _log_start(self) -> None:
        engine, stages = self.engine, self.engine.num_stages
        schedule = AsyncSchedule(stages, engine.micro_batches)
        log(
            f"version {__version__}: pipeline schedule async_1f1b (from the JSON), {stages} stages, {describe_async(self.options)}; "
            f"staleness per stage {[schedule.staleness(k) for k in range(stages)]} microbatches, "
            f"microbatches per update: {engine.micro_batches}",
        )
        if self.options.weight_stashing:
            versions, size = stash_versions(engine.stage_id, stages, engine.micro_batches), self.versions.weight_bytes
            log_stage(engine, f"weight stash: {versions} versions of {size} bytes, {versions * size} bytes")

    # -- what the engine calls ---------------------------------------------------------------------------------------------------------

    def _attach(self) -> None:
        engine = self.engine
        private_names.check(engine, private_names.PIPELINE_ENGINE_ATTRIBUTES, "PipelineEngine")
        replaced = ("_exec_schedule", "eval_batch", "save_checkpoint", "load_checkpoint", "set_train_batch_size", "reset_activation_shape")
        self._original = {name: getattr(engine, name) for name in replaced}
        engine._train_schedule = lambda: TRAIN
        engine._exec_schedule = self._execute
        engine._aggregate_total_loss = self._mean_loss
        self.clipping.attach()
        engine.eval_batch = self._eval_batch
        engine.save_checkpoint = self._save_checkpoint
        engine.load_checkpoint = self._load_checkpoint
        engine.set_train_batch_size = self._set_train_batch_size
        engine.drain = self.drain

    def _execute(self, schedule: Any) -> None:
        if schedule is not TRAIN:  # DeepSpeed's inference schedule
            self._original["_exec_schedule"](schedule)
            return
        self.engine._reserve_pipe_buffers(1)
        self.engine.fwd_outputs = []
        try:
            self._train()
        except OutOfData:
            self._filled = False
            self.versions.drop()  # of a snapshot that nobody has used, and that may be of other weights by the next call
            self._stop_timer()
            raise StopIteration(
                f"the data iterator has fewer microbatches left than an update needs ({self.engine.micro_batches})"
            ) from None
        except BaseException as error:
            self._stop_timer()
            self._say_who_is_gone(error)
            raise

    def _stop_timer(self) -> None:
        """Where train_batch(), which has started it, will not: the script may catch what is raised, and call again."""
        with suppress(RuntimeError):  # of an accelerator that has failed
            self.engine.timers(TRAIN_BATCH_TIMER).stop()

    def _train(self) -> None:
        accumulation = self.engine.micro_batches
        self.stage.check_whole()
        self._check_trainable()
        short, other = self._choose_data()
        lacking = self._hear_replicas()
        if self.engine.is_first_stage():
            self.stop_requests.decide(self.engine.global_steps, accumulation)
        self.versions.prepare()
        all_replicas_fill = lacking or not self._filled
        if self._filled and (short or other or lacking):
            self.stage.abandon(self.trained)
            self._filled = False
        if not self._filled and self.engine.is_first_stage() and self._lack_data(all_replicas_fill):
            self.stage.send_stop()
            raise OutOfData
        feeds = self.feeds if self._reads() else None
        if self.stage.train(self.trained, accumulation, self._filled, feeds, self._read_up_to()):
            self._filled = False  # the data or its order changed, as the other end has found out
            self.stage.train(self.trained, accumulation, self._filled, feeds, self._read_up_to())
        self.trained += accumulation
        self._filled = True
        if feeds is not None:
            feeds.trained(accumulation)

    def _mean_loss(self) -> Tensor:
        """Mean loss of this call's microbatches over all replicas, averaged within this stage."""
        loss, engine = self.stage.mean_loss(), self.engine
        if not engine.is_data_parallel:
            self.stop_requests.agreed = self.stop_requests.wanted
            return loss
        feed, accumulation = self.feeds.now, engine.micro_batches
        lacking = self._reads() and feed.ended and len(feed.items) < accumulation
        numbers = torch.stack([loss, *torch.tensor([float(lacking), float(self.stop_requests.wanted)], device=loss.device)])
        try:
            dist.all_reduce(numbers, group=engine.grid.get_data_parallel_group())
        except RuntimeError as error:
            self._stop_timer()
            self._say_who_is_gone(error)
            raise
        self._replicas = numbers[1:]
        return numbers[0] / engine.dp_world_size

    def _say_who_is_gone(self, error: BaseException) -> None:
        """Name the stage where Gloo says that a process has ended during a sum over replicas."""
        if self.engine.is_data_parallel and is_of_gloo(error) and any(sign in str(error) for sign in GONE):
            raise RuntimeError(
                f"stage {self.engine.stage_id} lost its connection to another replica of this stage: that process has ended, look for what "
                f"it said ({first_words(error)})"
            ) from None

    def _eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's eval_batch on the newest weights; training goes on bitwise as if it had not been called."""
        self.stage.check_whole()
        module, device = self.engine.module, self.engine.device
        offset = module.micro_offset
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
            result = self._original["eval_batch"](*args, **kwargs)
        module.micro_offset = offset
        return result

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Cut, then save (with our file, see whole_checkpoints): a run that is resumed from here equals this one going on."""
        self.drain()
        self.saves_read_ahead = all(on_all_ranks(lambda: are_tensors(self.feeds.read_ahead()), "say what it has read ahead"))
        return self._original["save_checkpoint"](*args, **kwargs)

    def _load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load; the script may go on with its iterator, whose microbatches read ahead come first, or with another one."""
        self.drain()
        load = self._original["load_checkpoint"]
        arguments = inspect.signature(load).bind(*args, **kwargs).arguments
        path, client_state = load(*args, **kwargs)
        if not arguments.get("load_module_only", False):
            on_all_ranks(lambda: checkpoint.load(self, path) if path is not None else None, f"read what belongs to {path}")
            self.versions.drop()
        return path, client_state

    def _set_train_batch_size(self, train_batch_size: int) -> None:
        self.drain()
        self._original["set_train_batch_size"](train_batch_size)
        shared_refreshes.share(self.engine, self._refresh_costs)  # staleness in updates has changed

    def drain(self) -> None:
        """Drop the forwards in flight on all stages (all ranks call it); their inputs are kept and forwarded again with newer weights.

        Public as `engine.drain()`: needed before parameters are frozen or unfrozen in the middle of a run.
        """
        self.stage.check_whole()
        if self._filled:
            self.stage.drop()
            self._filled = False

    # -- data --------------------------------------------------------------------------------------------------------------------------

    def _reads(self) -> bool:
        return self.engine.is_first_stage() or self.engine.is_last_stage()

    def _read_up_to(self) -> int:
        """Microbatches that both ends have at hand in a call: its own, those in flight, and with replicas those of the next call, so that
        all replicas learn in time when one of them runs out."""
        ahead = max(self.engine.num_stages - 1, self.engine.micro_batches if self.engine.is_data_parallel else 0)
        return self.engine.micro_batches + ahead

    def _choose_data(self) -> tuple[bool, bool]:
        """On the first and last stage: whether the data does not suffice for this call, and whether it is from another iterator."""
        engine = self.engine
        if not self._reads():
            return False, False
        if engine.data_iterator is None:
            raise RuntimeError(
                "train_batch(): no data iterator; pass data_iter on the first and last stage, or training_data to initialize()"
            )
        other = self.feeds.select(engine.data_iterator)
        if other or not self._filled:
            return False, other  # what a checkpoint had read ahead may come first, or the first stage decides
        if self.feeds.has_ended(engine.micro_batches):
            return True, False
        return self.feeds.fill(self._read_up_to(), engine.micro_batches) < engine.micro_batches, False

    def _settled_feed(self) -> int:
        """On the first stage, before the pipeline fills: microbatches at hand."""
        if self.feeds.settle(None):
            log("the data iterator goes on where the checkpoint had read up to: what it had read ahead comes first")
            self.stage.used_restored = True
        return self.feeds.fill(self._read_up_to(), self.engine.micro_batches)

    def _lack_data(self, all_replicas_fill: bool) -> bool:
        """On the first stage, before the pipeline fills: whether this replica, or any that does so too, lacks data for an update."""
        lacks = self._settled_feed() < self.engine.micro_batches
        if all_replicas_fill:
            return self._any_replica(lacks)
        if lacks and self.engine.is_data_parallel:
            raise RuntimeError(
                f"train_batch(): the iterator of this replica has fewer than {self.engine.micro_batches} microbatches, the others go on"
            )
        return lacks

    def _load(self) -> tuple[Any, Any]:
        """One microbatch, through DeepSpeed's own loading: inputs on the first stage, labels on the last."""
        engine, buffers = self.engine, self.engine.pipe_buffers
        engine._exec_load_micro_batch(0)
        inputs = buffers["inputs"][0] if engine.is_first_stage() else None
        labels = buffers["labels"][0] if engine.is_last_stage() else None
        buffers["inputs"][0] = buffers["labels"][0] = None
        return inputs, labels

    def _hear_replicas(self) -> bool:
        """Take in what the last call's mean loss brought along; whether one of them lacks data for this call."""
        if self._replicas is None:
            return False
        lacking, wanted = self._replicas.tolist()
        self._replicas = None
        self.stop_requests.agreed = self.stop_requests.agreed or wanted > 0
        return lacking > 0

    def _any_replica(self, condition: bool) -> bool:
        """Whether it holds on one of the replicas of this stage."""
        if not self.engine.is_data_parallel:
            return condition
        number = torch.tensor(float(condition), device=self.engine.device)
        dist.all_reduce(number, group=self.engine.grid.get_data_parallel_group())
        return number.item() > 0

    # -- parameters --------------------------------------------------------------------------------------------------------------------

    def _check_trainable(self) -> None:
        """The set of trainable parameters may change while nothing is in flight."""
        trainable = self._trainable_parameters()
        if list(map(id, trainable)) == list(map(id, self._trainable)):
            return
        self.tied.check()
        if self._filled:
            raise RuntimeError("parameters were frozen or unfrozen with microbatches in flight: call engine.drain() on all ranks before")
        self._trainable = self.clipping.parameters = trainable
        self.stage.versions = self._new_versions()
        self._compensate_delays()

    def _trainable_parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.engine.module.parameters() if p.requires_grad]

    def _new_versions(self) -> WeightVersions:
        engine, stashing = self.engine, self.options.weight_stashing and self.staleness > 0
        if not self.options.weight_prediction:
            return WeightVersions(self._trainable, stashing)
        optimizer = engine.basic_optimizer
        try:
            weight_prediction.check(optimizer)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        late = lambda: -(-self.staleness // engine.micro_batches)  # noqa: E731
        return WeightVersions(self._trainable, stashing, lambda: weight_prediction.predicted_changes(optimizer, late()))


def _let_the_host_run_ahead(engine: Any) -> None:
    """DeepSpeed's throughput timer waits for the accelerator at each forward, and with it for receives that were posted ahead."""
    if engine.device.type != "cpu" and getattr(engine.tput_timer.config, "synchronized", False):
        engine.tput_timer.config.synchronized = False
        log("timers.throughput.synchronized: taken as false, async_1f1b cannot wait for receives that it has posted ahead")
