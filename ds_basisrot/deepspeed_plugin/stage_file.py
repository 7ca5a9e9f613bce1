"""One rank's safetensors file in the checkpoint of an asynchronous pipeline: read as it was written, or refused by its name."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..common.blocks import ConfigError

FORMAT = 2
"""1 had no digest."""

ABOUT, DIGEST = "async_pipeline", "sha256"
"""In the file's metadata: a JSON of what the tensors are, and a digest of both."""


def write(path: str, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a file in one step.

    Args:
        about: what a JSON can hold.
        tensors: on the processor.
    """
    text = json.dumps({"format": FORMAT, "name": os.path.basename(path), **about})
    partial = path + ".partial"
    save_file(dict(tensors), partial, metadata={ABOUT: text, DIGEST: _digest(text, tensors)})
    os.replace(partial, path)


def read(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(about, tensors) of a file.

    Raises:
        ConfigError: the file cannot be read, is not what was written, or is of a later format.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
        text = metadata[ABOUT]
        about = json.loads(text)
        version = about["format"]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): it is damaged; resume from another checkpoint") from None
    if not isinstance(version, int) or version > FORMAT:
        raise ConfigError(f"{path}: format {version} is newer than this ds_basisrot reads ({FORMAT}); update it")
    if version > 1 and metadata.get(DIGEST) != _digest(text, tensors):
        raise ConfigError(f"{path} is not what was written (its SHA-256 differs): it was altered; resume from another checkpoint")
    if about.get("name", os.path.basename(path)) != os.path.basename(path):
        raise ConfigError(f"{path} was written as {about['name']}: put each file in its place, or resume from another checkpoint")
    return about, tensors


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
