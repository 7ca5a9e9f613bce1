"""torch.distributed: nccl means gloo, which has no average and gathers only equal sizes."""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .callers import stand_in


class Done:
    """The handle of an operation that has been waited for."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def on_gloo(make: Callable[..., Any], drop: tuple[str, ...]) -> Callable[..., Any]:
    """`make` with gloo in the place of nccl, and without the arguments `drop`, which are a GPU's."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if argument == "nccl" else argument for argument in args)
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return make(*args, **{key: value for key, value in kwargs.items() if key not in drop})

    return made


def averaging(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """A reduction that can average: a sum, divided. It waits for the sum also where the caller would not."""

    @functools.wraps(reduce)
    def reduced(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not any(_averages(argument) for argument in (*args, kwargs.get("op"))):
            return reduce(output, *args, **kwargs)
        args = tuple(dist.ReduceOp.SUM if _averages(argument) else argument for argument in args)
        if "op" in kwargs:
            kwargs["op"] = dist.ReduceOp.SUM
        reduce(output, *args, **{**kwargs, "async_op": False})
        output.div_(dist.get_world_size(kwargs.get("group")))
        return Done()

    return reduced


def _averages(argument: Any) -> bool:
    return isinstance(argument, (dist.ReduceOp, dist.ReduceOp.RedOpType)) and argument == dist.ReduceOp.AVG


def gathering(gather: Callable[..., Any]) -> Callable[..., Any]:
    """An all-gather of any sizes: unequal ones are broadcast one after another."""

    @functools.wraps(gather)
    def gathered(outputs: list[Tensor], own: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({output.shape for output in outputs}) == 1:
            return gather(outputs, own, group=group, async_op=async_op)
        outputs[dist.get_rank(group)].copy_(own)
        for rank, output in enumerate(outputs):
            if output.numel():
                dist.broadcast(output, group=group, group_src=rank)
        return Done() if async_op else None

    return gathered


def install() -> None:
    """Patch torch.distributed."""
    stand_in(dist, "init_process_group", on_gloo(dist.init_process_group, drop=("device_id",)))
    stand_in(dist, "new_group", on_gloo(dist.new_group, drop=("device_id", "pg_options")))
    stand_in(dist, "barrier", on_gloo(dist.barrier, drop=("device_ids",)))
    for name in ("all_reduce", "reduce_scatter_tensor", "_reduce_scatter_base"):
        stand_in(dist, name, averaging(getattr(dist, name)))
    stand_in(dist, "all_gather", gathering(dist.all_gather))
