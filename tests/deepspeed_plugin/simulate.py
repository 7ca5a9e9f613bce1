"""The one-process simulation of an engine case, and the results that the real processes left."""

import copy

import torch
from models import OPTIMIZERS, blocks, microbatch

from ds_basisrot import BasisRotation, param_groups
from ds_basisrot.pipeline.simulator import PipelineSimulator

PARAMS = "optimizer.params."


def simulate(case):
    """(weights by name for each stage, losses) of a case as the simulator trains it."""
    stages, gas = case["stages"], case.get("gas", 1)
    bf16 = case.get("config", {}).get("bf16.enabled", False)
    layers = [layer.to(torch.bfloat16 if bf16 else torch.float32) for layer in blocks(stages)]
    parts = [torch.nn.ModuleDict({str(i): layers[i] for i in (2 * k, 2 * k + 1)}) for k in range(stages)]
    changes = {key.removeprefix(PARAMS): value for key, value in case.get("config", {}).items() if key.startswith(PARAMS)}
    accumulated = getattr(torch, {"fp32": "float32"}.get(case.get("config", {}).get("data_types.grad_accum_dtype"), "bfloat16"))
    kind, clip = case.get("optimizer", "AdamW"), case.get("clip", 0.0)
    optimizers = [MasterWeights(kind, p, changes, accumulated, clip) if bf16 else make_optimizer(kind, p, changes) for p in parts]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, warmup) for o in optimizers] if case.get("scheduler") else []
    simulator = PipelineSimulator(
        [Stage(part) for part in parts],
        torch.nn.functional.mse_loss,
        optimizers,
        accumulation=gas,
        weight_stashing=case.get("stashing", True),
        max_grad_norm=0.0 if bf16 else clip,
        lr_schedulers=schedulers,
    )
    losses = []
    for update in range(case.get("updates", 12)):
        indices = range(update * gas, (update + 1) * gas)
        losses.append(
            simulator.train_batch(
                [[microbatch(i, r, torch.bfloat16 if bf16 else torch.float32) for i in indices] for r in range(case.get("replicas", 1))]
            )
        )
        if update + 1 == case.get("save_after"):
            simulator.cut()
    return [{name: p.detach().clone() for name, p in part.named_parameters()} for part in parts], losses


def warmup(updates):
    """DeepSpeed's linear WarmupLR over 8 updates: its first two updates have the learning rate 0."""
    return min(1.0, max(0, updates - 1) / 8)


def make_optimizer(kind, part, changes):
    params = {k: v for k, v in {**OPTIMIZERS[kind]["params"], **changes}.items() if k != "torch_adam"}
    if kind == "BasisRotation":
        optimizer = BasisRotation(param_groups(part, holds_output=False), **params)
        optimizer.layout_independent = True
        return optimizer
    return getattr(torch.optim, kind)(part.parameters(), **params)


class MasterWeights:
    """An optimizer of float32 copies of a part's bfloat16 parameters, whose gradients add up in some precision over microbatches."""

    def __init__(self, kind, part, changes, accumulated, clip):
        self.part, self.masters, self.accumulated, self.clip = part, copy.deepcopy(part).float(), accumulated, clip
        self.optimizer = make_optimizer(kind, self.masters, changes)
        if kind == "BasisRotation":
            self.optimizer.gradient_dtype = torch.bfloat16
            self.share_refreshes, self.refresh_cost = self.optimizer.share_refreshes, self.optimizer.refresh_cost

    def step(self):
        for p, master in zip(self.part.parameters(), self.masters.parameters()):
            master.grad = p.grad.to(self.accumulated).float()
        if self.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.masters.parameters(), self.clip)
        self.optimizer.step()
        for p, master in zip(self.part.parameters(), self.masters.parameters()):
            p.data.copy_(master.data)


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
    """The results of a case, one for each rank."""
    return [torch.load(path) for path in sorted((out / name).glob("rank_*.pt"))]


def largest_difference(results, weights):
    """Largest |dw| between the ranks' weights and the simulated ones."""
    return max(
        (r["weights"][n if n in r["weights"] else n.replace(".", ".layer.", 1)] - w).abs().max().item()
        for r in results
        for n, w in weights[r["stage"]].items()
    )
