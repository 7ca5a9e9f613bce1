"""What megatron.training does in a step that would let stages wait for each other, and when it saves."""

import functools
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from ds_basisrot.common.blocks import ConfigError

from . import names, stopping

if TYPE_CHECKING:
    from .job import Job

# Of Megatron-LM's training package.
TRAINING: names.Table = (
    (
        "megatron.training.training",
        ("train_step", "save_checkpoint", "logical_and_across_model_parallel_group", "reduce_max_stat_across_model_parallel_group"),
    ),
    ("megatron.training.utils", ("logical_and_across_model_parallel_group", "reduce_max_stat_across_model_parallel_group")),
    ("megatron.training.checkpointing", ("save_checkpoint",)),
    ("megatron.training.global_vars", ("get_args",)),
)
TIMERS: names.Table = (("megatron.core.timers", ("Timer", "Timers._get_elapsed_time_all_ranks")),)
# Sums the auxiliary losses of experts over all stages: a function, and a method from 0.18 on.
EXPERTS: dict[names.Family, names.Table] = {
    names.INNER_ADAM: (("megatron.core.transformer.moe.moe_utils", ("reduce_aux_losses_tracker_across_ranks",)),),
    names.REGISTRY: (("megatron.core.transformer.moe.moe_logging", ("MoEMetricsTracker._sync_metrics",)),),
}


def is_here() -> bool:
    """Whether there is a Megatron-LM checkout, and not the core alone."""
    return importlib.util.find_spec("megatron.training") is not None


def patch(job: "Job") -> None:
    """Replace what is in the way of the asynchronous schedule; nothing where it is not chosen."""
    if not job.settings.pipeline.asynchronous:
        if is_here():
            importlib.import_module("megatron.training.training")  # which binds what is replaced in the core
        return
    _patch_timers(job)
    _patch_expert_losses(job)
    job.found_training = is_here()
    if not job.found_training:
        return
    names.check_names(TRAINING)
    import megatron.training.checkpointing as checkpointing
    import megatron.training.training as training
    import megatron.training.utils as utils

    job.replace(training, "train_step", _wrap_train_step(job), "end of the data")
    job.replace(checkpointing, "save_checkpoint", _wrap_save(job), "cut")
    job.replace(utils, "logical_and_across_model_parallel_group", _within_stage(job), "no collective across stages")
    stopping.patch(job)
    job.replace(utils, "reduce_max_stat_across_model_parallel_group", _within_stage(job), "no collective across stages")


def check_patched(job: "Job") -> None:
    """Refuse a training package that came to be found after the patches were applied.

    Raises:
        ConfigError: with the way out.
    """
    if "megatron.training.training" in sys.modules and not job.found_training:
        raise ConfigError("megatron.training was not found when megatron_patches was applied; put its folder on sys.path before")


def arguments() -> Any:
    """Megatron's arguments; None where its training package does not run."""
    if not is_here():
        return None
    from megatron.training import global_vars

    return getattr(global_vars, "_GLOBAL_ARGS", None)


def _wrap_train_step(job: "Job") -> Callable[[Callable], Callable]:
    def make(native: Callable) -> Callable:
        @functools.wraps(native)
        def train_step(*args: Any, iteration: int | None = None, **kwargs: Any) -> Any:
            from megatron.training.global_vars import get_args

            job.calls_left = None if iteration is None else get_args().train_iters - iteration
            return native(*args, iteration=iteration, **kwargs)

        return train_step

    return make


def _wrap_save(job: "Job") -> Callable[[Callable], Callable]:
    def make(native: Callable) -> Callable:
        @functools.wraps(native)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            job.drain()
            return native(*args, **kwargs)

        return save_checkpoint

    return make


def _within_stage(job: "Job") -> Callable[[Callable], Callable]:
    """A number that is the same on all ranks of a stage already, and that stages keep for themselves."""

    def make(native: Callable) -> Callable:
        @functools.wraps(native)
        def own(value: Any, **groups: Any) -> Any:
            return native(value, **groups) if job.pipeline is None else value

        return own

    return make


def _patch_timers(job: "Job") -> None:
    """Timers meet no other rank: they are asked for a barrier in every logged interval, and gather the times of all ranks."""
    names.check_names(TIMERS)
    from megatron.core.timers import Timer, Timers

    for name in ("start", "stop", "elapsed"):
        job.replace_method(Timer, name, functools.partial(_without_barrier, job), "no barrier")
    job.replace_method(Timers, "_get_elapsed_time_all_ranks", functools.partial(_own_times, job), "own times")


def _patch_expert_losses(job: "Job") -> None:
    """Auxiliary losses of experts are logged in every step, summed over all stages; here each stage has its own."""
    names.check_names(EXPERTS[names.family()])
    make, what = functools.partial(_own_expert_losses, job), "experts' losses per stage"
    if names.family().registry:
        from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

        job.replace_method(MoEMetricsTracker, "_sync_metrics", make, what)
    else:
        import megatron.core.transformer.moe.moe_utils as moe_utils

        job.replace(moe_utils, "reduce_aux_losses_tracker_across_ranks", make, what)


def _own_expert_losses(job: "Job", native: Callable) -> Callable:
    signature = inspect.signature(native)

    @functools.wraps(native)
    def reduce_losses(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        if job.pipeline is not None:
            groups = ProcessGroupCollection()
            groups.pp = dist.GroupMember.NON_GROUP_MEMBER  # which collectives pass over
            groups.dp = parallel_state.get_data_parallel_group(with_context_parallel=False, partial_data_parallel=False)
            call.arguments["pg_collection"] = groups
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            native(*call.args, **call.kwargs)

    return reduce_losses


def _without_barrier(job: "Job", native: Callable) -> Callable:
    @functools.wraps(native)
    def method(self: Any, *args: Any, barrier: bool = False, **kwargs: Any) -> Any:
        return native(self, *args, barrier=barrier and job.pipeline is None, **kwargs)

    return method


def _own_times(job: "Job", native: Callable) -> Callable:
    @functools.wraps(native)
    def times(self: Any, names: Any, reset: bool, barrier: bool) -> Any:
        if job.pipeline is None:
            return native(self, names, reset, barrier)
        own = torch.zeros((1, len(names)), dtype=torch.float)
        for column, name in enumerate(names):
            if name in self._timers:
                own[0, column] = self._timers[name].elapsed(reset=reset)
        return own

    return times
