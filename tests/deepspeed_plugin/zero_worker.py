"""Runs cases of a plain DeepSpeed engine under ZeRO on the processes it is started with; a script that imports nothing of ours.

    torchrun --nproc_per_node N zero_worker.py CASES.json OUT

A case is a dict with a name and changes to `DEFAULTS`. Each rank writes OUT/<name>/rank_<r>.pt: weights, losses and counters after
training, or the message of the error that a case with "refused" must end in. All cases share one process group.
"""

import copy
import json
import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from transformer import BATCH, Transformer, tokens

DEFAULTS = {
    "stage": 0, "precision": "fp32", "clip": 0.0, "gas": 1, "updates": 30, "zero": {}, "config": {}, "params": {}, "batch": BATCH,
    "zero_init": False, "groups": "one", "model": {}, "scheduler": False, "unused_on": [], "spoil": {}, "optimizer": "BasisRotation",
    "save_after": None, "load": None, "tag": None, "load_universal": False, "refused": False, "initial_weights": None,
    "partial_steps": False,
}  # fmt: skip


def ds_config(case):
    config = {
        "train_micro_batch_size_per_gpu": case["batch"] // dist.get_world_size(),
        "gradient_accumulation_steps": case["gas"],
        "gradient_clipping": case["clip"],
        "optimizer": {
            "type": case["optimizer"],
            "params": {"lr": 1e-2, "weight_decay": 0.01, "refresh_period": 3, **case["params"]},
        },
        "zero_optimization": {"stage": case["stage"], **case["zero"]},
        "steps_per_print": 10**9,
    }
    if case["optimizer"] != "BasisRotation":
        config["optimizer"]["params"] = {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}
    if case["precision"] != "fp32":
        config[case["precision"]] = {"enabled": True}
    if case["scheduler"]:
        params = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 8, "warmup_type": "linear"}
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
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 5e-3}]
    return groups + ([{"params": []}] if kind == "with an empty one" else [])


def initialize(case):
    config = ds_config(case)
    torch.manual_seed(0)
    if case["zero_init"]:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Transformer(**case["model"])
        start = Transformer(**case["model"])  # what Init partitions is drawn with the ranks' own generators
        for p, its in zip(model.parameters(), start.parameters()):
            with deepspeed.zero.GatheredParameters(p, modifier_rank=0):
                if dist.get_rank() == 0:
                    p.data.copy_(its.data)
    else:
        model = Transformer(**case["model"])
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
    rank, world, losses = dist.get_rank(), dist.get_world_size(), []
    for update in range(engine.global_steps, case["updates"]):
        for index in range(case["gas"]):
            x, y = (each.chunk(world)[rank] for each in tokens(update * case["gas"] + index, case["batch"]))
            loss = engine(x, y, skip_extra=rank in case["unused_on"])
            engine.backward(loss)
            if str(update) in case["spoil"]:
                spoil(engine, case["spoil"][str(update)])
            engine.step()
            losses.append(loss.item())
        if update + 1 == case["save_after"]:
            engine.save_checkpoint(os.path.join(folder, "checkpoint"), tag=case["tag"])
    return losses


def spoil(engine, value):
    """Put a value into a gradient on rank 0, where the wrapper keeps it."""
    if dist.get_rank() == 0:
        optimizer = engine.optimizer
        if hasattr(optimizer, "averaged_gradients"):
            optimizer.averaged_gradients[0][0].view(-1)[0] = value
        else:
            next(engine.module.parameters()).grad.view(-1)[0] = value


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
        "global_steps": engine.global_steps,
        "skipped": getattr(inner, "skipped_updates", 0),
        "state_bytes": inner.state_bytes() if hasattr(inner, "state_bytes") else 0,
        "lrs": [group["lr"] for group in engine.optimizer.param_groups],
    }
    torch.save(result, os.path.join(folder, f"rank_{dist.get_rank()}.pt"))
    engine.destroy()


def run_refused(case, out):
    os.makedirs(os.path.join(out, case["name"]), exist_ok=True)
    try:
        run(case, out)
        message = None
    except (ValueError, RuntimeError) as error:
        message = str(error)
    torch.save({"message": message}, os.path.join(out, case["name"], f"rank_{dist.get_rank()}.pt"))
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no C++ build at start
    deepspeed.init_distributed("gloo")
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    for each in cases:
        (run_refused if each.get("refused") else run)(each, sys.argv[2])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
