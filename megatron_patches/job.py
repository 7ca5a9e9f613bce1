"""What is patched in this process, and the pipeline and norms that the patches share."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ds_basisrot import __version__
from ds_basisrot.common.agreement import agree
from ds_basisrot.common.blocks import ConfigError, describe_async
from ds_basisrot.common.log import log
from ds_basisrot.pipeline.lagged_norms import LaggedNorms
from ds_basisrot.pipeline.schedule import staleness

from . import checkpoint, names, patching, refreshes, registry, rotation_states, training
from . import config as config_file
from .checkpoint import STAGE

_job: "Job | None" = None


def start(config: str | Path | Mapping[str, Any]) -> "Job":
    """Read the configuration and patch Megatron. See `megatron_patches.apply`."""
    global _job
    settings = config_file.load(config)
    if _job is not None and _job.pipeline is not None and _job.pipeline.in_flight:
        raise ConfigError(f"{settings.path}: another one was applied before, and trains; call megatron_patches.drain() first")
    if _job is not None:
        _job.unpatch()
    _job = Job(settings)
    _job.patch()
    return _job


def current() -> "Job":
    """The job of this process.

    Raises:
        RuntimeError: nothing was applied.
    """
    if _job is None:
        raise RuntimeError("megatron_patches: nothing was applied yet; call megatron_patches.apply(config) first")
    return _job


class Job:
    """The patches of one process.

    Args:
        settings: from the file.
    """

    def __init__(self, settings: config_file.Settings):
        self.settings = settings
        self.pipeline: Any = None
        self._norms: LaggedNorms | None = None
        self._optimizer: Any = None
        self._restored: Any = None
        self._rotations: list[Any] = []
        self._costs: list[int] = []
        self._shared_for = 0  # microbatches per update
        self._present: Mapping[str, Any] = {}
        self._loaded: Mapping[str, Any] | None = None
        self.calls_left: int | None = None
        """Training steps until the job ends, this one included, where that is known."""
        self.found_training = False
        """Whether Megatron-LM's training package was patched with the core."""
        self._said = False
        self._table: list[tuple[str, str]] = []
        self._unpatch: list[Callable[[], None]] = []

    # -- patches -----------------------------------------------------------------------------------------------------------------------

    def patch(self) -> None:
        """Replace Megatron's functions, in the core and, where it is there, in its training package."""
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel.schedules as schedules

        training.patch(self)
        if self.rotates and names.family().registry:
            from .optimizer import to_options

            registry.enter(self, lambda config: to_options(config, self.settings.optimizer)[0])
            if training.is_here():
                registry.accept_name(self)
        checkpoint.patch(self)
        what = [*(["BasisRotation"] if self.rotates else []), *(["norms per stage"] if self.settings.pipeline.asynchronous else [])]
        self.replace(megatron.core.optimizer, "get_megatron_optimizer", self._wrap_optimizer, ", ".join(what))
        if self.settings.pipeline.asynchronous:
            self.replace(schedules, "get_forward_backward_func", self._wrap_schedule, "no flush")

    def unpatch(self) -> None:
        """Put back what was replaced: another configuration may replace less."""
        for restore in self._unpatch:
            restore()

    def replace(self, module: Any, name: str, make: Callable, what: str) -> None:
        """Replace a function wherever it is bound, and note it for the table."""
        self._unpatch.append(functools.partial(patching.restore, module, name))
        for place in patching.replace(module, name, make):
            self._table.append((f"{place}.{name}", what))

    def replace_method(self, owner: type, name: str, make: Callable, what: str) -> None:
        """Replace a method of a class, and note it for the table."""
        self._unpatch.append(functools.partial(patching.restore_method, owner, name))
        patching.replace_method(owner, name, make)
        self._table.append((f"{owner.__module__}.{owner.__name__}.{name}", what))

    def note(self, place: str, what: str, undo: Callable[[], None]) -> None:
        """Note for the table what was changed in another way."""
        self._unpatch.append(undo)
        self._table.append((place, what))

    @property
    def rotates(self) -> bool:
        """Whether the optimizer is ours."""
        return self.settings.optimizer is not None

    def _wrap_optimizer(self, native: Callable) -> Callable:
        @functools.wraps(native)
        def get_megatron_optimizer(config: Any, model_chunks: list[torch.nn.Module], *args: Any, **kwargs: Any) -> Any:
            from megatron.core import parallel_state

            agree(self.settings.facts())
            asynchronous = self.settings.pipeline.asynchronous and parallel_state.get_pipeline_model_parallel_world_size() > 1
            if asynchronous:
                training.check_patched(self)
                refusals.check_arguments(training.arguments())
                refusals.check_schedule(config, model_chunks)
            if self.rotates:
                from .optimizer import build, rotations

                refusals.check_saving(training.arguments())
                optimizer = build(config, model_chunks, self.settings.optimizer, native, *args, **kwargs)
                self._rotations = rotations(optimizer)
                self._after_loading(optimizer)
            else:
                optimizer = native(config, model_chunks, *args, **kwargs)
                self._rotations = []
            self.pipeline, self._norms, self._optimizer, self._restored = None, None, optimizer, None
            if asynchronous:
                self._norms = LaggedNorms(
                    parallel_state.get_pipeline_model_parallel_rank(),
                    parallel_state.get_pipeline_model_parallel_world_size(),
                    self.settings.pipeline.clip_scope,
                    next(model_chunks[0].parameters()).device,
                )
                statistics.keep_within_stage(optimizer, self._norms)
                self._costs, self._shared_for = refreshes.costs_of_stages(self._rotations) if self.rotates else [], 0
            self._say()
            return optimizer

        from . import refusals, statistics

        return get_megatron_optimizer

    def _after_loading(self, optimizer: Any) -> None:
        native = optimizer.load_state_dict

        def load_state_dict(*args: Any, **kwargs: Any) -> None:
            native(*args, **kwargs)
            self._restore_rotations()

        optimizer.load_state_dict = load_state_dict

    def _wrap_schedule(self, native: Callable) -> Callable:
        @functools.wraps(native)
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable:
            function = native(*args, **kwargs)
            if function.__name__ != "forward_backward_pipelining_without_interleaving":
                return function

            @functools.wraps(function)
            def forward_backward(**call: Any) -> Any:
                if call.get("forward_only", False):
                    return function(**call)
                return self._train(**call)

            return forward_backward

        return get_forward_backward_func

    # -- training ----------------------------------------------------------------------------------------------------------------------

    def _train(
        self,
        *,
        forward_step_func: Callable,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        force_all_reduce: bool = False,
        **others: Any,
    ) -> list[Any]:
        """Megatron's arguments of a schedule. Shapes travel with the messages, so those that tell them are not needed."""
        from . import refusals
        from .schedule import AsyncPipeline

        refusals.check_call(others)
        model = model[0] if isinstance(model, list) else model
        if self.pipeline is None:
            if self._norms is None:
                raise ConfigError("pipeline.schedule: async_1f1b needs an optimizer from megatron.core.optimizer.get_megatron_optimizer")
            self.pipeline = AsyncPipeline(model, self.settings.pipeline, self._norms, self._optimizer)
            self.pipeline.restore(self._restored)
            arguments = training.arguments()
            self.pipeline.listens = bool(arguments and (arguments.exit_signal_handler or arguments.exit_duration_in_mins))
        elif self.pipeline.model is not model:
            raise ConfigError("pipeline.schedule: async_1f1b trains one model, and was given a second one")
        if self._rotations and num_microbatches != self._shared_for:
            refreshes.share(self._rotations, self._costs, num_microbatches)
            self._shared_for = num_microbatches
        left, trained = self.calls_left, self.pipeline.trained
        self.pipeline.stage.last = None if left is None else trained + left * num_microbatches - 1
        iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        return self.pipeline.train(forward_step_func, iterator, num_microbatches, force_all_reduce=force_all_reduce)

    def drain(self) -> None:
        """See `megatron_patches.drain`."""
        if self.pipeline is not None:
            self.pipeline.drain()

    def forget_data(self) -> None:
        """See `megatron_patches.forget_data`."""
        if self.pipeline is not None:
            self.pipeline.forget_data()

    # -- checkpoints -------------------------------------------------------------------------------------------------------------------

    @property
    def has_optimizer(self) -> bool:
        """Whether Megatron's optimizer was built since the patches were applied."""
        return self._optimizer is not None

    def sharded_state(self) -> dict[str, Any]:
        """What goes into a checkpoint, of this rank."""
        if self.pipeline is not None:
            self._restored = self.pipeline.state()
        state = {} if self._restored is None else {STAGE: checkpoint.stage_object(self._restored)}
        return {**state, **rotation_states.sharded(self._rotations)}

    def wanted_state(self, present: Mapping[str, Any]) -> dict[str, Any]:
        """What is asked of a checkpoint, by what is there."""
        if not self.rotates and rotation_states.is_there(present):
            raise ValueError(
                "the checkpoint has states of BasisRotation, which the optimizer of this job cannot take up: name BasisRotation in the "
                "configuration, or pass --no-load-optim to begin with fresh states"
            )
        self._present = dict.fromkeys(present)
        stage = checkpoint.wanted_stage(present) if self._norms is not None else None
        return {**({} if stage is None else {STAGE: stage}), **rotation_states.wanted(self._rotations, present)}

    def take_state(self, state: Mapping[str, Any]) -> None:
        """Take in what was asked for; rotations when Megatron has given the optimizer what it has loaded."""
        self._restored, self._loaded = state.get(STAGE), state
        if self.pipeline is not None:
            self.pipeline.drain()
            self.pipeline.restore(self._restored)

    def _restore_rotations(self) -> None:
        """After Megatron's optimizer has loaded."""
        if not self._rotations or self._loaded is None:
            return
        loaded, self._loaded = self._loaded, None
        if rotation_states.is_there(self._present):
            rotation_states.restore(self._rotations, loaded, self._present)
        else:
            log("the checkpoint has no states of BasisRotation (another optimizer saved it): momenta and bases start anew")

    # -- what is said ------------------------------------------------------------------------------------------------------------------

    def _say(self) -> None:
        if self._said:
            return
        self._said = True
        from megatron.core import parallel_state

        stages, options = parallel_state.get_pipeline_model_parallel_world_size(), self.settings.pipeline
        width = max(len(place) for place, _ in self._table)
        rows = [f"  {place:<{width}}  {what}" for place, what in self._table]
        log("\n".join([f"version {__version__}, megatron-core {names.version()}, from {self.settings.path}: patched", *rows]))
        if options.asynchronous and stages > 1:
            log(f"pipeline schedule async_1f1b, {stages} stages, {describe_async(options)}; staleness per stage "
                f"{[staleness(k, stages) for k in range(stages)]} microbatches")  # fmt: skip
        elif options.asynchronous:
            log("pipeline schedule async_1f1b: the pipeline has one stage, so that nothing changes")
