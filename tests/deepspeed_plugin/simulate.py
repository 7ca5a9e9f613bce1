"""The one-process simulation of an engine case, and the comparison of both."""

import glob
import os

import torch
from models import OPTIMIZERS, blocks, microbatch

from ds_basisrot import BasisRotation, param_groups
from ds_basisrot.pipeline.simulator import PipelineSimulator


def make_optimizer(kind, stage, holds_output):
    params = {k: v for k, v in OPTIMIZERS[kind]["params"].items() if k != "torch_adam"}
    if kind == "BasisRotation":
        return BasisRotation(param_groups(stage, holds_output=holds_output), **params)
    return getattr(torch.optim, kind)(stage.parameters(), **params)


def simulate(case):
    """(weights of each stage by name, losses) of a case as the simulator trains it."""
    stages, gas, replicas = case["stages"], case.get("gas", 1), case.get("replicas", 1)
    layers = blocks(stages)
    parts = [torch.nn.ModuleDict({str(i): layers[i] for i in (2 * k, 2 * k + 1)}) for k in range(stages)]
    modules = [Stage(part) for part in parts]
    optimizers = [make_optimizer(case.get("optimizer", "AdamW"), part, holds_output=False) for part in parts]
    simulator = PipelineSimulator(
        modules, torch.nn.functional.mse_loss, optimizers, accumulation=gas, weight_stashing=case.get("stashing", True),
        max_grad_norm=case.get("clip", 0.0),
    )  # fmt: skip
    losses = []
    for update in range(case.get("updates", 12)):
        indices = range(update * gas, (update + 1) * gas)
        losses.append(simulator.train_batch([[microbatch(i, r) for i in indices] for r in range(replicas)]))
        if update + 1 in case.get("cut_after", ()):
            simulator.cut()
    return [{name: p.detach().clone() for name, p in part.named_parameters()} for part in parts], losses


class Stage(torch.nn.Module):
    """The layers of a stage in their order."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def load(out, name):
    """The results that all ranks of a case left."""
    return [torch.load(path) for path in sorted(glob.glob(os.path.join(out, name, "rank_*.pt")))]


def largest_difference(results, weights):
    """Largest |dw| between the ranks' weights and the simulated ones."""
    return max((r["weights"][n] - w).abs().max().item() for r in results for n, w in weights[r["stage"]].items())
