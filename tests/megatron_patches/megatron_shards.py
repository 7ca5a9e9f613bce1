"""Results of a job's ranks against whole weights: loading, joining tensor-parallel shards, comparing. Needs no Megatron."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Results = Sequence[Mapping[str, Any]]


def load(out: Path, name: str) -> list[dict[str, Any]]:
    """The results of a job, one for each rank."""
    return [torch.load(path) for path in sorted(Path(out, name).glob("rank_*.pt"), key=lambda path: int(path.stem[5:]))]


def whole_weights(results: Results, key: str = "initial") -> list[dict[str, Tensor]]:
    """The weights of each stage, by name in the whole model, joined over the tensor-parallel ranks.

    Args:
        results: of all ranks of a job.
        key: "initial" or "weights".
    """
    stages = []
    for stage in sorted({r["stage"] for r in results}):
        ranks = sorted((r for r in results if r["stage"] == stage and r["replica"] == 0), key=lambda r: r["tp_rank"])
        stages.append({name: _join([r[key][name] for r in ranks], name, ranks[0]) for name in ranks[0][key]})
    return stages


def mean_over_replicas(results: Results, key: str = "losses") -> list[float]:
    """Of each step, the mean loss of all its microbatches. Key: "losses" or "evaluations"."""
    replicas = [r[key] for r in results if r["tp_rank"] == 0 and r["losses"]]
    return [sum(losses) / len(losses) for losses in zip(*replicas)]


def largest_difference(results: Results, simulated: Mapping[str, Tensor], key: str = "weights") -> float:
    """Largest |dw| between what the ranks have and the whole model's simulated weights, by name.

    Args:
        results: of all ranks of a job.
        simulated: by name in the whole model. Where it has no output layer's weight, that is the embedding's.
        key: "weights", or "main_weights" for the float32 copies of bfloat16 weights.

    Raises:
        ValueError: the ranks have no such weights.
    """
    differences = []
    for result in results:
        for name, weight in result[key].items():
            other = simulated.get(name, simulated["embedding.word_embeddings.weight"] if name == "output_layer.weight" else None)
            shard = _shard(other, weight, name, result)
            differences.append((weight.float() - shard.to(weight.dtype).float()).abs().max().item())
    if not differences:
        raise ValueError(f"{key}: the ranks left none")
    return max(differences)


def largest_movement(results: Results) -> float:
    """Largest |dw| of the training itself, what differences are small against."""
    return max((r["weights"][n].float() - w.float()).abs().max().item() for r in results for n, w in r["initial"].items())


def _join(shards: Sequence[Tensor], name: str, result: Mapping[str, Any]) -> Tensor:
    dim = result["partitions"].get(name)
    if dim is None:
        return shards[0]
    if name in result["gated"]:  # each shard is a piece of the gate on a piece of the other half
        return torch.cat([half for halves in zip(*(shard.chunk(2, dim) for shard in shards)) for half in halves], dim)
    return torch.cat(list(shards), dim)


def _shard(whole: Tensor, like: Tensor, name: str, result: Mapping[str, Any]) -> Tensor:
    dim, rank = result["partitions"].get(name), result["tp_rank"]
    if dim is None:
        return whole
    parts = whole.shape[dim] // like.shape[dim]
    if name in result["gated"]:
        return torch.cat([half.chunk(parts, dim)[rank] for half in whole.chunk(2, dim)], dim)
    return whole.chunk(parts, dim)[rank]
