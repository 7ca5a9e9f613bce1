"""Runs scripts of train_batch() calls with all kinds of iterators; a plain DeepSpeed script that imports nothing of ours.

    torchrun --nproc_per_node N data_worker.py CASES.json OUT

A case has a "script" of steps, see `data_scripts`. Each rank writes OUT/<name>/rank_<r>.pt: what each call gave (a loss, "StopIteration"),
what was seen, and the weights.
"""

import os

import deepspeed
import torch
import torch.distributed as dist
import worker
from data_scripts import make_iterator
from deepspeed.pipe import PipelineModule
from models import BATCH, OPTIMIZERS, blocks


def run(case, out):
    folder = os.path.join(out, case["name"])
    os.makedirs(folder, exist_ok=True)
    stages, gas = case.get("stages") or dist.get_world_size(), case.get("gas", 1)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": case.get("clip", 0.0),
        "optimizer": OPTIMIZERS[case.get("optimizer", "AdamW")],
        "pipeline": {"schedule": "async_1f1b", **case.get("pipeline", {})},
        "steps_per_print": 10**9,
        **case.get("config", {}),
    }
    seen = []

    def loss_fn(outputs, labels):
        if torch.is_grad_enabled():
            seen.append(labels)
        return torch.nn.functional.mse_loss(outputs, labels)

    module = PipelineModule(blocks(case.get("layers", 2 * stages) // 2), num_stages=stages, loss_fn=loss_fn, partition_method="uniform")
    engine = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
    replica, gave, iterators, reads = engine.grid.get_data_parallel_id(), [], {}, {}
    for step, *arguments in case["script"]:
        if step == "new":
            name, spec = arguments
            if replica not in spec.get("replicas", [replica]):
                continue
            if engine.is_last_stage() and "on_last_stage" in spec:
                spec = {**spec, **spec["on_last_stage"]}
            iterators[name] = make_iterator(spec, replica, reads.setdefault(name, []))
        elif step == "again":
            iterators[arguments[0]].begin(arguments[1], replica)
        elif step == "train":
            try:
                gave.append(float(engine.train_batch(iterators[arguments[0]])))
            except StopIteration:
                gave.append("StopIteration")
        elif step == "evaluate":
            gave.append(float(engine.eval_batch(make_iterator(arguments[0], replica, []))))
        elif step == "reset":
            engine.reset_activation_shape()
        elif step == "drain":
            engine.drain()
        elif step == "barrier":
            dist.barrier()
        elif step == "batch_size":
            engine.set_train_batch_size(arguments[0])
        elif step == "save":
            engine.save_checkpoint(os.path.join(folder, "checkpoint"))
        elif step == "load":
            engine.load_checkpoint(os.path.join(out, arguments[0], "checkpoint"))
    result = {
        "gave": gave,
        "seen": seen,
        "reads": reads,
        "stage": engine.stage_id,
        "replica": replica,
        "losses": [g for g in gave if g != "StopIteration"],
        "weights": {name: p.detach().clone() for name, p in engine.module.named_parameters()},
        "global_steps": engine.global_steps,
    }
    torch.save(result, os.path.join(folder, f"rank_{dist.get_rank()}.pt"))
    engine.drain()


if __name__ == "__main__":
    worker.main(run, limit_s=60)
