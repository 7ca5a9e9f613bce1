"""Trains a job as delayed-gradient training in one process: what the asynchronous schedule must equal. Import cpu_cuda_shim first.

`megatron_simulation.py jobs.json OUT` simulates jobs whose real ranks left their results in OUT, and leaves OUT/<name>/simulated.pt. Run as
several ranks, each of them simulates one tensor-parallel rank of all stages, and leaves OUT/<name>/simulated_<rank>.pt.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cpu_cuda_shim  # noqa: F401  before Megatron
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron_job import EVALUATED, Job, microbatch
from megatron_model import arguments, global_name, part_of_model, scheduler
from megatron_shards import Results, load, whole_weights
from torch import Tensor, nn

from ds_basisrot import BasisRotation, param_groups
from ds_basisrot.pipeline.simulator import PipelineSimulator

# Keys of the pipeline block that the simulator takes by the same names.
SIMULATED = ("clip_scope", "lr_correction_updates", "delay_compensation", "weight_prediction", "weight_stashing")

WORD_EMBEDDINGS, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

Batch = tuple[Tensor, Tensor, Tensor | None]  # tokens, labels, what the last stage sent


class Stage(nn.Module):
    """A stage whose parameters are the float32 copies that an optimizer updates; it computes with them in the job's precision.

    Gradients of a bfloat16 job therefore add up over microbatches in float32, as in Megatron's gradient buffers.
    """

    def __init__(self, job: Job, model: nn.Module):
        super().__init__()
        self.job, self.model = job, model.float()
        self.held = [(module, name, p) for module in model.modules() for name, p in module.named_parameters(recurse=False)]

    def forward(self, batch: Batch) -> Batch | Tensor:
        tokens, labels, received = batch
        used = [p.to(self.job.dtype) for _, _, p in self.held]
        for (module, name, _), weight in zip(self.held, used):
            vars(module)[name] = weight  # hides the parameter, also from a forward that the backward pass repeats
        self.model.set_input_tensor(received)
        output = self.model(*arguments(self.job, tokens), labels=labels if self.model.post_process else None)
        output = WeightsOfTheDay.apply(output, lambda: [w.data.copy_(p.data) for w, (_, _, p) in zip(used, self.held)])
        return output if self.model.post_process else (tokens, labels, output)


class WeightsOfTheDay(torch.autograd.Function):
    """Before a stage's backward pass, what it computed with becomes a copy of its weights as they are then."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, renew: Callable[[], Any]) -> Tensor:
        ctx.renew = renew
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.renew()
        return gradient, None


class Rates:
    """Megatron's scheduler of one stage, stepped without arguments."""

    def __init__(self, job: Job, optimizer: torch.optim.Optimizer):
        self.job, self.scheduler = job, scheduler(job, optimizer)

    def step(self) -> None:
        self.scheduler.step(increment=self.job.batch)


def adam(job: Job, stage: nn.Module) -> torch.optim.Optimizer:
    """What get_megatron_optimizer makes where it has neither apex nor Transformer Engine, with its parameter groups."""
    decayed: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in stage.parameters():
        decayed[p.dim() > 1].append(p)
    groups = [
        {"params": parameters, "wd_mult": float(matrices), "lr_mult": 1.0, "max_lr": job.lr, "min_lr": 0.0}
        for matrices, parameters in decayed.items()
        if parameters
    ]
    return torch.optim.AdamW(groups, lr=job.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=job.weight_decay)


def basis_rotation(job: Job, stage: nn.Module) -> torch.optim.Optimizer:
    """BasisRotation over the same matrices, with the parameter groups of Megatron's decay."""
    outside = {"exclude": ["*word_embeddings*", "*output_layer*"]}
    groups = []
    for group in param_groups(stage.model, rotate=outside, holds_output=False):
        for matrices in (True, False):
            kept = [i for i, (_, p) in enumerate(group["params"]) if (p.dim() > 1) is matrices]
            rotate = [group["rotate"][i] for i in kept] if group["rotate"] else False
            group_of = {"params": [group["params"][i] for i in kept], "rotate": rotate}
            if kept:
                groups.append({**group_of, "wd_mult": float(matrices), "lr_mult": 1.0, "max_lr": job.lr, "min_lr": 0.0})
    options = job.basisrot["optimizer"]["params"]
    optimizer = BasisRotation(groups, lr=job.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=job.weight_decay, **options)
    optimizer.layout_independent = True  # the operations of the sharded one
    if job.bf16:
        optimizer.gradient_dtype = torch.bfloat16  # what gradients were computed in, though they are added up in float32
    return optimizer


