"""A job that trains until a signal stops it, then saves; SIGTERM goes to the ranks named by the second argument, at different moments.

torchrun --nproc_per_node 4 stopping_job.py OUT RANKS STAGES SCHEDULE GAS
"""

import json
import os
import signal
import sys
import threading

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from models import BATCH, OPTIMIZERS, blocks, stream

from ds_basisrot import StopOnSignal

out, signalled, stages, schedule, gas = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no C++ build at start
deepspeed.init_distributed("gloo")
module = PipelineModule(blocks(stages), num_stages=stages, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": gas,
    "optimizer": OPTIMIZERS["AdamW"],
    "pipeline": {"schedule": schedule},
    "steps_per_print": 10**9,
}
engine = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
stop, rank, data = StopOnSignal(engine), dist.get_rank(), stream(engine.grid.get_data_parallel_id())
last = None
for update in range(1, 2000):
    if rank in signalled and update == 5:
        threading.Timer(0.01 * rank, os.kill, (os.getpid(), signal.SIGTERM)).start()
    engine.train_batch(data)
    if stop():
        last = update
        engine.save_checkpoint(os.path.join(out, "checkpoint"))
        break
torch.save({"last": last}, os.path.join(out, f"rank_{rank}.pt"))
dist.barrier()
sys.stdout.flush()
os._exit(0)
