"""Runs cases of the real engine on the processes it is started with; a plain DeepSpeed script that imports nothing of ours.

    torchrun --nproc_per_node N engine_worker.py CASES.json OUT

A case is a dict with a name and changes to `DEFAULTS`. Each rank writes OUT/<name>/rank_<r>.pt: weights, losses and counters after
training, or the message of the error that a case with "refused" must end in. All cases share one process group.
"""

import copy
import os
import shutil
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import worker
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from models import BATCH, OPTIMIZERS, WIDTH, Block, TakesTuple, blocks, microbatch, stream

DEFAULTS = {
    "pipeline": True, "stages": None, "schedule": "async_1f1b", "stashing": True, "gas": 1, "optimizer": "AdamW", "clip": 0.0,
    "scheduler": False, "autocast": False, "outer_autocast": False, "config": {}, "config_of_rank_1": {},
    "layers": None, "head": False, "linears": 0, "seed_layers": False,
    "tied": False, "tied_everywhere": False, "tuples": False, "dropout": 0.0, "frozen": [], "checkpoint_activations": 0,
    "updates": 12, "eval_after": [], "save_after": None, "load": None, "reload_after": None, "user_changes": False, "refused": False,
    "frozen_after": None, "monitored": False, "batch_size_after": None, "damage": None,
}  # fmt: skip


def ds_config(case):
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": case["gas"],
        "gradient_clipping": case["clip"],
        "optimizer": OPTIMIZERS[case["optimizer"]],
        "steps_per_print": 10**9,
    }
    if case["pipeline"]:
        config["pipeline"] = {"schedule": case["schedule"], "weight_stashing": case["stashing"]}
    if case["scheduler"]:
        params = {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 8, "warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    if case["autocast"]:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    for changes in (case["config"], case["config_of_rank_1"] if dist.get_rank() == 1 else {}):
        for path, value in changes.items():  # "optimizer.params.lr": ...
            *parents, key = path.split(".")
            config = copy.deepcopy(config)
            block = config
            for parent in parents:
                block = block.setdefault(parent, {})
            block[key] = value
    return config


def initialize(case):
    if not case["pipeline"]:
        module = torch.nn.Sequential(*blocks(2), torch.nn.Linear(WIDTH, WIDTH))
        return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=ds_config(case))[0]
    stages = case["stages"] or dist.get_world_size()
    layers = blocks(stages, case["dropout"])[: case["layers"]]
    if case["tied"]:
        shared = [TiedLayerSpec("shared", Block, 0, tied_weight_attr="up.weight") for _ in range(2)]
        layers = [shared[0], *(LayerSpec(Block, i) for i in range(1, 2 * stages - 1)), shared[1]]
    if case["tied_everywhere"]:
        layers = [TiedLayerSpec("shared", Block, 0, tied_weight_attr="up.weight") for _ in range(stages)]
    if case["head"]:
        layers = [LayerSpec(Block, i) for i in range(2 * stages)] + [
            LayerSpec(torch.nn.LayerNorm, WIDTH),
            LayerSpec(torch.nn.Linear, WIDTH, WIDTH),
        ]
    if case["linears"]:
        layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(case["linears"])] + layers[case["linears"] :]
    if case["tuples"]:
        layers = [TakesTuple(layer, first=i == 0, last=i == 2 * stages - 1) for i, layer in enumerate(layers)]
    for index in case["frozen"]:
        layers[index].requires_grad_(False)
    module = PipelineModule(
        layers,
        num_stages=stages,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
        seed_layers=case["seed_layers"],
        activation_checkpoint_interval=case["checkpoint_activations"],
    )
    return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=ds_config(case))[0]


