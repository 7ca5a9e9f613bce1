"""The diagnostics of a BasisRotation in the middle of a run, from what it keeps anyway: for monitors and plain training loops."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import diagnostics, eigenbasis
from .basis_rotation import BasisRotation
from .state import COLD, LEFT_BASIS, LEFT_COVARIANCE, RIGHT_BASIS, RIGHT_COVARIANCE, ROTATED_MOMENTUM, ROTATED_SECOND_MOMENT, STEP
from .symmetric import unpack


@torch.no_grad()
def measure(optimizer: BasisRotation, limit: int | None = None, turn: int = 0) -> dict[str, float]:
    """Mean and largest value, over the rotated matrices that have a basis, of these metrics, named `<metric>_mean` and `<metric>_max`:

        misalignment_standard   off-diagonal share of the gradients' covariance C in the standard basis (`diagnostics.misalignment`)
        misalignment_rotated    the same in the matrix's basis; rotation does its work as far as this is smaller
        refresh_angle_degrees   how far a refresh made now would turn the basis: the angle between each column and its image under one
                                power step on C, mean over the columns weighted by their Rayleigh quotients. Not how far the last refresh
                                did turn it, which would need the basis from before.
        persistence             how much of the gradients' size survives averaging (`diagnostics.persistence`); small when updates oscillate

    and `skipped_updates`, counted since the optimizer was made. C is the optimizer's own moving average of G G^T (left) and G^T G (right)
    with the second order, M M^T and M^T M of the momentum with the first; the first three metrics have a value for each rotated side.
    Without a matrix to measure, `skipped_updates` is all there is.

    Nothing is changed, and no other rank is involved. The cost of a matrix is about that of refreshing it twice; memory is a few tensors of
    its covariance's size at a time. On an accelerator it waits for the device.

    Raises:
        ValueError: a limit below 1.

    Args:
        optimizer: as it is between two updates; of a sharded one, what this rank owns is measured.
        limit: measure at most so many matrices; None: all.
        turn: with a limit, which of them: successive turns 0, 1, 2, ... go round all matrices.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit: must be at least 1, or None for all matrices, got {limit}")
    skipped = optimizer.skipped_updates
    matrices = list(_matrices(optimizer))
    if limit is not None and limit < len(matrices):
        matrices = [matrices[(turn * limit + i) % len(matrices)] for i in range(limit)]
    values: dict[str, dict[str, float]] = {}
    for index, matrix in enumerate(matrices):
        with torch.autocast(matrix.momentum.device.type, enabled=False):
            for metric, value in _metrics(matrix):
                of_metric = values.setdefault(metric, {})
                of_metric[f"{index}, {len(of_metric)}"] = float(value)
    summaries = {f"{metric}_{what}": number for metric, each in values.items() for what, number in diagnostics.summary(each).items()}
    return summaries | {"skipped_updates": float(skipped)}


@dataclass
class _Matrix:
    """One rotated matrix: its momentum and second moment `[m, n]` in the basis, and for each rotated side basis and covariance."""

    group: dict[str, Any]
    step: int
    momentum: Tensor
    second_moment: Tensor
    bases: dict[str, Tensor]
    covariances: dict[str, Tensor]  # packed; none with the first order


def _matrices(optimizer: BasisRotation) -> Iterator[_Matrix]:
    for group, state in optimizer.states_of_groups():
        for prefix in [key.removesuffix(ROTATED_MOMENTUM) for key in state if key.rpartition(".")[2] == ROTATED_MOMENTUM]:
            yield from _stack(group, state, prefix)


def _stack(group: dict[str, Any], state: dict[str, Any], prefix: str) -> Iterator[_Matrix]:
    """The matrices whose state has keys that begin with `prefix`, those with a basis."""
    bases = {key: state[prefix + key] for key in (LEFT_BASIS, RIGHT_BASIS) if prefix + key in state}
    covariances = {key: state[prefix + key] for key in (LEFT_COVARIANCE, RIGHT_COVARIANCE) if prefix + key in state}
    moments = [state[prefix + key] for key in (ROTATED_MOMENTUM, ROTATED_SECOND_MOMENT)]
    single, cold = moments[0].ndim == 2, state[prefix + COLD]
    for index in range(1 if single else len(moments[0])) if bases else ():
        if index not in cold:
            momentum, second_moment = moments if single else (tensor[index] for tensor in moments)
            of_one = [{key: tensor if single else tensor[index] for key, tensor in each.items()} for each in (bases, covariances)]
            yield _Matrix(group, state[STEP], momentum, second_moment, *of_one)


def _metrics(matrix: _Matrix) -> Iterator[tuple[str, Tensor]]:
    yield "persistence", diagnostics.persistence(matrix.momentum, matrix.second_moment, max(1, matrix.step), matrix.group["betas"])
    for basis, covariance in _sides(matrix):
        yield "misalignment_standard", diagnostics.misalignment(covariance)
        yield "misalignment_rotated", diagnostics.misalignment(covariance, basis)
        image, order = eigenbasis.power_step(covariance, basis, matrix.group["covariance_damping"])
        weights = (image * (covariance @ image)).sum(-2)
        yield "refresh_angle_degrees", diagnostics.rotation_angle(basis, image, order, weights)


def _sides(matrix: _Matrix) -> Iterator[tuple[Tensor, Tensor]]:
    """(basis, covariance) `[k, k]` of each rotated side."""
    bases = {key: basis.float() for key, basis in matrix.bases.items()}
    momentum = matrix.momentum.float()
    for key, covariance, factor in ((LEFT_BASIS, LEFT_COVARIANCE, momentum), (RIGHT_BASIS, RIGHT_COVARIANCE, momentum.mT)):
        if key in bases:
            basis = bases[key]
            if covariance in matrix.covariances:
                yield basis, unpack(matrix.covariances[covariance], len(basis))
            else:  # U (M' M'^T) U^T is M M^T: an orthonormal basis of the other side cancels
                half = basis @ factor
                yield basis, half @ half.mT
