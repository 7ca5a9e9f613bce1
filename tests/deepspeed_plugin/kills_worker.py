"""A small asynchronous job as users have them: it saves every few updates and goes on from the latest checkpoint where there is one.

    torchrun --nproc_per_node 4 kills_worker.py FOLDER STAGES UPDATES SAVED_EVERY

Rank 0 prints "ready" and "update <n> is made". In the end each rank writes FOLDER/rank_<r>.pt: the update that it began with, its losses
and its weights.
"""

import os
import sys
import time

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from models import BATCH, OPTIMIZERS, blocks, stream

folder = sys.argv[1]
stages, updates, saved_every = map(int, sys.argv[2:])

torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no C++ build at start
deepspeed.init_distributed("gloo")
torch.manual_seed(100 + dist.get_rank())
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": OPTIMIZERS["BasisRotation"],
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 8, "warmup_type": "linear"},
    },
    "pipeline": {"schedule": "async_1f1b"},
    "steps_per_print": 10**9,
}
module = PipelineModule(blocks(stages, dropout=0.1), num_stages=stages, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
engine, *_ = deepspeed.initialize(model=module, config=config)
torch.manual_seed(200 + dist.get_rank())
checkpoints = os.path.join(folder, "checkpoints")
engine.load_checkpoint(checkpoints)
start, losses = engine.global_steps, []
data = stream(engine.grid.get_data_parallel_id(), 2 * start)


def say(message):
    if dist.get_rank() == 0:
        print(message, flush=True)


say("ready")
for update in range(start + 1, updates + 1):
    losses.append(float(engine.train_batch(data)))
    say(f"update {update} is made")
    time.sleep(0.02)
    if update % saved_every == 0:
        engine.save_checkpoint(checkpoints)
weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
torch.save({"start": start, "losses": losses, "weights": weights}, os.path.join(folder, f"rank_{dist.get_rank()}.pt"))
dist.barrier()
sys.stdout.flush()
os._exit(0)
