"""A rank of a world that runs cases of BasisRotation inside Megatron's optimizers: `torchrun ... optimizer_worker.py OUT CASE...`.

Gradients are made up, the same for whole parameters however they are sliced, and every rank repeats the updates in a plain loop.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import cpu_cuda_shim  # noqa: F401  before Megatron
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from optimizer_cases import CASES


def main(out: str, *names: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for name in names:
        sizes, run = CASES[name]
        parallel_state.initialize_model_parallel(**sizes)
        try:
            results[name] = run()
        except Exception:  # the other cases tell more than the first failure does
            results[name] = {"error": traceback.format_exc()}
        dist.barrier()
        parallel_state.destroy_model_parallel()
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
    Path(out, f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


if __name__ == "__main__":
    main(*sys.argv[1:])
