"""The one-process simulation of an engine case, and the results that the real processes left."""

import copy

import torch
from models import BATCH, OPTIMIZERS, Block, blocks, microbatch

from ds_basisrot import BasisRotation, param_groups
from ds_basisrot.pipeline.simulator import PipelineSimulator

PARAMS, PIPELINE = "optimizer.params.", "pipeline."

TIED = "tied_modules.shared.up.weight"

# Keys of the pipeline block that the simulator takes by the same names.
SIMULATED = ("clip_scope", "lr_correction_updates", "delay_compensation", "weight_prediction")


def simulate(case):
    """(weights by name for each stage, losses) of a case as the simulator trains it.

    Options of the pipeline block are changes to the "config", or keys of the case itself. With "tied" the last layer is once more the
    first one, with `up.weight` tied and the rest its own; tied weights are not rotated.
    """
    stages, replicas, config = case["stages"], case.get("replicas", 1), case.get("config", {})
    tied, dtype = case.get("tied", False), torch.bfloat16 if config.get("bf16.enabled", False) else torch.float32
    layers = blocks(stages, case.get("dropout", 0.0))
    if tied:
        layers[-1] = Block(0)
    modules = [
        Stage({i: layers[i].to(dtype) for i in (2 * k, 2 * k + 1)}, shared=(0, 2 * stages - 1) if tied else ()) for k in range(stages)
    ]
    changes, pipeline = ({key.removeprefix(p): value for key, value in config.items() if key.startswith(p)} for p in (PARAMS, PIPELINE))
    accumulated = getattr(torch, {"fp32": "float32"}.get(config.get("data_types.grad_accum_dtype"), "bfloat16"))
    kind, optimizers = case.get("optimizer", "AdamW"), []
    for module in modules:
        unrotated = kind == "BasisRotation" and TIED in dict(module.named_parameters())
        own = {**changes, "rotate": {"exclude": [TIED]}} if unrotated else changes
        optimizers.append(MasterWeights(kind, module, own, accumulated) if dtype is torch.bfloat16 else make_optimizer(kind, module, own))
    scheduled = [getattr(o, "optimizer", o) for o in optimizers] if case.get("scheduler") else []
    simulator = PipelineSimulator(
        [OwnRandomNumbers(m, k, replicas, case.get("gas", 1)) for k, m in enumerate(modules)] if case.get("dropout") else modules,
        torch.nn.functional.mse_loss,
        optimizers,
        accumulation=case.get("gas", 1),
        weight_stashing=case.get("stashing", True),
        max_grad_norm=case.get("clip", 0.0),
        tied=[((0, TIED), (stages - 1, TIED))] if tied else (),
        lr_schedulers=[torch.optim.lr_scheduler.LambdaLR(o, warmup) for o in scheduled],
        **{key: value for key, value in {**pipeline, **case}.items() if key in SIMULATED},
    )
    losses = []
    for update in range(1, case.get("updates", 12) + 1):
        indices = range(simulator.trained, simulator.trained + simulator.accumulation)
        losses.append(simulator.train_batch([[microbatch(i, r, dtype) for i in indices] for r in range(replicas)]))
        if case.get("batch_size_after") and update == case["batch_size_after"][0]:
            simulator.set_accumulation(case["batch_size_after"][1] // (BATCH * replicas))
        if update == case.get("save_after"):
            simulator.cut()
    return [{name: p.detach().clone() for name, p in module.named_parameters()} for module in modules], losses


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

    def __init__(self, kind, part, changes, accumulated):
        self.part, self.masters, self.accumulated = part, copy.deepcopy(part).float(), accumulated
        self.optimizer = make_optimizer(kind, self.masters, changes)
        self.param_groups = self.optimizer.param_groups
        if kind == "BasisRotation":
            self.optimizer.gradient_dtype = torch.bfloat16
            self.share_refreshes, self.refresh_cost = self.optimizer.share_refreshes, self.optimizer.refresh_cost

    def take_gradients(self):
        for p, master in zip(self.part.parameters(), self.masters.parameters()):
            master.grad = p.grad.to(self.accumulated).float()
        return list(self.masters.parameters())

    def step(self):
        self.optimizer.step()
        for p, master in zip(self.part.parameters(), self.masters.parameters()):
            p.data.copy_(master.data)


class OwnRandomNumbers(torch.nn.Module):
    """A stage that draws random numbers as its processes do, each from a seed of its own."""

    def __init__(self, stage, index, replicas, accumulation):
        super().__init__()
        self.stage, self.calls, self.replicas, self.accumulation = stage, 0, replicas, accumulation
        self.states = [torch.Generator().manual_seed(100 + index * replicas + r).get_state() for r in range(replicas)]

    def forward(self, x):
        replica = self.calls // self.accumulation % self.replicas
        self.calls += 1
        with torch.random.fork_rng():
            torch.set_rng_state(self.states[replica])
            x = self.stage(x)
            self.states[replica] = torch.get_rng_state()
        return x


class Stage(torch.nn.Module):
    """The layers of a stage, named and ordered as in DeepSpeed's PipelineModule: the one that stages share comes first."""

    def __init__(self, layers, shared=()):
        super().__init__()
        self.order, self.tied_modules = tuple(layers.values()), torch.nn.ModuleDict()
        for index, layer in layers.items():
            if index in shared:
                self.tied_modules["shared"] = layer
            else:
                self.add_module(str(index), layer)

    def forward(self, x):
        for layer in self.order:
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
