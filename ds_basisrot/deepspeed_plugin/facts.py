"""What all ranks of a DeepSpeed job compare before they train."""

from typing import Any

import torch

from .. import __version__
from ..common.agreement import flat

# Blocks of a ds_config that make ranks train differently when they differ.
COMPARED_BLOCKS = (
    "optimizer",
    "scheduler",
    "pipeline",
    "gradient_clipping",
    "bf16",
    "bfloat16",
    "fp16",
    "torch_autocast",
    "data_types",
    "communication_data_type",
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


def common_facts(ds_config: dict[str, Any]) -> dict[str, Any]:
    """What all ranks of a job must have in common: versions, and the blocks of their ds_config that decide how they train."""
    config = {block: ds_config[block] for block in COMPARED_BLOCKS if block in ds_config}
    return {"ds_basisrot version": __version__, "torch version": torch.__version__, **flat("", config)}
