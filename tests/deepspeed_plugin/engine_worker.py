"""Runs cases of the real engine on the processes it is started with; a plain DeepSpeed script that imports nothing of ours.

    torchrun --nproc_per_node N engine_worker.py CASES.json OUT

Every case is a dict (see `DEFAULTS`); each rank writes OUT/<name>/rank_<r>.pt with its weights, losses and counters.
"""

import json
import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from models import BATCH, OPTIMIZERS, blocks, stream

DEFAULTS = {
    "stages": None, "gas": 1, "optimizer": "AdamW", "updates": 12, "clip": 0.0, "stashing": True, "schedule": "async_1f1b",
    "eval_after": [], "save_after": None, "load": None, "scheduler": False, "dropout": 0.0, "checkpoint_activations": 0, "bf16": False,
}  # fmt: skip


def ds_config(case):
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case["gas"],
        "gradient_clipping": case["clip"],
        "optimizer": OPTIMIZERS[case["optimizer"]],
        "steps_per_print": 10**9,
        "pipeline": {"schedule": case["schedule"], "weight_stashing": case["stashing"]},
    }
    if case["scheduler"]:
        config["scheduler"] = {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 8, "warmup_type": "linear"},
        }
    if case["bf16"]:
        config["bf16"] = {"enabled": True}
    return config


def run(case, out):
    case = {**DEFAULTS, **case}
    torch.manual_seed(0)
    stages = case["stages"] or dist.get_world_size()
    module = PipelineModule(
        blocks(stages, case["dropout"]), num_stages=stages, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform",
        activation_checkpoint_interval=case["checkpoint_activations"],
    )  # fmt: skip
    engine, *_ = deepspeed.initialize(
        model=module, model_parameters=[p for p in module.parameters() if p.requires_grad], config=ds_config(case)
    )
    replica = engine.grid.get_data_parallel_id()
    folder = os.path.join(out, case["name"])
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(100 + dist.get_rank())
    if case["load"]:
        path, _ = engine.load_checkpoint(os.path.join(out, case["load"], "checkpoint"))
        assert path is not None
    dtype = torch.bfloat16 if case["bf16"] else torch.float32
    start = engine.global_steps
    data = ((x.to(dtype), y.to(dtype)) for x, y in stream(replica, start * case["gas"]))
    losses, lrs, evals = [], [], []
    for update in range(start + 1, case["updates"] + 1):
        losses.append(float(engine.train_batch(data)))
        lrs.append(engine.get_lr()[0])
        if update in case["eval_after"]:
            evals.append(float(engine.eval_batch(stream(replica, 10**6))))
        if update == case["save_after"]:
            engine.save_checkpoint(os.path.join(folder, "checkpoint"))
    result = {
        "weights": {name: p.detach().float().clone() for name, p in module.named_parameters()},
        "losses": losses, "lrs": lrs, "evals": evals, "global_steps": engine.global_steps, "global_samples": engine.global_samples,
        "stage": engine.stage_id, "replica": replica, "optimizer": type(engine.basic_optimizer).__name__,
        "asynchronous": hasattr(engine, "async_pipeline"),
    }  # fmt: skip
    if hasattr(engine, "async_pipeline"):
        engine.drain()
        result["stash_bytes"] = engine.async_pipeline.versions.stash_bytes
    torch.save(result, os.path.join(folder, f"rank_{dist.get_rank()}.pt"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no C++ build at start
    deepspeed.init_distributed("gloo")
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    for each in cases:
        run(each, sys.argv[2])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
