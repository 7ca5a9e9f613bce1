"""What the optimizer does with each parameter: which matrices it consists of, which of their sides are rotated, when they are refreshed."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from torch import Tensor

from . import eigenbasis, refresh
from .costs import MatrixCost, matrix_cost
from .layout import parts
from .state import MatrixStack

Stages = tuple[Sequence[float], Sequence[float], int]
"""Staleness and refresh cost of every pipeline stage, and the stage that these parameters are of."""


class Role:
    """One parameter: its printable name, its matrices (none: AdamW), their refreshes per update."""

    def __init__(self, name: str, stacks: list[MatrixStack], second_order: bool):
        self.name, self.stacks, self.second_order, self.rate = name, stacks, second_order, Fraction(1)

    def due(self, stack: MatrixStack, update: int) -> list[int]:
        """The matrices of `stack` that are refreshed at this update (1-based)."""
        return [i for i, offset in enumerate(stack.offsets) if refresh.is_due(update, self.rate, offset)]

    def refreshes(self, update: int) -> bool:
        """Whether any matrix is refreshed at this update."""
        return any(self.due(stack, update) for stack in self.stacks)

    def of_one(self, index: int) -> "Role":
        """The role of one matrix of a stack."""
        stacks = []
        for stack in self.stacks:
            part = replace(stack.part, shape=(1, *stack.part.shape[1:]), parameter_shape=(1, *stack.part.parameter_shape[1:]))
            stacks.append(MatrixStack(part, stack.sides))
        one = Role(f"{self.name}[{index}]", stacks, self.second_order)
        one.follow(self, index)
        return one

    def follow(self, whole: "Role", index: int) -> None:
        """Refresh when `whole` does, of which this is a copy, or the matrix `index` of a stack."""
        self.rate = whole.rate
        for own, its in zip(self.stacks, whole.stacks):
            count = own.part.shape[0]
            own.offsets = list(its.offsets if count == its.part.shape[0] else its.offsets[index : index + 1])

    def refresh_costs(self) -> list[int]:
        """Multiply-adds of refreshing each stack once."""
        return [stack.part.shape[0] * self.matrix_cost(stack).refresh_madds for stack in self.stacks]

    def cost(self, update: int) -> int:
        """Multiply-adds of this update."""
        return sum(
            stack.part.shape[0] * self.matrix_cost(stack).update_madds
            + len(self.due(stack, update)) * self.matrix_cost(stack).refresh_madds
            for stack in self.stacks
        )

    def matrix_cost(self, stack: MatrixStack) -> MatrixCost:
        """Of each of its matrices."""
        return matrix_cost(*stack.part.shape[1:], stack.sides, self.second_order)


def assign_roles(param_groups: Sequence[dict[str, Any]], stages: Stages | None) -> dict[Tensor, Role]:
    """The role of every parameter of the groups.

    Args:
        param_groups: of the optimizer; each `rotate` has an entry for each parameter.
        stages: the pipeline stages that share the refreshes; None: the groups are the stages, each with its `staleness`.

    Raises:
        RuntimeError: parameters are not those that `rotate` was made for.
    """
    roles = {}
    for index, group in enumerate(param_groups):
        names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
        if len(group["rotate"]) != len(group["params"]) or any(
            entry is not False and p.ndim < 2 for p, entry in zip(group["params"], group["rotate"])
        ):
            raise RuntimeError(
                "the parameters of a group were exchanged after BasisRotation was built (by a wrapper that flattens them?): "
                "it needs the whole matrices it was given; use add_param_group for new ones"
            )
        for p, name, entry in zip(group["params"], names, group["rotate"]):
            roles[p] = Role(f"{name} {list(p.shape)}", _stacks(p, entry, group), group["source"] == "second_order")
    _schedule_refreshes(param_groups, stages, roles)
    return roles


def describe_sides(roles: Iterable[Role]) -> str:
    """How many matrices are rotated on which sides, in words."""
    words = {(True, True): "on both sides", (True, False): "on the left side only", (False, True): "on the right side only"}
    counts = Counter()
    for role in roles:
        for stack in role.stacks:
            counts[stack.sides] += stack.part.shape[0]
    if not counts:
        return "no matrix is rotated (no side is, or those that would be are longer than max_dim): this is AdamW"
    listed = ", ".join(f"{counts[sides]} {phrase}" for sides, phrase in words.items() if counts[sides])
    return f"{sum(counts.values())} matrices are rotated" + (f", {listed}" if listed else "")


def _stacks(p: Tensor, entry: Any, group: dict[str, Any]) -> list[MatrixStack]:
    """The matrices of a parameter; none where no side of any of them is rotated."""
    stacks = [
        MatrixStack(part, eigenbasis.rotated_sides(part.shape, group["geometry"], group["max_dim"], group["auto_budget"]))
        for part in parts(p.shape, entry)
    ]
    return stacks if any(any(stack.sides) for stack in stacks) else []


def _schedule_refreshes(param_groups: Sequence[dict[str, Any]], stages: Stages | None, roles: dict[Tensor, Role]) -> None:
    """Each role's rate and each matrix's offset: matrices of equal rates are spread over the period together."""
    costs = [sum(sum(roles[p].refresh_costs()) for p in group["params"]) for group in param_groups]
    matrices = defaultdict(list)
    for index, group in enumerate(param_groups):
        staleness, stage_costs, stage = stages or ([other["staleness"] for other in param_groups], costs, index)
        rate = refresh.rates(group["refresh_allocation"], group["refresh_period"], staleness, stage_costs)[stage]
        for p in group["params"]:
            roles[p].rate = rate
            for stack, cost in zip(roles[p].stacks, roles[p].refresh_costs()):
                count = stack.part.shape[0]
                stack.offsets = [0] * count
                if group["stagger"]:
                    matrices[rate] += [(stack, i, cost // count) for i in range(count)]
    for rate, members in matrices.items():
        for (stack, i, _), offset in zip(members, refresh.offsets([cost for *_, cost in members], rate)):
            stack.offsets[i] = offset