def train_pipeline(engine, case, folder):
    replica, start = engine.grid.get_data_parallel_id(), engine.global_steps
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    data = stream(replica, start * case["gas"], dtype)
    losses, lrs, evals = [], [], []
    for update in range(start + 1, case["updates"] + 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=case["outer_autocast"]):
            losses.append(float(engine.train_batch(data)))
        lrs.append(engine.get_lr()[0])
        dist.barrier()  # as a user's own collective between calls: it must not wait for a later call
        if update in case["eval_after"]:
            evals.append(float(engine.eval_batch(stream(replica, 10**6, dtype))))
        if case["user_changes"]:  # as when averaged weights are swapped in for an evaluation and out again
            with torch.no_grad():
                for p in engine.module.parameters():
                    p.mul_(2).mul_(0.5)
        if update == case["reload_after"]:
            engine.load_checkpoint(os.path.join(folder, "checkpoint"), load_optimizer_states=False)
        if case["batch_size_after"] and update == case["batch_size_after"][0]:
            engine.set_train_batch_size(case["batch_size_after"][1])
        if case["frozen_after"] and update == case["frozen_after"][0]:
            engine.drain()
            for name, p in engine.module.named_parameters():
                if case["frozen_after"][1] in name:
                    p.requires_grad_(not p.requires_grad)
        if update == case["save_after"]:
            engine.save_checkpoint(os.path.join(folder, "checkpoint"))
    return {"losses": losses, "lrs": lrs, "evals": evals, "stage": engine.stage_id, "replica": replica}


def train_plain(engine, case, folder):
    losses = []
    for index in range(case["updates"] * case["gas"]):
        x, y = microbatch(index, dist.get_rank())
        loss = torch.nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return {"losses": losses, "replica": dist.get_rank()}


def damage(source, target, how, name):
    """A copy of a run's latest checkpoint in which something has happened to one of the files."""
    if dist.get_rank() == 0:
        shutil.copytree(os.path.join(source, "checkpoint"), os.path.join(target, "checkpoint"))
        (path,) = Path(target, "checkpoint").glob(f"*/{name}")
        content = path.read_bytes()
        if how == "remove":
            path.unlink()
        elif how == "truncate":
            path.write_bytes(content[:-7])
        elif how == "flip":
            path.write_bytes(content[:-20] + bytes([content[-20] ^ 1]) + content[-19:])
        else:  # the file of another run
            (other,) = Path(os.path.dirname(source), how, "checkpoint").glob(f"*/{name}")
            path.write_bytes(other.read_bytes())
    dist.barrier()


def run(case, out):
    case = {**DEFAULTS, **case}
    folder = os.path.join(out, case["name"])
    os.makedirs(folder, exist_ok=True)
    if case["monitored"]:
        case["config"] = {**case["config"], "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "events"}}
    torch.manual_seed(0)
    engine = initialize(case)
    if case["damage"]:
        damage(os.path.join(out, case["load"]), folder, *case["damage"])
        engine.load_checkpoint(os.path.join(folder, "checkpoint"))
    elif case["load"]:
        path, _ = engine.load_checkpoint(os.path.join(out, case["load"], "checkpoint"))
        assert path is not None
    else:
        torch.manual_seed(100 + dist.get_rank())
    result = (train_pipeline if case["pipeline"] else train_plain)(engine, case, folder)
    pipeline = getattr(engine, "async_pipeline", None)
    result |= {
        "weights": {name: p.detach().float().clone() for name, p in engine.module.named_parameters()},
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "optimizer": type(engine.basic_optimizer).__name__,
        "wrapper": type(engine.optimizer).__name__,
        "rotated": [
            name for g in engine.optimizer.param_groups for name, flag in zip(g.get("param_names", ()), g.get("rotate", ())) if flag
        ],
        "asynchronous": pipeline is not None,
        "stash_bytes": pipeline.versions.stash_bytes if pipeline else 0,
        "trained": pipeline.trained if pipeline else 0,
    }
    torch.save(result, os.path.join(folder, f"rank_{dist.get_rank()}.pt"))
    if pipeline:
        engine.drain()  # nothing may be in flight in groups that end
    # Hooks on parameters and on the last loss would keep the engine, its groups and their threads for ever.
    engine.destroy()
    engine.loss = engine.outputs = None


if __name__ == "__main__":
    worker.main(run)
