"""Who takes part in `ds-basisrot bench optimizer`: BasisRotation in its variants, and other optimizers where they are installed."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..optim.basis_rotation import BasisRotation
from ..optim.costs import matrix_cost
from ..optim.eigenbasis import rotated_sides

COMMON = {"lr": 1e-3, "weight_decay": 0.01}
BETAS = (0.9, 0.999)
MAX_DIM, AUTO_BUDGET = 8192, 4.0

# BasisRotation's options by the name of the variant; what is not named here is the default, and the period is that of the run.
VARIANTS: dict[str, dict[str, Any]] = {
    **{
        f"{source}-{geometry}": {"source": f"{source}_order", "geometry": geometry}
        for source in ("second", "first")
        for geometry in ("bilateral", "unilateral", "auto")
    },
    "second-bilateral-T1": {"source": "second_order", "geometry": "bilateral", "refresh_period": 1},
    "second-bilateral-bf16-states": {"source": "second_order", "geometry": "bilateral", "state_dtype": "bfloat16"},
    "second-bilateral-bf16-products": {"source": "second_order", "geometry": "bilateral", "product_dtype": "bfloat16"},
}

NAMES = (*VARIANTS, "AdamW", "SOAP", "Muon")

# A refresh of every matrix in every update is slow, and all updates are alike: a third of them measures as well.
T1_EVERY_ROUNDS = 3


@dataclass(frozen=True)
class Contestant:
    """An optimizer that takes part.

    Attributes:
        name: one of `NAMES`.
        build: makes the optimizer for weight matrices.
        options: what it was built with, as plain data.
        every_rounds: it takes part in every so many-th round of a period.
        update_madds: multiply-adds of an update on average over a period, by the formulas of `optim.costs`; None where there are none.
    """

    name: str
    build: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    every_rounds: int = 1
    update_madds: float | None = None


def contestants(names: Sequence[str], shapes: Sequence[tuple[int, int]], period: int) -> tuple[list[Contestant], dict[str, str]]:
    """Those of `names` that can take part, and for the others what to do.

    Args:
        names: some of `NAMES`.
        shapes: [m, n] of every weight matrix.
        period: updates between two bases of a matrix, for BasisRotation and SOAP.
    """
    present, missing = [], {}
    for name in names:
        if name in VARIANTS:
            present.append(_variant(name, shapes, period))
            continue
        try:
            present.append(_PEERS[name](period))
        except ImportError as error:
            missing[name] = f'install the extra "peers" (in the checkout: pip install ".[peers]"): {error}'
    return present, missing


def _variant(name: str, shapes: Sequence[tuple[int, int]], period: int) -> Contestant:
    own = {"refresh_period": period, "max_dim": MAX_DIM, "auto_budget": AUTO_BUDGET, **VARIANTS[name]}
    options = {**COMMON, "betas": list(BETAS), **own}
    costs = [
        matrix_cost(m, n, rotated_sides((m, n), own["geometry"], MAX_DIM, AUTO_BUDGET), own["source"] == "second_order") for m, n in shapes
    ]
    return Contestant(
        name=name,
        build=lambda weights: BasisRotation(weights, **options),
        options=options,
        every_rounds=T1_EVERY_ROUNDS if own["refresh_period"] < period else 1,
        update_madds=sum(cost.update_madds + cost.refresh_madds / own["refresh_period"] for cost in costs),
    )


def _adamw(period: int) -> Contestant:
    options = {**COMMON, "betas": BETAS, "fused": True}
    return Contestant("AdamW", lambda weights: torch.optim.AdamW(weights, **options), options)


def _soap(period: int) -> Contestant:
    soap = importlib.import_module("pytorch_optimizer").SOAP
    options = {**COMMON, "betas": BETAS, "precondition_frequency": period, "max_precondition_dim": MAX_DIM}
    return Contestant("SOAP", lambda weights: soap(weights, **options), options)


def _muon(period: int) -> Contestant:
    muon = importlib.import_module("pytorch_optimizer").Muon
    return Contestant("Muon", lambda weights: muon([{"params": weights, "use_muon": True, **COMMON}]), dict(COMMON))


_PEERS = {"AdamW": _adamw, "SOAP": _soap, "Muon": _muon}