def optimizer_of(job: Job, stage: nn.Module) -> torch.optim.Optimizer:
    """What the job's configuration chooses."""
    return (basis_rotation if "optimizer" in (job.basisrot or {}) else adam)(job, stage)


def simulate(
    job: Job,
    results: Results,
    *,
    delayed: bool = True,
    make_optimizer: Callable[[Job, nn.Module], torch.optim.Optimizer] = optimizer_of,
    cut_after: Sequence[int] = (),
) -> dict[str, Any]:
    """The job in this process, from the initial weights of its ranks and without tensor parallelism, or as one rank of it.

    Args:
        job: what to train.
        results: of all its ranks; only their initial weights are used.
        delayed: False trains without a pipeline, as a schedule with flushes does.
        make_optimizer: (job, stage) -> the optimizer of the stage's parameters, in float32.
        cut_after: steps after which forwards in flight are dropped.

    Returns:
        weights: by name in the whole model, float32, those that the optimizer updates; losses, evaluations: of each step or evaluation.
    """
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        results = [r for r in results if r["tp_rank"] == parallel_state.get_tensor_model_parallel_rank()]
    parts, given = (job.pp, whole_weights(results)) if delayed else (1, [{}])
    if not delayed:
        for weights in reversed(whole_weights(results)):  # of tied weights, the first stage's
            given[0].update(weights)
    stages = [Stage(job, part_of_model(job, k, parts)) for k in range(parts)]
    names = [[global_name(name, k * job.layers // parts) for name, _ in stage.model.named_parameters()] for k, stage in enumerate(stages)]
    for stage, own, weights in zip(stages, names, given):
        for name, p in zip(own, stage.parameters()):
            p.data.copy_(weights[name])
    optimizers = [make_optimizer(job, stage) for stage in stages]
    pipeline = (job.basisrot or {}).get("pipeline", {})
    simulator = PipelineSimulator(
        stages,
        _loss,
        optimizers,
        accumulation=job.microbatches,
        max_grad_norm=job.clip,
        tied=[((0, f"model.{WORD_EMBEDDINGS}"), (parts - 1, f"model.{OUTPUT}"))] if job.tied and parts > 1 else (),
        lr_schedulers=[Rates(job, optimizer) for optimizer in optimizers],
        **{key: value for key, value in pipeline.items() if key in SIMULATED},
    )
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor([1.0 / job.microbatches]))
    losses, evaluations = [], []
    for step in range(1, job.steps + 1):
        indices = range(simulator.trained, simulator.trained + job.microbatches)
        losses.append(simulator.train_batch([_microbatches(job, replica, indices) for replica in range(job.dp)]))
        if step == job.evaluate_after:
            evaluations.append(_evaluate(job, stages))
        if step in cut_after:
            simulator.cut()
    weights = {name: p.detach().clone() for own, stage in zip(names, stages) for name, p in zip(own, stage.parameters())}
    return {"weights": weights, "losses": losses, "evaluations": evaluations}


def _microbatches(job: Job, replica: int, indices: Sequence[int]) -> list[tuple[Batch, None]]:
    return [((*microbatch(job, index, replica), None), None) for index in indices]


def _loss(losses: Tensor, labels: None) -> Tensor:
    return losses.float().sum() / losses.numel()


@torch.no_grad()
def _evaluate(job: Job, stages: Sequence[nn.Module]) -> float:
    """The mean loss of all replicas' evaluations, on the newest weights."""
    losses = []
    for replica in range(job.dp):
        for batch, labels in _microbatches(job, replica, range(EVALUATED, EVALUATED + job.microbatches)):
            for stage in stages:
                batch = stage(batch)
            losses.append(_loss(batch, labels).item())
    return sum(losses) / len(losses)


def main(path: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(ranks)
    model_parallel_cuda_manual_seed(1)
    name = "simulated.pt" if ranks == 1 else f"simulated_{dist.get_rank()}.pt"
    for case in json.loads(Path(path).read_text()):
        options = case.pop("simulation", {})
        job = Job(**case)
        torch.save(simulate(job, load(Path(out), job.name), **options), Path(out) / job.name / name)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


if __name__ == "__main__":
    main(*sys.argv[1:])
