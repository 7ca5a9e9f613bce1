"""Trains under ZeRO on the processes it is started with, and saves what each rank keeps of rotation and exchanges for it.

    torchrun --nproc_per_node N zero_plan_worker.py OUT

Rank r writes OUT/rank_<r>.pt: for each ZeRO stage, bytes of its rotation states, and bytes that it gave to others in each update.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformer import BATCH, Mixture, Transformer, tokens

CONFIG = json.loads((Path(__file__).parent / "zero_plan.json").read_text())


def model():
    """Fused, gated and plain matrices, and stacked experts."""
    torch.manual_seed(0)
    return Transformer(mixture=Mixture)


def measure(stage):
    engine = deepspeed.initialize(model=(module := model()), model_parameters=module.parameters(), config=config(stage))[0]
    given = []
    for update in range(4):
        x, y = (each.chunk(dist.get_world_size())[dist.get_rank()] for each in tokens(update))
        engine.backward(engine(x, y))
        sent.clear()
        engine.step()
        given.append(sum(sent))
    return {"rotation_state_bytes": engine.basic_optimizer.state_bytes(), "exchanged_bytes": given}


def config(stage):
    return {**CONFIG, "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(), "zero_optimization": {"stage": stage}}


sent = []
all_to_all_single = dist.all_to_all_single


def counted(received, given, *arguments, **options):
    sent.append(given.nbytes)
    return all_to_all_single(received, given, *arguments, **options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no C++ build at start
    deepspeed.init_distributed("gloo")
    dist.all_to_all_single = counted
    torch.save({stage: measure(stage) for stage in (1, 2, 3)}, f"{sys.argv[1]}/rank_{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)
