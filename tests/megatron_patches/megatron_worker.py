"""A rank of a world that runs jobs one after another: `torchrun ... megatron_worker.py jobs.json OUT` leaves OUT/<name>/rank_<r>.pt."""

import json
import os
import sys
from pathlib import Path

import cpu_cuda_shim  # noqa: F401  before Megatron
import torch
import torch.distributed as dist
from megatron_job import Job
from megatron_training import train


def main(path: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in json.loads(Path(path).read_text()):
        case.pop("simulation", None)
        job = Job(**case)
        if job.processes != dist.get_world_size():
            sys.exit(f"{job.name}: needs {job.processes} processes, there are {dist.get_world_size()}")
        if job.basisrot is not None:
            import megatron_patches

            megatron_patches.apply(job.basisrot)
        results = train(job)
        if job.basisrot is not None:
            megatron_patches.drain()  # nothing may be in flight between the groups that end
        folder = Path(out) / job.name
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(results, folder / f"rank_{dist.get_rank()}.pt")
        forget_groups()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


def forget_groups() -> None:
    """Megatron forgets its groups without ending them: dozens for each job, with a socket for every pair of ranks."""
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    main(*sys.argv[1:])
