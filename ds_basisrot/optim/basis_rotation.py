"""BasisRotation: Adam in a rotated basis for matrices and AdamW for every other parameter, as one torch optimizer."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from .loading import is_adams, loaded_state
from .options import check_group_keys, check_options, check_patterns
from .roles import Stages, assign_roles, describe_sides
from .routing import check_patterns_match, named_rotation
from .updates import MatrixUpdates

logger = logging.getLogger("ds_basisrot")

# What a checkpoint restores in a group, as in every torch optimizer; all other options stay as configured.
RESTORED_OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay")


class BasisRotation(MatrixUpdates, torch.optim.Optimizer):
    """Adam in a basis aligned with the Hessian's eigenvectors (arXiv 2602.03515), for pipelines whose gradients are stale.

    For a rotated weight W `[m, n]` with gradient G, momentum M' and second moment S in the basis U `[m, m]`, V `[n, n]`:

        G' = U^T G V;  M' <- b1 M' + (1-b1) G';  S <- b2 S + (1-b2) G'^2
        W <- (1 - lr wd) W - lr sqrt(1-b2^t) / (1-b1^t) U ( M' / (max(sqrt(S), noise_floor RMS(sqrt(S))) + eps) ) V^T

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
        layout_independent: see `MatrixUpdates`.

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
        self._stages: Stages | None = None
        self._begin()
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
        own = {name: getattr(self, name) for name in ("_patterns", "_stages", "_skipped_updates", "gradient_dtype", "layout_independent")}
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

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient; returns the closure's loss, if there is a closure."""
        if type(self).step is not BasisRotation.step:  # of a subclass, which torch has wrapped
            return self._step(closure)
        observed = torch.autograd._profiler_enabled() or any(_step_hooks(self))
        step = self._observed_step if observed else self._step
        return step() if closure is None else step(closure)

    step.hooked = True  # torch wraps a step without this mark, for hooks and for profilers; its wrapper takes longer than a small update

    def _step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._prepare()
            work = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel() > 0]
            if work:
                with _no_autocast(work[0][1].device.type):
                    self._take_step(work)
        return loss

    _observed_step = torch.optim.Optimizer.profile_hook_step(_step)

    def _prepare(self) -> None:
        """Know what became of the last update, and the role of every parameter."""
        self._settle()
        if self._plan is None or any(p not in self._plan for group in self.param_groups for p in group["params"]):
            self._plan = assign_roles(self.param_groups, self._stages)
            self._warn_of_idle_options()

    @torch.no_grad()
    def predicted_changes(self, updates: int) -> dict[Tensor, Tensor]:
        """What would be added to each weight in the next updates if their gradients were zero: for pipelines that predict weights.

        The momenta decay, the counts go on; second moments and bases are held, and no weight decays. On an accelerator it waits for the
        last update.

        Args:
            updates: how many, >= 0.

        Returns:
            By parameter, float32 in its shape, for those that have a state.
        """
        self._prepare()
        work = [(group, p) for group in self.param_groups for p in group["params"] if self.state.get(p)]
        if not work:
            return {}
        with _no_autocast(work[0][1].device.type):
            return self._predicted_changes(work, updates)

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

    def states_of_groups(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """(options, state) of every parameter that has a state."""
        return ((group, self.state[p]) for group in self.param_groups for p in group["params"] if self.state.get(p))

    def state_dict(self) -> dict[str, Any]:
        """As of every torch optimizer. Momenta of rotated matrices are in the rotated basis."""
        self._settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; the options of this run win, but for RESTORED_OPTIONS. Parameters' dtypes do not matter.

        What Adam trained before keeps its momentum, in a first basis from the next gradient.

        Raises:
            ValueError: the state of a parameter is that of another routing, layout, geometry, source or shape; nothing is loaded then.
        """
        current = [p for group in self.param_groups for p in group["params"]]
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        options = [{k: v for k, v in group.items() if k != "params" and k not in RESTORED_OPTIONS} for group in self.param_groups]
        self._plan = assign_roles(self.param_groups, self._stages)
        groups = {p: group for group in self.param_groups for p in group["params"]}
        layouts = [entry for group in state_dict["param_groups"] for entry in group.get("rotate") or [None] * len(group["params"])]
        exact, adams = {}, 0
        for p, saved_id, layout in zip(current, saved_ids, layouts):
            saved = state_dict["state"].get(saved_id)
            if saved:
                exact[p] = loaded_state(p, self._plan[p], groups[p], saved, layout)
                adams += bool(self._plan[p].stacks) and is_adams(saved)
        if adams:
            logger.warning("%d rotated parameters had Adam's state: their momentum is kept, the next gradients give the first bases", adams)
        self._unread = None
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state.update(exact)
        for group, kept in zip(self.param_groups, options):
            group.update(kept)


def _step_hooks(optimizer: torch.optim.Optimizer) -> tuple[Mapping[int, Any], ...]:
    """All that is to be called before or after a step, by who registered it."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return *own, torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks


def _no_autocast(device_type: str) -> AbstractContextManager:
    """Switches autocast off where it is on; where it is not, that would only cost time."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
