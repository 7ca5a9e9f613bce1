"""A two-stage asynchronous job that cannot go on after a few updates, for the reason given as its argument."""

import os
import signal
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from models import BATCH, OPTIMIZERS, blocks, microbatch, stream

fault = sys.argv[1]


class Failing(torch.nn.Module):
    calls = 0

    def forward(self, x):
        Failing.calls += 1
        if Failing.calls == 3:
            raise RuntimeError("the third forward fails: Broken pipe")
        return x


torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # no C++ build at start
deepspeed.init_distributed("gloo")
layers = blocks(2)
if fault.startswith("a layer raises"):
    layers.append(Failing())
module = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
config = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 1,
    "optimizer": OPTIMIZERS["AdamW"],
    "pipeline": {"schedule": "async_1f1b"},
    "steps_per_print": 10**9,
}
engine, *_ = deepspeed.initialize(model=module, config=config)


def say(action):
    """Do something, and say what it raises, as a script that tries to go on does."""
    try:
        action()
    except RuntimeError as error:
        print(f"caught: {error}", flush=True)
        return error


data = {"the loader ends": iter([microbatch(i) for i in range(3)]), "no iterator": None}
iterator = data.get(fault, stream())
if fault == "a layer raises, and the script goes on":
    say(lambda: engine.train_batch())  # without data, before any message: nothing is lost
    error = next(filter(None, (say(lambda: engine.train_batch(iterator)) for _ in range(10))))
    for action in (
        lambda: engine.train_batch(iterator),
        lambda: engine.eval_batch(iterator),
        engine.drain,
        lambda: engine.save_checkpoint("."),
    ):
        say(action)
    raise error
for update in range(10):
    if fault == "a rank is killed" and update == 4 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.train_batch(iterator)
