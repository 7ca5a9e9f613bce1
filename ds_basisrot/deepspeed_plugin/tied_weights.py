"""Weights that two stages of a DeepSpeed pipeline share: where their gradients are, and what the optimizer gets instead."""

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..common.blocks import ConfigError
from ..pipeline.channels import TIED, Channel, group_of_pair
from ..pipeline.tied_gradients import Pending, TiedWeight
from .tied_layers import tied_stages
from .zero import LAYOUTS


class TiedWeights:
    """All weights that this stage shares with another one. Every rank of the job builds it at the same time.

    Args:
        engine: a PipelineEngine.
    """

    def __init__(self, engine: Any):
        self._engine, module = engine, engine.module
        self._weights: list[TiedWeight] = []
        self._own: dict[str, Tensor] = {}
        self._trainable: dict[str, tuple[torch.nn.Parameter, bool]] = {}
        me = dist.get_rank()
        parameters = dict(module.named_parameters())
        for key, (early, late) in tied_stages(module).items():
            for ranks in engine.grid.pipe_groups:
                groups = [group_of_pair((ranks[early], ranks[late]), engine.grid.get_pipe_parallel_group()) for _ in range(2)]
                if me not in (ranks[early], ranks[late]):
                    continue
                for name, p in module.tied_modules[key].named_parameters():
                    if name not in module.tied_comms[key]["weight_attr"]:
                        p.ds_pipe_replicated = False  # DeepSpeed takes the whole module for a copy, and would leave this out of the norm
                other, groups = (late, groups) if me == ranks[early] else (early, groups[::-1])
                channels = [Channel(engine.stage_id, other, ranks[other], group, TIED, engine.device) for group in groups]
                for attribute in module.tied_comms[key]["weight_attr"]:
                    name = f"tied_modules.{key}.{attribute}"
                    self._trainable[name] = (parameters[name], parameters[name].requires_grad)
                    if parameters[name].requires_grad:
                        self._weights.append(TiedWeight(name, parameters[name], *channels))
        if self._weights:
            self._places = self._find_places()
            if not hasattr(engine.basic_optimizer, "register_step_pre_hook"):
                kind = type(engine.basic_optimizer).__name__
                raise ConfigError(f"optimizer: async_1f1b trains tied layers with torch optimizers only, got {kind}; untie them")
            engine.basic_optimizer.register_step_pre_hook(self._before_step)

    def __bool__(self) -> bool:
        return bool(self._weights)

    def check(self) -> None:
        """Refuse that copies are frozen or unfrozen while training: gradients of theirs are on the way.

        Raises:
            RuntimeError: naming the weight.
        """
        for name, (parameter, trainable) in self._trainable.items():
            if parameter.requires_grad != trainable:
                verb = "frozen" if trainable else "unfrozen"
                raise RuntimeError(f"{name} was {verb}: async_1f1b cannot do that to tied weights; do it before initialize()")

    def begin_update(self) -> None:
        """Take the gradients of this stage's copies and put those that are due in their place, before gradients are reduced."""
        update, accumulation = self._engine.global_steps, self._engine.micro_batches
        for weight in self._weights:
            self._own[weight.name] = self._take_gradient(weight.parameter)
            total = weight.due(update, accumulation)
            self._put_gradient(weight.parameter, total)

    def end_update(self, update: int, factor: Tensor) -> None:
        """Send the gradients that were taken, with the factor that this stage's other gradients were clipped by."""
        for weight in self._weights:
            weight.exchange(update, self._own.pop(weight.name), factor)

    # -- gradients in DeepSpeed's optimizers -------------------------------------------------------------------------------------------

    def _take_gradient(self, p: torch.nn.Parameter) -> Tensor:
        """A copy of the accumulated gradient, averaged over the replicas."""
        gradient = self._gradient(p)
        gradient = torch.zeros_like(p) if gradient is None else gradient.detach().clone()
        if self._engine.is_data_parallel:
            dist.all_reduce(gradient, group=self._engine.grid.get_data_parallel_group())
            gradient /= self._engine.dp_world_size
        return gradient.reshape(p.shape)

    def _gradient(self, p: torch.nn.Parameter) -> Tensor | None:
        if self._engine.using_bf16_optimizer:
            return getattr(p, "_hp_grad", None)
        if getattr(self._engine.optimizer, "use_grad_accum_attribute", False):
            return p.grad_accum
        return p.grad

    def _put_gradient(self, p: torch.nn.Parameter, total: Tensor) -> None:
        """For DeepSpeed's norm; what is applied is put in later, exact."""
        gradient = self._gradient(p)
        if gradient is not None:
            gradient.copy_(total.reshape(gradient.shape))
        elif getattr(self._engine.optimizer, "use_grad_accum_attribute", False):
            p.grad_accum = total.to(self._engine.optimizer.gradient_accumulation_dtype)
        else:
            p.grad = total.to(p.dtype)

    def _find_places(self) -> dict[Tensor, list[tuple[TiedWeight, Any]]]:
        """Where the copies are in what the optimizer sees: (weight, slice), slice None for a whole parameter."""
        by_name = {weight.name: weight for weight in self._weights}
        layout = LAYOUTS.get(type(self._engine.optimizer).__name__)
        if layout is None:
            return {weight.parameter: [(weight, None)] for weight in self._weights}
        places: dict[Tensor, list[tuple[TiedWeight, Any]]] = {}
        for flat in layout[0](self._engine.optimizer, self._engine.param_names):
            me = dist.get_rank(flat.group)
            for name, pieces in flat.parameters:
                for piece in pieces:
                    if name in by_name and piece.rank == me:
                        places.setdefault(flat.buffer, []).append((by_name[name], piece))
        return places

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        for p in itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups):
            for weight, piece in self._places.get(p, ()) if p.grad is not None else ():
                if piece is None:
                    p.grad.copy_(weight.applied)
                else:
                    piece.of(p.grad).copy_(weight.applied.reshape(-1)[piece.offset : piece.offset + piece.numel])

    # -- checkpoints -------------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """What is pending, after waiting for it."""
        tensors = {}
        for weight in self._weights:
            weight.settle()
            for each in weight.pending:
                tensors[f"tied.{weight.name}.{each.update}.total"] = each.total
                tensors[f"tied.{weight.name}.{each.update}.factor"] = each.factor.clone()
        return tensors

    def restore(self, names: list[str], get: Any) -> None:
        """Restore what `state` gave.

        Args:
            names: of tensors in the checkpoint.
            get: name -> tensor.
        """
        for weight in self._weights:
            weight.settle()  # nothing of before may arrive later
            weight.pending.clear()
            prefix = f"tied.{weight.name}."
            totals = [name for name in names if name.startswith(prefix) and name.endswith(".total")]
            updates = sorted(int(name.removeprefix(prefix).removesuffix(".total")) for name in totals)
            device = weight.applied.device
            for update in updates:
                total, factor = (get(f"{prefix}{update}.{part}").to(device) for part in ("total", "factor"))
                weight.pending.append(Pending(update, factor=factor, total=total))
