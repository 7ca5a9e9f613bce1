"""Runs cases of a plain DeepSpeed engine under ZeRO on the processes it is started with; a script that imports nothing of ours.

    torchrun --nproc_per_node N zero_worker.py CASES.json OUT

A case is a dict with a name and changes to `DEFAULTS`. Each rank writes OUT/<name>/rank_<r>.pt: weights, losses and counters after
training, or the message of the error that a case with "refused" must end in. All cases share one process group. A case that does not end
within LIMIT_S ends the job, with the lines that its ranks wait in.
"""

import copy
import os
from contextlib import contextmanager, nullcontext

import deepspeed
import torch
import torch.distributed as dist
import worker
from deepspeed.moe.layer import MoE
from torch import nn
from transformer import BATCH, EXPERTS, Mixture, Transformer, tokens

LIMIT_S = 90

DEFAULTS = {
    "stage": 0, "precision": "fp32", "clip": 0.0, "gas": 1, "updates": 30, "zero": {}, "config": {}, "params": {}, "batch": BATCH,
    "zero_init": False, "groups": "one", "model": {}, "mixture": None, "scheduler": [], "optimizer": "BasisRotation",
    "unused_on": [], "unused_until": 10**9, "leave_out": [], "spoil": {}, "partial_steps": None,
    "save_after": None, "load": None, "tag": None, "load_universal": False, "refused": False, "initial_weights": None,
}  # fmt: skip


STEP_ONCE = ("no_sync", "coalesced")  # ways to accumulate gradients in which the script calls step() once an update


def ds_config(case):
    config = {
        "train_micro_batch_size_per_gpu": case["batch"] // dist.get_world_size(),
        "gradient_accumulation_steps": 1 if case["partial_steps"] in STEP_ONCE else case["gas"],
        "gradient_clipping": case["clip"],
        "optimizer": {
            "type": case["optimizer"],
            "params": {"lr": 1e-2, "weight_decay": 0.01, "refresh_period": 3, **case["params"]},
        },
        # ZeRO 3 would otherwise replace torch's linear map for good, by one that rounds differently in bfloat16
        "zero_optimization": {"stage": case["stage"], "memory_efficient_linear": False, **case["zero"]},
        "steps_per_print": 10**9,
    }
    if case["optimizer"] != "BasisRotation":
        config["optimizer"]["params"] = {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}
    if case["precision"] != "fp32":
        config[case["precision"]] = {"enabled": True}
    if case["mixture"] == "replaced":
        config["expert_parallel"] = {"enabled": True, "preset_model": "mixtral", "moe_layer_pattern": r"blocks\.1\.mixture"}
        config["expert_parallel"]["use_grouped_mm"] = False
    if case["scheduler"]:
        params = {"warmup_min_lr": [0.0] * len(case["scheduler"]), "warmup_max_lr": case["scheduler"], "warmup_num_steps": 8}
        params["warmup_type"] = "linear"
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    if case["load_universal"]:
        config["checkpoint"] = {"load_universal": True}
    for path, value in case["config"].items():
        *parents, key = path.split(".")
        config = copy.deepcopy(config)
        block = config
        for parent in parents:
            block = block.setdefault(parent, {})
        block[key] = value
    return config


def groups_of(model, kind):
    if kind == "one":
        return model.parameters()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "name": "matrices"}, {"params": vectors, "name": "vectors", "weight_decay": 0.0, "lr": 5e-3}]
    return groups + ([{"params": []}] if kind == "with an empty one" else [])


def moe(ep_size, width, inner):
    """DeepSpeed's MoE layer, with room for every token and without random numbers; on any number of ranks with the same experts."""
    expert = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
    layer = MoE(width, expert, num_experts=EXPERTS, ep_size=ep_size, k=1, capacity_factor=float(EXPERTS), use_rts=False)
    first = dist.get_rank() % ep_size * layer.num_local_experts
    for index, each in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
        with torch.random.fork_rng():
            torch.manual_seed(first + index)
            for p in each.parameters():
                nn.init.normal_(p, std=width**-0.5)
    return layer


