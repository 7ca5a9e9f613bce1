"""BasisRotation: Adam in a rotated basis for matrices and AdamW for every other parameter, as one torch optimizer."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import adamw, workers
from .gradient_gate import Gate, Outcome, largest_elements
from .options import check_group_keys, check_options, check_patterns
from .roles import Role, Stages, assign_roles, describe_sides
from .rotated_adam import StackUpdate
from .routing import check_patterns_match, named_rotation
from .side_stream import SideStream
from .state import (
    COLD,
    FAILED_REFRESHES,
    LARGEST_USABLE,
    SCALE,
    STEP,
    MatrixStack,
    check_layout_of_state,
    check_state,
    complete_state,
    is_history,
    is_usable,
    new_state,
    rescale,
)

logger = logging.getLogger("ds_basisrot")

# What a checkpoint restores in a group, as in every torch optimizer; all other options stay as configured.
RESTORED_OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay")

MAX_FAILED_REFRESHES = 3


class BasisRotation(torch.optim.Optimizer):
    """Adam in a basis aligned with the Hessian's eigenvectors (arXiv 2602.03515), for pipelines whose gradients are stale.

    For a rotated weight W `[m, n]` with gradient G, momentum M' and second moment S in the basis U `[m, m]`, V `[n, n]`:

        G' = U^T G V;  M' <- b1 M' + (1-b1) G';  S <- b2 S + (1-b2) G'^2
        W <- (1 - lr wd) W - lr sqrt(1-b2^t) / (1-b1^t) U ( M' / max(sqrt(S) + eps, noise_floor RMS(sqrt(S))) ) V^T

    The first basis holds the singular vectors of the first gradient; every `refresh_period` updates one power iteration and QR follow the
    covariances (second order) or the momentum (first order). A stacked weight `[e, m, n]` is e matrices, a fused one as many as its layout
    says (see `layout.parts`). Parameters that are not rotated get AdamW with the same hyper-parameters. An update with a gradient that is
    not finite, or absurdly large (above 1e15, or 1e15 times a first one above 1e12), is skipped, counted in `skipped_updates` and logged. A
    parameter's all-zero gradients before its first real one are ignored; a matrix of a stack gets its first basis from its own first
    gradient that is not zero.

    On an accelerator `step()` does not wait for the device, except as long as a matrix has had no gradient but zeros: what the host must
    know about an update's gradients it learns in the next one, and until then a flag on the device keeps a bad one out.

    Args:
        params: parameters, named parameters, or groups, as for any torch optimizer; `ds_basisrot.param_groups(model)` routes a model's
            parameters by module. A group's `rotate` is True, False, or a list aligned with its parameters of True, False or a layout;
            without it every parameter with two dimensions is rotated, unless one of them is 1. A group may have its own value of every
            option; lr, betas, eps and weight_decay may be changed at any time, the others are read when training begins.
        lr: learning rate.
        betas: decay rates of momentum and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as in AdamW.
        geometry: "bilateral" rotates both sides of a matrix, "unilateral" the shorter one, "auto" the longer one only where it is cheap.
        auto_budget: with "auto", the longer side is rotated if it is shorter than this many times the other: rotating a side costs in
            proportion to its length.
        source: "second_order" keeps covariances of the gradient, "first_order" lets the momentum stand in for them.
        refresh_period: updates between two bases of a matrix.
        refresh_allocation: how refreshes are shared among pipeline stages at equal cost: "uniform", "stage_aware" (a stage whose gradients
            are later refreshes more often) or "inverse"; see `refresh.rates`. The cost is that of "uniform" where all groups have the
            same allocation and period.
        staleness: how late the gradients are, in updates; usually a group's own value, one group for each stage. A pipeline engine or the
            simulator tells the optimizer of one stage about all stages with `share_refreshes`.
        stagger: spread the matrices' refreshes over the period, so that no update is slow; False refreshes all at once.
        covariance_beta: decay of the covariances (default: betas[1]).
        covariance_damping: added to a covariance's diagonal at a refresh, relative to its mean eigenvalue; keeps directions without a
            gradient in place, whose images are rounding noise.
        noise_floor: smallest root of a rotated second moment that is trusted, relative to their RMS over the matrix, so that coordinates
            holding only rounding noise do not take full-size steps (default: by the gradients' precision).
        max_dim: a side longer than this is left unrotated.
        state_dtype: precision in which momentum and bases are stored, "float32" or "bfloat16"; the second moment and the covariances are
            float32 always.
        product_dtype: precision of the products that rotate gradients and updates, "float32" or "bfloat16".
        rotate: {"include": [...], "exclude": [...]}, shell-style patterns on parameter names that win over the groups' own routing.

    Attributes:
        skipped_updates: updates skipped for a gradient that was not finite, or absurdly large.
        gradient_dtype: precision the gradients were computed in, when it is not the dtype they arrive in (None: as they arrive).

    Raises:
        ValueError: an unknown or out-of-range option, or nothing to rotate.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        geometry: str = "bilateral",
        auto_budget: float = 4.0,
        source: str = "second_order",
        refresh_period: int = 10,
        refresh_allocation: str = "uniform",
        staleness: float = 0.0,
        stagger: bool = True,
        covariance_beta: float | None = None,
        covariance_damping: float = 0.01,
        noise_floor: float | None = None,
        max_dim: int = 8192,
        state_dtype: str = "float32",
        product_dtype: str = "float32",
        rotate: Mapping[str, Any] | None = None,
    ):
        check_patterns(rotate)
        self._patterns = rotate or {}
        self._plan: dict[Tensor, Role] | None = None
        self._stages: Stages | None = None
        self._unread: tuple[list, Outcome] | None = None
        self._skipped_updates = 0
        self.gradient_dtype: torch.dtype | None = None
        defaults = {
            "lr": lr, "betas": tuple(betas) if isinstance(betas, list) else betas, "eps": eps, "weight_decay": weight_decay,
            "geometry": geometry, "auto_budget": auto_budget, "source": source, "refresh_period": refresh_period,
            "refresh_allocation": refresh_allocation, "staleness": staleness, "stagger": stagger, "covariance_beta": covariance_beta,
            "covariance_damping": covariance_damping, "noise_floor": noise_floor, "max_dim": max_dim, "state_dtype": state_dtype,
            "product_dtype": product_dtype, "rotate": None,
        }  # fmt: skip
        check_options(defaults)
        super().__init__(params, defaults)
        check_patterns_match(rotate, [name for group in self.param_groups for name in group.get("param_names", ())])
        if not any(any(entry is not False for entry in group["rotate"]) or group["routed"] for group in self.param_groups):
            raise ValueError(
                "nothing would be rotated: no parameter has two dimensions; pass whole matrices (not flattened partitions of them) "
                "or use AdamW"
            )

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        own = {name: getattr(self, name) for name in ("_patterns", "_stages", "_skipped_updates", "gradient_dtype")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan, self._unread = None, None  # keyed by parameters, which copying replaces

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its `rotate` (see the class) becomes a tuple aligned with its parameters."""
        self._settle()
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if any(p.is_complex() for p in group["params"]):
                raise ValueError("BasisRotation does not take complex parameters: train them with another optimizer")
            check_options(group)
            check_group_keys(group, self.defaults)
            group["routed"] = group["rotate"] is not None or bool(self._patterns)
            group["rotate"] = named_rotation(group["params"], group.get("param_names"), group["rotate"], self._patterns)
        except ValueError:
            del self.param_groups[-1]
            raise
        self._plan = None

    @property
    def skipped_updates(self) -> int:
        """Updates skipped for a gradient that was not finite, or absurdly large."""
        self._settle()
        return self._skipped_updates

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settle()
        if self._plan is None or any(p not in self._plan for group in self.param_groups for p in group["params"]):
            self._plan = assign_roles(self.param_groups, self._stages)
            self._warn_of_idle_options()
        work = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel() > 0]
        if work:
            with torch.autocast(work[0][1].device.type, enabled=False):
                self._take_step(work)
        return loss

    def _warn_of_idle_options(self) -> None:
        if not any(role.stacks for role in self._plan.values()):
            logger.warning("no parameter is rotated: BasisRotation is plain AdamW here")
        allocations = {group["refresh_allocation"] for group in self.param_groups} - {"uniform"}
        if allocations and self._stages is None and len({group["staleness"] for group in self.param_groups}) == 1:
            logger.warning(
                "refresh_allocation %s is the same as uniform: all gradients are equally late; give each stage a parameter group with its "
                "own staleness",
                ", ".join(sorted(allocations)),
            )

    def _take_step(self, work: list[tuple[dict, Tensor]]) -> None:
        sizes = largest_elements([p.grad for _, p in work])
        if self._host_decides(work, sizes):
            self._update([work[i] for i in self._admit(work, sizes.tolist())], Gate())
        else:
            self._unread = work, Outcome(sizes)
            self._update(work, Gate((sizes <= self._limits(work, sizes)).all()))

    def _limits(self, work: list[tuple[dict, Tensor]], sizes: Tensor) -> float | Tensor:
        """The largest elements that the states' units can take in."""
        scales = [self.state[p][SCALE] for _, p in work]
        if all(scale == 1.0 for scale in scales):
            return LARGEST_USABLE
        return LARGEST_USABLE * torch.tensor(scales, dtype=sizes.dtype).to(sizes.device, non_blocking=True)

    def _host_decides(self, work: list[tuple[dict, Tensor]], sizes: Tensor) -> bool:
        """Whether the host looks at the gradients before the update: where it need not wait, or must, as a matrix has no basis yet."""
        return (
            sizes.device.type == "cpu"
            or len({p.device for _, p in work}) > 1
            or any(
                not self.state.get(p) or any(value for key, value in self.state[p].items() if key.rpartition(".")[2] == COLD)
                for _, p in work
            )
        )

    def _admit(self, work: list[tuple[dict, Tensor]], sizes: list[float]) -> list[int]:
        """The members of `work` to update, with states in fitting units: none when a gradient is unusable."""
        unusable = next((i for i, (_, p) in enumerate(work) if not is_usable(self.state.get(p), sizes[i])), None)
        if unusable is not None:
            self._skip(work[unusable][1], sizes[unusable])
            return []
        for (group, p), size in zip(work, sizes):
            self._fit_units(p, size)
            if not self.state.get(p) and size > 0.0:
                self.state[p] = new_state(p, self._plan[p].stacks, group, size)
        return [i for i, (_, p) in enumerate(work) if self.state.get(p)]

    def _fit_units(self, p: Tensor, size: float) -> None:
        """Bring the state of `p` into units that fit a gradient of this finite size."""
        state = self.state.get(p)
        if state and is_history(state, size):
            logger.warning("state of %s begun anew: its gradients were huge and are %.0e now", self._plan[p].name, size)
            del self.state[p]
        elif state:
            rescale(state, size)

    def _skip(self, p: Tensor, size: float) -> None:
        self._skipped_updates += 1
        fault = f"{size:.0e} and too large for what came before" if math.isfinite(size) else "not finite"
        logger.warning("update skipped: the gradient of %s is %s (%d skipped so far)", self._plan[p].name, fault, self._skipped_updates)

    @torch.no_grad()
    def _settle(self) -> None:
        """Learn what became of the last update, where the host did not wait for it: a skipped one counts no step."""
        if self._unread is None:
            return
        (work, outcome), self._unread = self._unread, None
        sizes = outcome.read()
        shut = next((i for i, (_, p) in enumerate(work) if not sizes[i] <= LARGEST_USABLE * self.state[p][SCALE]), None)
        if shut is not None:
            self._skip(work[shut][1], sizes[shut])
            for _, p in work:
                self.state[p][STEP] -= 1
        for (_, p), size in zip(work, sizes):
            if is_usable(self.state[p], size):
                self._fit_units(p, size)

    def _update(self, work: list[tuple[dict, Tensor]], gate: Gate) -> None:
        if not work:
            return
        for _, p in work:
            self.state[p][STEP] += 1
        rotated = [(group, p) for group, p in work if self._plan[p].stacks]
        if all(p.device.type == "cpu" for _, p in rotated):
            costs = [self._plan[p].cost(self.state[p][STEP]) for _, p in rotated]
            workers.run([(cost, partial(self._update_rotated, p, group, gate)) for (group, p), cost in zip(rotated, costs)])
        else:
            self._update_beside(rotated, gate)
        adamw.update([(group, p, self.state[p]) for group, p in work if not self._plan[p].stacks], gate)

    def _update_beside(self, rotated: list[tuple[dict, Tensor]], gate: Gate) -> None:
        """Update rotated parameters on an accelerator, those that are refreshed beside the others."""
        side = SideStream(rotated[0][1].device)
        for refreshing in (True, False):
            with side if refreshing else nullcontext():
                for group, p in rotated:
                    if self._plan[p].refreshes(self.state[p][STEP]) is refreshing:
                        self._update_rotated(p, group, gate)
        side.join()

    def _update_rotated(self, p: Tensor, group: dict, gate: Gate) -> None:
        state, role = self.state[p], self._plan[p]
        gradient = gate.gradient(p.grad if state[SCALE] == 1.0 else p.grad / state[SCALE]).to(torch.float32)
        directions = []
        for stack in role.stacks:
            own = stack.part.take(gradient).reshape(stack.shape)
            update = StackUpdate(stack, state, group, gate, self.gradient_dtype or p.grad.dtype)
            update.accumulate(own)
            self._update_bases(update, own, role, state)
            x, right, step_size = update.direction(own)
            if right is not None and right.dtype == p.dtype == torch.float32 and stack.part.is_whole and p.is_contiguous():
                adamw.add_product_to_weight(p.view(stack.shape), x, right.mT, step_size, group, gate)
                return
            directions.append((stack.part, x if right is None else (x.to(right.dtype) @ right.mT).float()))
        whole = torch.empty(p.shape, device=p.device)
        for part, direction in directions:
            part.put(direction.reshape(part.shape), whole)
        adamw.add_to_weight(p, whole, step_size, group, gate)

    def _update_bases(self, update: StackUpdate, gradient: Tensor, role: Role, state: dict) -> None:
        """The cold starts and refreshes that are due."""
        stack = update.stack
        cold = state[stack.key(COLD)]
        due = [i for i in role.due(stack, state[STEP]) if i not in cold]
        for index in update.warming(gradient):
            self._try(lambda i: update.start(i, gradient), index, stack, role, state)
        for index in due:
            self._try(update.refresh, index, stack, role, state)

    def _try(self, change_basis: Callable[[int], None], index: int, stack: MatrixStack, role: Role, state: dict) -> None:
        """Change the basis of one matrix. Where the decomposition fails it is kept, but not three times in a row."""
        failures = state[stack.key(FAILED_REFRESHES)]
        try:
            change_basis(index)
        except torch.linalg.LinAlgError as error:
            failures[index] += 1
            name = f"{role.name}{stack.name_of(index)}"
            logger.warning("basis of %s kept: %s (failure %d in a row)", name, error, failures[index])
            if failures[index] >= MAX_FAILED_REFRESHES:
                raise RuntimeError(
                    f"the basis of {name} could not be refreshed {MAX_FAILED_REFRESHES} times in a row ({error}); "
                    "lower the learning rate, raise covariance_damping, or leave the matrix out with rotate.exclude"
                ) from error
        else:
            failures[index] = 0

    def share_refreshes(self, staleness: Sequence[float], costs: Sequence[float], stage: int) -> None:
        """Tell the optimizer of one pipeline stage about all stages, between which `refresh_allocation` shares the refreshes.

        Args:
            staleness: of each stage, in updates.
            costs: `refresh_cost()` of each stage's optimizer.
            stage: the one whose parameters these are.
        """
        self._settle()
        self._stages, self._plan = (tuple(staleness), tuple(costs), stage), None

    def describe(self) -> str:
        """How many matrices are rotated on which sides, in words."""
        return describe_sides(assign_roles(self.param_groups, self._stages).values())

    def refresh_cost(self) -> int:
        """Multiply-adds of refreshing all matrices once."""
        return sum(sum(role.refresh_costs()) for role in assign_roles(self.param_groups, self._stages).values())

    def state_dict(self) -> dict[str, Any]:
        """As of every torch optimizer. Momenta of rotated matrices are in the rotated basis."""
        self._settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the options of this run win, but for RESTORED_OPTIONS. Parameters' dtypes do not matter.

        Raises:
            ValueError: the state of a parameter is that of another routing, layout, geometry, source or shape; nothing is loaded then.
        """
        current = [p for group in self.param_groups for p in group["params"]]
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        options = [{k: v for k, v in group.items() if k != "params" and k not in RESTORED_OPTIONS} for group in self.param_groups]
        self._plan = assign_roles(self.param_groups, self._stages)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        layouts = [entry for group in state_dict["param_groups"] for entry in group.get("rotate") or [None] * len(group["params"])]
        exact = {}
        for p, saved_id, layout in zip(current, saved_ids, layouts):
            saved = state_dict["state"].get(saved_id)
            if saved:
                check_layout_of_state(p, layout, self._plan[p].stacks, self._plan[p].name)
                expected = new_state(p, self._plan[p].stacks, groups[p], 1.0, meta=True)
                saved = complete_state(saved, expected)
                check_state(saved, expected, self._plan[p].name)
                exact[p] = {
                    key: value.detach().to(p.device, expected[key].dtype, copy=True) if torch.is_tensor(value) else copy(value)
                    for key, value in saved.items()
                }
        self._unread = None
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state.update(exact)
        for group, kept in zip(self.param_groups, options):
            group.update(kept)
