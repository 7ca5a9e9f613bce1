"""Adam in the rotated basis for one stack of equally shaped matrices: covariances, cold start, refresh, update direction."""

import math
from typing import Any

import torch
from torch import Tensor

from . import eigenbasis, moments
from .gradient_gate import Gate
from .state import (
    SCALE,
    SMALLEST_EPS,
    STATE_DTYPES,
    STEP,
    MatrixStack,
)
from .symmetric import add_gram, unpack


class StackUpdate:
    """One update of the matrices of a stack; the caller applies the direction to the weight.

    Args:
        stack: the matrices.
        state: the parameter's state; its `step` counts this update already.
        group: the options.
        gate: lets the update through, or not.
        gradient_dtype: precision the gradients were computed in.
    """

    def __init__(self, stack: MatrixStack, state: dict[str, Any], group: dict[str, Any], gate: Gate, gradient_dtype: torch.dtype):
        self.stack, self.state, self.group, self.gate, self.gradient_dtype = stack, state, group, gate, gradient_dtype

    def accumulate(self, gradient: Tensor) -> None:
        """Covariances of this gradient `[(b,) m, n]`."""
        beta = self.group["betas"][1] if self.group["covariance_beta"] is None else self.group["covariance_beta"]
        if self.group["source"] == "second_order":
            decay = self.gate.decay(beta)
            for rotation in self.stack.rotations:
                add_gram(self.state[rotation.covariance], gradient if rotation.left else gradient.mT, decay, 1 - beta)

    def warming(self, gradient: Tensor) -> list[int]:
        """The matrices that have no basis yet and whose gradient is not zero."""
        cold = self.state[self.stack.cold]
        sizes = gradient.reshape(self.stack.part.shape).flatten(1).abs().amax(-1)[cold].tolist()
        return [index for index, size in zip(cold, sizes) if size > 0.0]

    def start(self, index: int, gradient: Tensor) -> None:
        """The first basis of one matrix.

        Raises:
            torch.linalg.LinAlgError: the decomposition failed; the matrix keeps the standard basis until its first refresh.
        """
        self.state[self.stack.cold].remove(index)
        tolerance = eigenbasis.cold_tolerance(self._relative_floor(), self.gradient_dtype)
        bases = eigenbasis.cold_start(self._one(gradient, index), *self.stack.sides, tolerance)
        bases = [basis for basis in bases if basis is not None]
        _check_finite(bases)
        for rotation, basis in zip(self.stack.rotations, bases):
            self._one(self.state[rotation.basis], index).copy_(basis)
        momentum = self._one(self.state[self.stack.momentum], index)
        second_moment = self._one(self.state[self.stack.second_moment], index)
        if second_moment.any():  # of Adam, that trained it before: its coordinates are taken to be uncorrelated
            left, right = (None if basis is None else self._one(basis, index) for basis in self.stack.bases(self.state))
            momentum.copy_(self._rotate(momentum.float(), left, right))
            squared = [None if basis is None else basis.square() for basis in (left, right)]
            second_moment.copy_(self._rotate(second_moment, *squared))

    def refresh(self, index: int) -> None:
        """A new basis for one matrix from its covariances or its momentum; the momentum is re-expressed, the second moment follows.

        Raises:
            torch.linalg.LinAlgError: a decomposition failed; nothing has changed.
        """
        stored = self._one(self.state[self.stack.momentum], index)
        second_moment = self._one(self.state[self.stack.second_moment], index)
        rotations = self.stack.rotations
        old = [self._one(self.state[rotation.basis], index).float() for rotation in rotations]
        momentum = self._rotate_back(stored.float(), *self._sides_of(old))
        fresh, orders = [], []
        for (side, left, _, covariance), basis in zip(rotations, old):
            if self.group["source"] == "second_order":
                whole = unpack(self._one(self.state[covariance], index), side)
                new, order = eigenbasis.power_step(whole, basis, self.group["covariance_damping"])
            else:
                new, order = eigenbasis.power_step_of_momentum(momentum, basis, left, self.group["covariance_damping"])
            fresh.append(self.gate.choose(new, basis))
            orders.append(self.gate.choose(order, torch.arange(side, device=order.device)))
        _check_finite(fresh)
        for rotation, basis, order in zip(rotations, fresh, orders):
            self._one(self.state[rotation.basis], index).copy_(basis)
            second_moment.copy_((eigenbasis.gather_rows if rotation.left else eigenbasis.gather_columns)(second_moment, order))
        # In the bases as they are stored, so that rounding them does not turn the momentum.
        bases = self._sides_of([self._one(self.state[rotation.basis], index).float() for rotation in rotations])
        stored.copy_(self.gate.choose(self._rotate(momentum, *bases).to(stored.dtype), stored))

    def direction(self, gradient: Tensor) -> tuple[Tensor, Tensor | None, float]:
        """The moments take in the gradient `[(b,) m, n]`.

        Returns:
            (X, V, step size): the weight changes by -step size * X V^T (V None: by -step size * X), X is the caller's.
        """
        state = self.state
        left, right = self._factors()
        gradient = self._rotate(gradient, left, right).float()
        stored = state[self.stack.momentum]
        momentum = stored.float()
        options = moments.Adam(self.group["betas"], self._eps(), float(self.group["lr"]), self._relative_floor(), state[STEP])
        x, step_size = moments.update(gradient, momentum, state[self.stack.second_moment], options, self.gate)
        if momentum is not stored:
            stored.copy_(momentum)
        if left is not None:
            x = _product(left, x).float()
        return x, right, step_size

    def predicted(self, updates: int) -> tuple[Tensor, Tensor | None, float]:
        """As `direction`, of what the momentum alone would do in the next updates together; changes nothing.

        With decayed momenta b1^s M, counts t + s and the second moment held, all their directions are one; the step size is the sum of

            lr b1^s sqrt(1 - b2^(t+s)) / (1 - b1^(t+s)),    s = 1..updates
        """
        state, (beta1, beta2) = self.state, self.group["betas"]
        denominator = moments.root(state[self.stack.second_moment], self._relative_floor())
        x = state[self.stack.momentum].float() / denominator.add_(self._eps())
        left, right = self._factors()
        if left is not None:
            x = _product(left, x).float()
        steps = ((ahead, state[STEP] + ahead) for ahead in range(1, updates + 1))
        return x, right, float(self.group["lr"]) * sum(beta1**s * math.sqrt(1 - beta2**step) / (1 - beta1**step) for s, step in steps)

    def _eps(self) -> float:
        return max(self.group["eps"] / self.state[SCALE], SMALLEST_EPS)

    def _relative_floor(self) -> float:
        if not self.stack.rotations:
            return 0.0
        if self.group["noise_floor"] is not None:
            return self.group["noise_floor"]
        return eigenbasis.default_noise_floor(self.gradient_dtype, STATE_DTYPES[self.group["product_dtype"]])

    def _factors(self) -> tuple[Tensor | None, Tensor | None]:
        """The bases in the precision of the products."""
        return self.stack.bases(self.state, STATE_DTYPES[self.group["product_dtype"]])

    def _sides_of(self, bases: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """Bases of the rotated sides as (left, right)."""
        given = iter(bases)
        return tuple(next(given) if on else None for on in self.stack.sides)

    def _one(self, tensor: Tensor, index: int) -> Tensor:
        """The view of one matrix of the stack."""
        return tensor if len(self.stack.shape) == 2 else tensor[index]

    @staticmethod
    def _rotate(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
        matrix = matrix if right is None else _product(matrix, right)
        return matrix if left is None else _product(left.mT, matrix)

    @staticmethod
    def _rotate_back(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
        matrix = matrix if right is None else _product(matrix, right.mT)
        return matrix if left is None else _product(left, matrix)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the lower of their precisions."""
    if a.dtype == b.dtype:
        return a @ b
    dtype = torch.bfloat16 if torch.bfloat16 in (a.dtype, b.dtype) else a.dtype
    return a.to(dtype) @ b.to(dtype)


def _check_finite(bases: list[Tensor]) -> None:
    # On an accelerator only gradients that are finite get this far, and nobody waits to look.
    if any(basis.device.type == "cpu" and not math.isfinite(basis.sum()) for basis in bases):
        raise torch.linalg.LinAlgError("the decomposition is not finite")