MIXTURES = {
    None: None,
    "stacked": Mixture,
    "replaced": Mixture,
    "moe": lambda width, inner: moe(1, width, inner),
    "moe over 2 ranks": lambda width, inner: moe(2, width, inner),
}


def model_of(case):
    torch.manual_seed(0)
    return Transformer(**case["model"], mixture=MIXTURES[case["mixture"]])


def initialize(case):
    config = ds_config(case)
    if case["zero_init"]:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = model_of(case)
        start = model_of(case)  # what Init partitions is drawn with the ranks' own generators
        for p, its in zip(model.parameters(), start.parameters()):
            with deepspeed.zero.GatheredParameters(p, modifier_rank=0):
                if dist.get_rank() == 0:
                    p.data.copy_(its.data)
    else:
        model = model_of(case)
    if case["initial_weights"]:
        model.load_state_dict(torch.load(case["initial_weights"]))
    return deepspeed.initialize(model=model, model_parameters=groups_of(model, case["groups"]), config=config)[0]


def weights_of(engine):
    weights = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=engine.zero_optimization_stage() == 3):
            weights[name] = p.detach().float().clone()
    return weights


def train(engine, case, folder):
    losses = []
    for update in range(engine.global_steps, case["updates"]):
        if update not in case["leave_out"]:
            with engine.coalesce_grad_reduction() if case["partial_steps"] == "coalesced" else nullcontext():
                losses += [microstep(engine, case, update, index) for index in range(case["gas"])]
            if case["partial_steps"] in STEP_ONCE:
                engine.step()
        if update + 1 == case["save_after"]:
            engine.save_checkpoint(os.path.join(folder, "checkpoint"), tag=case["tag"])
    return losses


def microstep(engine, case, update, index):
    """Forward and backward of one microbatch, and the engine's step after it; returns the loss."""
    rank, last, way = dist.get_rank(), index + 1 == case["gas"], case["partial_steps"]
    x, y = (each.chunk(dist.get_world_size())[rank] for each in tokens(update * case["gas"] + index, case["batch"]))
    with engine.no_sync() if way == "no_sync" and not last else nullcontext():
        if way == "boundary":
            engine.set_gradient_accumulation_boundary(last)
        loss = engine(x, y, skip_extra=rank in case["unused_on"] and update < case["unused_until"])
        with spoiled(engine, case["spoil"].get(str(update))):
            engine.backward(loss)
    if way not in STEP_ONCE:
        engine.step()
    return loss.item()


@contextmanager
def spoiled(engine, spoil):
    """Put a value into one element of a parameter's gradient on rank 0, before gradients are reduced."""
    if spoil is None or dist.get_rank() > 0:
        yield
        return
    name, value = spoil

    def put(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    handle = engine.module.get_parameter(name).register_hook(put)
    yield
    handle.remove()


def run(case, out):
    case = {**DEFAULTS, **case}
    folder = os.path.join(out, case["name"])
    os.makedirs(folder, exist_ok=True)
    engine = initialize(case)
    if case["load"]:
        path, _ = engine.load_checkpoint(os.path.join(out, case["load"]), tag=case["tag"])
        assert path is not None
    before = weights_of(engine)
    losses = train(engine, case, folder)
    inner = engine.basic_optimizer
    result = {
        "losses": losses,
        "before": before,
        "weights": weights_of(engine),
        "wrapper": type(engine.optimizer).__name__,
        "optimizer": type(inner).__name__,
        "gradient_dtype": getattr(inner, "gradient_dtype", None),
        "global_steps": engine.global_steps,
        "skipped": getattr(inner, "skipped_updates", 0),
        "state_bytes": inner.state_bytes() if hasattr(inner, "state_bytes") else 0,
        "lrs": [group["lr"] for group in engine.optimizer.param_groups],
    }
    torch.save(result, os.path.join(folder, f"rank_{dist.get_rank()}.pt"))
    engine.destroy()


def main():
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # torch has it on every processor
    worker.main(run, LIMIT_S)


if __name__ == "__main__":
    main()
