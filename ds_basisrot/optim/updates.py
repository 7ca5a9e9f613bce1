"""Updates of parameters by their gradients: which gradients may change anything, states in fitting units, matrices in parallel."""

import logging
import math
from collections.abc import Callable, MutableMapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import adamw, workers
from .gradient_gate import OPEN, Gate, Outcome, largest_elements, largest_elements_on_host
from .layout import Part
from .roles import Role
from .rotated_adam import StackUpdate
from .side_stream import SideStream
from .state import COLD, FAILED_REFRESHES, LARGEST_USABLE, SCALE, STEP, MatrixStack, fits, is_history, is_usable, new_state, rescale

logger = logging.getLogger("ds_basisrot")

MAX_FAILED_REFRESHES = 3

Work = list[tuple[dict[str, Any], Tensor]]
"""(parameter group, parameter) of everything that has a gradient in this update."""

Agreement = Callable[[Tensor], Tensor]


class MatrixUpdates:
    """What an optimizer does in one update with parameters whose roles are known.

    Attributes:
        state: of each parameter.
        skipped_updates: updates skipped for a gradient that was not finite, or absurdly large.
        gradient_dtype: precision the gradients were computed in, when it is not the dtype they arrive in (None: as they arrive).
        layout_independent: on a processor, use only operations whose rounding does not depend on where an element lies in memory, so that
            a parameter's update is bitwise the same whole and in slices; some percents slower.
    """

    state: MutableMapping[Tensor, Any]

    def _begin(self) -> None:
        self._plan: dict[Tensor, Role] | None = None
        self._unread: tuple[Work, Outcome] | None = None
        self._skipped_updates = 0
        self.gradient_dtype: torch.dtype | None = None
        self.layout_independent = False

    @property
    def skipped_updates(self) -> int:
        """Updates skipped for a gradient that was not finite, or absurdly large."""
        self._settle()
        return self._skipped_updates

    def _take_step(self, work: Work) -> None:
        """Update every parameter of `work` by its gradient, or none."""
        gradients = [p.grad for _, p in work]
        if all(g.device.type == "cpu" for g in gradients) and self._host_decides(work, gradients[0].device):
            decision = self._decide_on_host(work, largest_elements_on_host(gradients), None)
        else:
            decision = self._decide(work, largest_elements(gradients))
        if decision is not None:
            self._update(*decision)

    def _decide(self, work: Work, sizes: Tensor, agree: Agreement | None = None) -> tuple[Work, Gate] | None:
        """Whether the gradients, whose largest elements are `sizes`, may change anything.

        Args:
            agree: makes one flag of those of several ranks, each a boolean tensor; no rank updates where another one must not. None: there
                are no others.

        Returns:
            What to update, with states in fitting units, and the gate to do it through; None: the update is skipped.
        """
        if self._host_decides(work, sizes.device):
            return self._decide_on_host(work, sizes.tolist(), agree)
        flag = (sizes <= self._limits(work, sizes)).all()
        if agree is not None:
            flag = agree(flag)
        self._unread = work, Outcome(torch.cat([sizes, flag.to(sizes.dtype).reshape(1)]))
        return work, Gate(flag)

    def _limits(self, work: Work, sizes: Tensor) -> float | Tensor:
        """The largest elements that the states' units can take in."""
        scales = [self.state[p][SCALE] for _, p in work]
        if all(scale == 1.0 for scale in scales):
            return LARGEST_USABLE
        return LARGEST_USABLE * torch.tensor(scales, dtype=sizes.dtype).to(sizes.device, non_blocking=True)

    def _host_decides(self, work: Work, device: torch.device) -> bool:
        """Whether the host looks at the gradients before the update: where it need not wait, or must, as a matrix has no basis yet."""
        return (
            device.type == "cpu"
            or len({p.device for _, p in work}) > 1
            or any(
                not self.state.get(p) or any(value for key, value in self.state[p].items() if key.rpartition(".")[2] == COLD)
                for _, p in work
            )
        )

    def _decide_on_host(self, work: Work, sizes: list[float], agree: Agreement | None) -> tuple[Work, Gate] | None:
        """`_decide` where the sizes are known here."""
        states = [self.state.get(p) for _, p in work]
        ordinary = all(map(fits, states, sizes))
        unusable = None if ordinary else next((i for i, usable in enumerate(map(is_usable, states, sizes)) if not usable), None)
        usable = unusable is None
        if not (usable if agree is None else agree(torch.tensor(usable))):
            self._skip(work, sizes, unusable)
            return None
        if ordinary:
            return work, OPEN
        for (group, p), size in zip(work, sizes):
            self._fit_units(p, size)
            if not self.state.get(p) and size > 0.0:
                self.state[p] = new_state(p, self._plan[p].stacks, group, size)
        return [member for member in work if self.state.get(member[1])], OPEN

    def _fit_units(self, p: Tensor, size: float) -> None:
        """Bring the state of `p` into units that fit a gradient of this finite size."""
        state = self.state.get(p)
        if state and is_history(state, size):
            logger.warning("state of %s begun anew: its gradients were huge and are %.0e now", self._plan[p].name, size)
            del self.state[p]
        elif state:
            rescale(state, size)

    def _skip(self, work: Work, sizes: list[float], unusable: int | None) -> None:
        self._skipped_updates += 1
        fault = "of another rank is not usable"
        if unusable is not None:
            size, p = sizes[unusable], work[unusable][1]
            what = f"{size:.0e} and too large for what came before" if math.isfinite(size) else "not finite"
            fault = f"of {self._plan[p].name} is {what}"
        logger.warning("update skipped: the gradient %s (%d skipped so far)", fault, self._skipped_updates)

    def _settle(self) -> None:
        """Learn what became of the last update, where the host did not wait for it: a skipped one counts no step."""
        if self._unread is not None:
            self._read_outcome()

    @torch.no_grad()
    def _read_outcome(self) -> None:
        (work, outcome), self._unread = self._unread, None
        *sizes, open_gate = outcome.read()
        if not open_gate:
            shut = next((i for i, (_, p) in enumerate(work) if not sizes[i] <= LARGEST_USABLE * self.state[p][SCALE]), None)
            self._skip(work, sizes, shut)
            for _, p in work:
                self.state[p][STEP] -= 1
        for (_, p), size in zip(work, sizes):
            if is_usable(self.state[p], size):
                self._fit_units(p, size)

    def _update(self, work: Work, gate: Gate) -> None:
        if not work:
            return
        for _, p in work:
            self.state[p][STEP] += 1
        rotated = [(group, p) for group, p in work if self._plan[p].stacks]
        if all(p.device.type == "cpu" for _, p in rotated):
            tasks = [partial(self._update_rotated, p, group, gate) for group, p in rotated]
            workers.run(tasks, lambda: [self._plan[p].cost(self.state[p][STEP]) for _, p in rotated])
        else:
            self._update_beside(rotated, gate)
        adamw.update([(group, p, self.state[p]) for group, p in work if not self._plan[p].stacks], gate, self.layout_independent)

    def _update_beside(self, rotated: Work, gate: Gate) -> None:
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
            own = (gradient if stack.part.is_whole else stack.part.take(gradient)).reshape(stack.shape)
            update = StackUpdate(stack, state, group, gate, self.gradient_dtype or p.grad.dtype)
            update.accumulate(own)
            self._update_bases(update, own, role, state)
            x, right, step_size = update.direction(own)
            fits = right is not None and right.dtype == p.dtype == torch.float32 and stack.part.is_whole and p.is_contiguous()
            if fits and not self.layout_independent:
                adamw.add_product_to_weight(p.view(stack.shape), x, right.mT, step_size, group, gate)
                return
            directions.append((stack.part, x, right))
        adamw.add_to_weight(p, _whole(p, directions), step_size, group, gate)

    def _predicted_changes(self, work: Work, updates: int) -> dict[Tensor, Tensor]:
        """What the momenta alone would add to weights that have states in the next updates: float32, in their shapes."""
        unrotated = [(group, p, self.state[p]) for group, p in work if not self._plan[p].stacks]
        changes = adamw.predicted_changes(unrotated, updates)
        for group, p in work:
            directions = []
            for stack in self._plan[p].stacks:
                update = StackUpdate(stack, self.state[p], group, OPEN, self.gradient_dtype or p.dtype)
                x, right, step_size = update.predicted(updates)
                directions.append((stack.part, x, right))
            if directions:
                changes[p] = _whole(p, directions).mul_(-step_size)
        return changes

    def _update_bases(self, update: StackUpdate, gradient: Tensor, role: Role, state: dict) -> None:
        """The cold starts and refreshes that are due."""
        stack = update.stack
        due = role.due(stack, state[STEP])
        if state[stack.cold]:
            due = [i for i in due if i not in state[stack.cold]]
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


def _whole(p: Tensor, directions: list[tuple[Part, Tensor, Tensor | None]]) -> Tensor:
    """Of the parts X V^T (V None: X) of a parameter a tensor in its shape, float32; it may be X."""
    products = [(part, x if right is None else (x.to(right.dtype) @ right.mT).float()) for part, x, right in directions]
    if products[0][0].is_whole:
        return products[0][1].reshape(p.shape)
    whole = torch.empty(p.shape, device=p.device)
    for part, product in products:
        part.put(product.reshape(part.shape), whole)
    return whole
