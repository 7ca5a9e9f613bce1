"""BasisRotation: Adam in a rotated basis for matrices and AdamW for every other parameter, as one torch optimizer."""

import logging
import math
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from . import eigenbasis, refresh
from .options import check_group_keys, check_options, check_patterns
from .routing import check_patterns_match, named_rotation
from .state import (
    FAILED_REFRESHES,
    LEFT_BASIS,
    LEFT_COVARIANCE,
    MOMENTUM,
    RIGHT_BASIS,
    RIGHT_COVARIANCE,
    ROTATED_MOMENTUM,
    ROTATED_SECOND_MOMENT,
    SCALE,
    SECOND_MOMENT,
    SIDES,
    SMALLEST_EPS,
    STEP,
    check_state,
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
    covariances (second order) or the momentum (first order). A stacked weight `[e, m, n]` is e matrices. Parameters that are not rotated
    get AdamW with the same hyper-parameters. States are float32 whatever the parameters' dtype. An update with a gradient that is not
    finite, or 1e12 times larger than ordinary, is skipped, counted in `skipped_updates` and logged. A parameter's all-zero gradients before
    its first real one are ignored.

    Args:
        params: parameters, named parameters, or groups, as for any torch optimizer; `ds_basisrot.param_groups(model)` routes a model's
            parameters by module. A group's `rotate` is True, False, or a list of bools aligned with its parameters; without it every
            parameter with two dimensions is rotated. A group may have its own value of every option.
        lr: learning rate.
        betas: decay rates of momentum and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as in AdamW.
        geometry: "bilateral" rotates both sides of a matrix, "unilateral" the smaller one.
        source: "second_order" keeps covariances of the gradient, "first_order" lets the momentum stand in for them.
        refresh_period: updates between two bases of a matrix.
        refresh_allocation: how refreshes are shared among pipeline stages: "uniform".
        stagger: spread the matrices' refreshes over the period, so that no update is slow; False refreshes all at once.
        covariance_beta: decay of the covariances (default: betas[1]).
        covariance_damping: added to a covariance's diagonal at a refresh, relative to its mean eigenvalue; keeps directions without a
            gradient in place, whose images are rounding noise.
        noise_floor: smallest root of a rotated second moment that is trusted, relative to their RMS over the matrix, so that coordinates
            holding only rounding noise do not take full-size steps (default: by the gradients' precision).
        max_dim: a side larger than this is left unrotated.
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
        source: str = "second_order",
        refresh_period: int = 10,
        refresh_allocation: str = "uniform",
        stagger: bool = True,
        covariance_beta: float | None = None,
        covariance_damping: float = 0.01,
        noise_floor: float | None = None,
        max_dim: int = 8192,
        rotate: Mapping[str, list[str]] | None = None,
    ):
        check_patterns(rotate)
        self._patterns = rotate or {}
        self._plan: dict[Tensor, _Role] | None = None
        self.skipped_updates = 0
        self.gradient_dtype: torch.dtype | None = None
        defaults = {
            "lr": lr, "betas": tuple(betas) if isinstance(betas, list) else betas, "eps": eps, "weight_decay": weight_decay,
            "geometry": geometry, "source": source, "refresh_period": refresh_period, "refresh_allocation": refresh_allocation,
            "stagger": stagger, "covariance_beta": covariance_beta, "covariance_damping": covariance_damping, "noise_floor": noise_floor,
            "max_dim": max_dim, "rotate": None,
        }  # fmt: skip
        check_options(defaults)
        super().__init__(params, defaults)
        check_patterns_match(rotate, [name for group in self.param_groups for name in group.get("param_names", ())])
        if not any(any(group["rotate"]) or group["routed"] for group in self.param_groups):
            raise ValueError(
                "nothing would be rotated: no parameter has two dimensions; pass whole matrices (not flattened partitions of them) "
                "or use AdamW"
            )

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("_patterns", "skipped_updates", "gradient_dtype")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan = None  # keyed by parameters, which copying replaces

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its `rotate` (see the class) becomes a tuple of bools aligned with its parameters."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(p.is_complex() for p in group["params"]):
            raise ValueError("BasisRotation does not take complex parameters: train them with another optimizer")
        check_options(group)
        check_group_keys(group, self.defaults)
        group["routed"] = group["rotate"] is not None or bool(self._patterns)
        group["rotate"] = named_rotation(group["params"], group.get("param_names"), group["rotate"], self._patterns)
        self._plan = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of every parameter that has a gradient; returns the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._plan is None or any(p not in self._plan for group in self.param_groups for p in group["params"]):
            self._plan = self._make_plan()
        present = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None and p.numel() > 0]
        largest = _largest_elements([p.grad for _, p in present])
        unusable = next(((p, size) for (_, p), size in zip(present, largest) if not is_usable(self.state.get(p), size)), None)
        if unusable is not None:
            self.skipped_updates += 1
            p, size = unusable
            fault = f"{size:.0e} and too large for what came before" if math.isfinite(size) else "not finite"
            logger.warning("update skipped: the gradient of %s is %s (%d skipped so far)", self._plan[p].name, fault, self.skipped_updates)
            return loss
        for (group, p), size in zip(present, largest):
            state = self.state.get(p)
            if not state or is_history(state, size):
                if size == 0.0:
                    continue
                if state:
                    logger.warning("state of %s begun anew: its gradients were huge and are %.0e now", self._plan[p].name, size)
                state = self.state[p] = new_state(p, self._plan[p].sides, group["source"] == "second_order", size)
            self._update(p, group, state, size)
        return loss

    def _update(self, p: Tensor, group: dict, state: dict, size: float) -> None:
        role, (beta1, beta2) = self._plan[p], group["betas"]
        rescale(state, size)
        scale = state[SCALE]
        gradient = (p.grad if scale == 1.0 else p.grad / scale).to(torch.float32)
        state[STEP] += 1
        if role.rotated:
            self._update_bases(p, group, state, role, gradient)
            gradient = _rotate(gradient, state)
            momentum, second_moment = state[ROTATED_MOMENTUM], state[ROTATED_SECOND_MOMENT]
        else:
            momentum, second_moment = state[MOMENTUM], state[SECOND_MOMENT]
        momentum.lerp_(gradient, 1 - beta1)
        second_moment.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)

        step_size = float(group["lr"]) / (1 - beta1 ** state[STEP])
        correction = math.sqrt(1 - beta2 ** state[STEP])
        eps = max(group["eps"] / scale, SMALLEST_EPS)
        if role.rotated:
            # The method adds eps to the root before its bias correction, AdamW after it.
            denominator = torch.maximum(second_moment.sqrt().add_(eps), self._noise_floor(p, group, second_moment)).div_(correction)
        else:
            denominator = second_moment.sqrt().div_(correction).add_(eps)
        update = momentum / denominator
        if role.rotated:
            update = _rotate_back(update, state)

        weight = p if p.dtype in (torch.float32, torch.float64) else p.to(torch.float32)
        weight.mul_(1 - float(group["lr"]) * group["weight_decay"]).add_(update.to(weight.dtype), alpha=-step_size)
        if weight is not p:
            p.copy_(weight)

    def _noise_floor(self, p: Tensor, group: dict, second_moment: Tensor) -> Tensor:
        """Smallest trusted root of a rotated second moment, `[..., 1, 1]`."""
        relative = group["noise_floor"]
        if relative is None:
            relative = eigenbasis.default_noise_floor(self.gradient_dtype or p.grad.dtype)
        return relative * second_moment.mean((-2, -1), keepdim=True).sqrt_()

    def _update_bases(self, p: Tensor, group: dict, state: dict, role: "_Role", gradient: Tensor) -> None:
        """Covariances of this gradient, and the cold start or a refresh when one is due; the moments follow the new basis."""
        beta = group["betas"][1] if group["covariance_beta"] is None else group["covariance_beta"]
        if LEFT_COVARIANCE in state:
            state[LEFT_COVARIANCE].lerp_(gradient @ gradient.mT, 1 - beta)
        if RIGHT_COVARIANCE in state:
            state[RIGHT_COVARIANCE].lerp_(gradient.mT @ gradient, 1 - beta)
        try:
            if state[STEP] == 1:
                bases = eigenbasis.cold_start(gradient, *role.sides, self.gradient_dtype or p.grad.dtype)
                _set_bases(state, *bases)
            elif refresh.is_due(state[STEP], group["refresh_period"], role.offset):
                _refresh(state, group)
            else:
                return
        except torch.linalg.LinAlgError as error:
            state[FAILED_REFRESHES] += 1
            logger.warning("basis of %s kept: %s (failure %d in a row)", role.name, error, state[FAILED_REFRESHES])
            if state[FAILED_REFRESHES] >= MAX_FAILED_REFRESHES:
                raise RuntimeError(
                    f"the basis of {role.name} could not be refreshed {MAX_FAILED_REFRESHES} times in a row ({error}); "
                    "lower the learning rate, raise covariance_damping, or leave the matrix out with rotate.exclude"
                ) from error
        else:
            state[FAILED_REFRESHES] = 0

    def _make_plan(self) -> dict[Tensor, "_Role"]:
        """The role of every parameter: its name, its rotated sides, its place in the refresh period."""
        plan = {}
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
            if len(group["rotate"]) != len(group["params"]) or any(
                flag and p.ndim not in (2, 3) for p, flag in zip(group["params"], group["rotate"])
            ):
                raise RuntimeError(
                    "the parameters of a group were exchanged after BasisRotation was built (by a wrapper that flattens them?): "
                    "it needs the whole matrices it was given; use add_param_group for new ones"
                )
            for p, name, rotated in zip(group["params"], names, group["rotate"]):
                sides = eigenbasis.rotated_sides(p.shape, group["geometry"], group["max_dim"]) if rotated else (False, False)
                plan[p] = _Role(f"{name} {list(p.shape)}", sides)
        matrices = [(group, p) for group in self.param_groups for p in group["params"] if plan[p].rotated]
        for index, (group, p) in enumerate(matrices):
            plan[p].offset = refresh.offset(index, len(matrices), group["refresh_period"]) if group["stagger"] else 0
        return plan

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state exactly, each tensor in the dtype it was saved in. The options of this run win, but for RESTORED_OPTIONS.

        Raises:
            ValueError: the state of a parameter is that of another routing, geometry, source or shape; nothing is loaded then.
        """
        current = [p for group in self.param_groups for p in group["params"]]
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        options = [{k: v for k, v in group.items() if k != "params" and k not in RESTORED_OPTIONS} for group in self.param_groups]
        self._plan = self._make_plan()
        groups = {p: group for group in self.param_groups for p in group["params"]}
        exact = {}
        for p, saved_id in zip(current, saved_ids):
            saved = state_dict["state"].get(saved_id)
            if saved:
                check_state(
                    saved, new_state(p, self._plan[p].sides, groups[p]["source"] == "second_order", 1.0, meta=True), self._plan[p].name
                )
                exact[p] = {k: v.detach().to(p.device, copy=True) if torch.is_tensor(v) else copy(v) for k, v in saved.items()}
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self.state.update(exact)
        for group, kept in zip(self.param_groups, options):
            group.update(kept)


class _Role:
    """What the optimizer does with one parameter: its printable name, its rotated sides (left, right), its refresh offset in updates."""

    def __init__(self, name: str, sides: tuple[bool, bool]):
        self.name, self.sides, self.offset = name, sides, 0

    @property
    def rotated(self) -> bool:
        return any(self.sides)


def _largest_elements(gradients: list[Tensor]) -> list[float]:
    """The largest magnitude in each gradient (NaN where there is one): one read from the device for all of them."""
    if not gradients:
        return []
    if any(g.is_sparse for g in gradients):
        raise RuntimeError("BasisRotation does not take sparse gradients: use sparse=False in nn.Embedding")
    norms = torch._foreach_norm(gradients, math.inf)
    return torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms]).tolist()


def _rotate(matrix: Tensor, state: dict) -> Tensor:
    if LEFT_BASIS in state:
        matrix = state[LEFT_BASIS].mT @ matrix
    if RIGHT_BASIS in state:
        matrix = matrix @ state[RIGHT_BASIS]
    return matrix


def _rotate_back(matrix: Tensor, state: dict) -> Tensor:
    if LEFT_BASIS in state:
        matrix = state[LEFT_BASIS] @ matrix
    if RIGHT_BASIS in state:
        matrix = matrix @ state[RIGHT_BASIS].mT
    return matrix


def _set_bases(state: dict, left: Tensor | None, right: Tensor | None) -> None:
    for key, basis in ((LEFT_BASIS, left), (RIGHT_BASIS, right)):
        if basis is not None:
            if not basis.isfinite().all():
                raise torch.linalg.LinAlgError("the decomposition is not finite")
            state[key].copy_(basis)


def _refresh(state: dict, group: dict) -> None:
    """A new basis from the covariances or the momentum; the momentum is re-expressed in it, the second moment follows its columns."""
    momentum = _rotate_back(state[ROTATED_MOMENTUM], state)
    damping, orders = group["covariance_damping"], []
    bases = []
    for left, (basis, covariance) in zip((True, False), SIDES):
        if basis not in state:
            fresh, order = None, None
        elif group["source"] == "second_order":
            fresh, order = eigenbasis.power_step(state[covariance], state[basis], damping)
        else:
            fresh, order = eigenbasis.power_step_of_momentum(momentum, state[basis], left, damping)
        bases.append(fresh)
        orders.append(order)
    _set_bases(state, *bases)
    second_moment = state[ROTATED_SECOND_MOMENT]
    for order, gather in zip(orders, (eigenbasis.gather_rows, eigenbasis.gather_columns)):
        if order is not None:
            second_moment.copy_(gather(second_moment, order))
    state[ROTATED_MOMENTUM].copy_(_rotate(momentum, state))
