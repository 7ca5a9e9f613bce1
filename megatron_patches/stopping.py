"""Megatron's ways to end a job before its last step, without a rendezvous of all stages in every step."""

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from . import names

if TYPE_CHECKING:
    from .job import Job

SIGNALS = (
    ("megatron.training.dist_signal_handler", ("DistributedSignalHandler",)),
    ("megatron.training.training", ("checkpoint_and_decide_exit", "_TRAIN_START_TIME")),
)


def patch(job: "Job") -> None:
    """Let signals and the largest duration stop all stages after an update that the first stage names."""
    names.check_names(SIGNALS)
    import megatron.training.training as training
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    job.replace_method(DistributedSignalHandler, "signals_received", functools.partial(_wrap_signals, job), "told with messages")
    job.replace(training, "checkpoint_and_decide_exit", functools.partial(_wrap_exit, job), "duration told with messages")


def hear_replicas(wanted: bool) -> bool:
    """On the first stage: whether any of its ranks has heard of a wish to stop."""
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if group.size() == 1:
        return wanted
    device = "cpu" if dist.get_backend(group) == "gloo" else torch.device(torch.accelerator.current_accelerator())
    number = torch.tensor(int(wanted), device=device)
    dist.all_reduce(number, op=dist.ReduceOp.MAX, group=group)
    return bool(number.item())


def _wrap_signals(job: "Job", native: Callable) -> Callable:
    @functools.wraps(native)
    def signals_received(self: Any) -> Any:
        if job.pipeline is None:
            return native(self)
        stop = job.pipeline.stop
        stop.wanted = stop.wanted or self._signal_received
        return [int(job.pipeline.stops)]

    return signals_received


def _wrap_exit(job: "Job", native: Callable) -> Callable:
    @functools.wraps(native)
    def checkpoint_and_decide_exit(*args: Any, **kwargs: Any) -> bool:
        from megatron.training import training
        from megatron.training.global_vars import get_args

        options, pipeline = get_args(), job.pipeline
        minutes = options.exit_duration_in_mins
        if pipeline is None or not minutes:
            return native(*args, **kwargs)
        pipeline.stop.wanted = pipeline.stop.wanted or (time.time() - training._TRAIN_START_TIME) / 60.0 > minutes
        options.exit_duration_in_mins = -1.0 if pipeline.stops else None  # which is over on all ranks, or not looked at
        try:
            return native(*args, **kwargs)
        finally:
            options.exit_duration_in_mins = minutes

    return checkpoint_and_decide_exit
