"""Runs a Megatron-LM script as it is, with its collectives noted: `recorded_script.py OUT pretrain_gpt.py ARGUMENTS...`.

Behind megatron_patches, as the script that it starts. From the second training step on to the fifth, logging included, each rank notes
the collectives that it begins, and writes OUT/rank_<r>.json: {"stage": ranks of its stage, "calls": [[name, ranks of the group], ...]}.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import megatron.training.training as training
import torch.distributed as dist
from megatron.core import parallel_state

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from recorder import Recorder

FIRST, END = 1, 4
"""Steps that ran before the notes begin, and when they end."""


def main(out: str, script: str) -> None:
    recorder, native = Recorder(), training.train_step

    def train_step(*args: Any, iteration: int, **kwargs: Any) -> Any:
        if iteration == FIRST:
            recorder.__enter__()
        if iteration == END:
            recorder.__exit__(None, None, None)
            stage = dist.get_process_group_ranks(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
            Path(out, f"rank_{dist.get_rank()}.json").write_text(json.dumps({"stage": stage, "calls": recorder.calls}))
        return native(*args, iteration=iteration, **kwargs)

    training.train_step = train_step
    sys.argv = [script, *sys.argv[3:]]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:3])
