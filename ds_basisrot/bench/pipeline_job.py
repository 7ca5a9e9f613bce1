"""A plain DeepSpeed job whose stages sleep instead of computing, so that its speed is that of the pipeline schedule.

    torchrun --nproc_per_node P pipeline_job.py CASES.json

It imports nothing of ours: `pipeline.schedule` in each case's configuration alone selects the schedule. CASES.json holds "forward_ms",
"backward_ms" and a list "cases", each with a DeepSpeed "config" and the numbers of calls of train_batch() that warm up and that count. For
each case in turn rank 0 prints a JSON line with the milliseconds per microbatch.
"""

import json
import os
import sys
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

WIDTH = 16


class Sleep(torch.autograd.Function):
    """The identity, which takes its time in forward and in backward, as a busy accelerator would."""

    @staticmethod
    def forward(ctx, x, forward_ms, backward_ms):
        ctx.backward_ms = backward_ms
        time.sleep(forward_ms / 1e3)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_ms / 1e3)
        return gradient.clone(), None, None


class SleepingStage(torch.nn.Module):
    """Weights to train, and the time that a stage's work would take."""

    def __init__(self, forward_ms, backward_ms):
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.times_ms = forward_ms, backward_ms

    def forward(self, x):
        return Sleep.apply(self.linear(x), *self.times_ms)


def microbatches(rows):
    while True:
        yield torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def ms_per_microbatch(case, forward_ms, backward_ms):
    """Trains one case, one stage on each rank; milliseconds of this rank."""
    stages = deepspeed.comm.get_world_size()
    layers = [SleepingStage(forward_ms, backward_ms) for _ in range(stages)]
    module = PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=case["config"])
    data = microbatches(engine.train_micro_batch_size_per_gpu())
    for _ in range(case["warm_up_calls"]):
        engine.train_batch(data)
    start = time.perf_counter()
    for _ in range(case["calls"]):
        engine.train_batch(data)
    duration_ms = 1e3 * (time.perf_counter() - start)
    deepspeed.comm.barrier()  # nobody begins the next case while others train
    return duration_ms / (case["calls"] * engine.gradient_accumulation_steps())


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # A faster all-reduce within one machine, which DeepSpeed would compile with a C++ compiler at every first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    for case in job["cases"]:
        figure = ms_per_microbatch(case, job["forward_ms"], job["backward_ms"])
        if deepspeed.comm.get_rank() == 0:
            print(json.dumps({"ms_per_microbatch": figure}), flush=True)
    deepspeed.comm.barrier()
    os._exit(0)  # threads of process groups that are torn down one after the other can wait for each other


if __name__ == "__main__":
    main()
