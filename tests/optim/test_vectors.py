"""Increments of the authors' released optimizer (float32, CPU) on fixed gradient sequences, for five variants."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import ReferenceMatrix

from ds_basisrot import BasisRotation

VECTORS = sorted((Path(__file__).parent / "vectors").glob("*.npz"))


class Ours:
    def __init__(self, weight, **config):
        self.parameter = torch.nn.Parameter(weight.clone())
        self.optimizer = BasisRotation([self.parameter], stagger=False, noise_floor=0.0, covariance_damping=0.0, **config)

    def step(self, gradient):
        self.parameter.grad = gradient.clone()
        self.optimizer.step()
        return self.parameter.detach().double()


@pytest.mark.parametrize("implementation", [Ours, ReferenceMatrix])
@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_increments_from_the_second_update_on(path, implementation):
    data = np.load(path)
    config = json.loads(str(data["config"]))
    decay = 1 - config["lr"] * config["weight_decay"]
    expected = torch.from_numpy(np.concatenate([data["w0"][None], data["weights"]])).double()
    ours = implementation(torch.from_numpy(data["w0"]), **config)
    weight = torch.from_numpy(data["w0"]).double()
    for t, gradient in enumerate(torch.from_numpy(data["grads"]), start=1):
        previous, weight = weight, ours.step(gradient).clone()
        increment, reference = weight - decay * previous, expected[t] - decay * expected[t - 1]
        if t > 1:  # the released optimizer's first update is rounding noise
            assert (increment - reference).norm() <= 1e-2 * reference.norm(), f"update {t}"


def test_all_vectors_are_there():
    assert len(VECTORS) == 5
