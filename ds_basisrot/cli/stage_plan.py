"""What each stage of an asynchronous pipeline holds and stashes of its weights, from their shapes alone."""

import contextlib
import re
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from ds_basisrot.cli.errors import CommandError
from ds_basisrot.cli.layer_list import Layer
from ds_basisrot.pipeline.stash import stash_versions

PARTITIONS = ("uniform", "parameters")
"""And "type:REGEX", as in PipelineModule's partition_method."""

# DeepSpeed's blocks of 16-bit training, in which it converts the model's weights.
SIXTEEN_BIT_BLOCKS = ("bf16", "bfloat16", "fp16")


def stage_plan(layers: Sequence[Layer], config: Mapping[str, Any], stages: int, accumulation: int, partition: str) -> dict[str, Any]:
    """The figures of `ds-basisrot plan --stages`, as plain data.

    Args:
        layers: of the whole model; their parameters may be on the meta device.
        config: DeepSpeed's, checked before and without "auto".
        stages: of the pipeline.
        accumulation: microbatches per update.
        partition: PipelineModule's partition_method.

    Returns:
        "by_stage", for each its "layers" (the first, and the one after the last), and of the parameters that are trained "weight_bytes",
        "versions" that are stashed at most, and "stash_bytes"; "stash_bytes" over all stages; and what they follow from.

    Raises:
        CommandError: too few layers, a partition that DeepSpeed does not know, or DeepSpeed is missing.
    """
    if len(layers) < stages:
        raise CommandError(f"--stages: {len(layers)} layers are too few for {stages} stages; use at most as many stages as layers")
    element_bytes = 2 if any((config.get(block) or {}).get("enabled") for block in SIXTEEN_BIT_BLOCKS) else 4
    stashing = (config.get("pipeline") or {}).get("weight_stashing", True)
    bounds = _bounds(layers, stages, partition)
    by_stage = []
    for stage, (start, stop) in enumerate(zip(bounds, bounds[1:])):
        parameters = {id(p): p for layer in layers[start:stop] for p in layer.parameters()}  # a shared one once
        weight_bytes = element_bytes * sum(p.numel() for p in parameters.values())
        versions = stash_versions(stage, stages, accumulation) if stashing else 0
        figures = {"weight_bytes": weight_bytes, "versions": versions, "stash_bytes": versions * weight_bytes}
        by_stage.append({"layers": [start, stop], **figures})
    return {
        "partition": partition,
        "accumulation": accumulation,
        "element_bytes": element_bytes,
        "weight_stashing": stashing,
        "by_stage": by_stage,
        "weight_bytes": sum(each["weight_bytes"] for each in by_stage),
        "stash_bytes": sum(each["stash_bytes"] for each in by_stage),
    }


def _bounds(layers: Sequence[Layer], stages: int, partition: str) -> list[int]:
    """The first layer of each stage, and the number of layers, as PipelineModule cuts them."""
    # PipelineModule reads its partition_method so: in lower case, and a pattern up to the next colon.
    method, _, pattern = partition.lower().partition(":")
    if partition.lower() in PARTITIONS:
        weights = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    elif method == "type" and pattern:
        weights = _of_type(layers, pattern.partition(":")[0])
    else:
        raise CommandError(f"--partition: must be uniform, parameters or type:REGEX, got {partition!r}")
    utils = _deepspeed_utils()
    if method == "uniform":
        return [int(bound) for bound in utils.partition_uniform(len(layers), stages)]
    return [int(bound) for bound in utils.partition_balanced(weights, stages)]


def _of_type(layers: Sequence[Layer], pattern: str) -> list[int]:
    """1 for each layer with the pattern in its type's name, else 0."""
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise CommandError(f"--partition: {pattern!r} is no regular expression: {error}") from error
    weights = [int(layer.type_name is not None and compiled.search(layer.type_name) is not None) for layer in layers]
    if not any(weights):
        names = ", ".join(dict.fromkeys(layer.type_name for layer in layers if layer.type_name))
        raise CommandError(f"--partition: {pattern!r} is in no layer's type; they are {names}")
    return weights


def _deepspeed_utils() -> ModuleType:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where its logger then writes; stdout is for the figures
            from deepspeed.runtime import utils
    except ImportError as error:
        raise CommandError(
            f'--stages: DeepSpeed cuts the layers; install the extra "deepspeed" (pip install "ds_basisrot[deepspeed]"): {error}'
        ) from error
    return utils
