"""Parameters of GPT, Llama and mixtures of experts as shapes alone, and their units in a ZeRO layout."""

import torch
from torch import nn

from ds_basisrot import BasisRotation
from ds_basisrot.optim.roles import assign_roles
from ds_basisrot.sharding.layouts import LAYOUTS
from ds_basisrot.sharding.units import units_of

THIRDS = {"rows": [1024, 1024, 1024], "names": ["q", "k", "v"]}


def gpt(layers=24, vocabulary=50304):
    """(name, shape, entry) of a GPT of width 1024, its head tied to the embedding; without one where the vocabulary is 0."""
    if vocabulary:
        yield "embedding", (vocabulary, 1024), False
    for layer in range(layers):
        yield f"{layer}.norm1", (1024,), False
        yield f"{layer}.qkv", (3072, 1024), THIRDS
        yield f"{layer}.out", (1024, 1024), True
        yield f"{layer}.norm2", (1024,), False
        yield f"{layer}.up", (4096, 1024), True
        yield f"{layer}.down", (1024, 4096), True


def llama(layers=32, vocabulary=128256):
    """A Llama of width 4096 with grouped-query attention and a gated MLP."""
    yield "embedding", (vocabulary, 4096), False
    for layer in range(layers):
        for name, rows, columns in (("q", 4096, 4096), ("k", 1024, 4096), ("v", 1024, 4096), ("o", 4096, 4096)):
            yield f"{layer}.{name}", (rows, columns), True
        yield f"{layer}.gate", (14336, 4096), True
        yield f"{layer}.up", (14336, 4096), True
        yield f"{layer}.down", (4096, 14336), True
        yield f"{layer}.norm", (4096,), False
    yield "head", (vocabulary, 4096), False


def moe(layers=8, experts=16, vocabulary=32000):
    """Attention of width 1024, and stacked experts with gate and up in one weight."""
    yield "embedding", (vocabulary, 1024), False
    for layer in range(layers):
        yield f"{layer}.qkv", (3072, 1024), THIRDS
        yield f"{layer}.out", (1024, 1024), True
        yield f"{layer}.router", (experts, 1024), False
        yield f"{layer}.gate_up", (experts, 4096, 1024), {"rows": [2048, 2048], "names": ["gate", "up"]}
        yield f"{layer}.down", (experts, 1024, 2048), True


MODELS = {"gpt": gpt, "llama": llama, "moe": moe}


def roles_of(parameters, **options):
    """Each parameter's shape and role, by name."""
    parameters = list(parameters)
    named = [(name, nn.Parameter(torch.empty(shape, device="meta"))) for name, shape, _ in parameters]
    optimizer = BasisRotation([{"params": named, "rotate": [entry for *_, entry in parameters]}], **options)
    roles = assign_roles(optimizer.param_groups, None)
    return {name: (tuple(p.shape), roles[p]) for name, p in named}


def units_in(parameters, stage, ranks, **options):
    """Units of the rotated parameters where ZeRO has cut them over `ranks`."""
    roles = roles_of(parameters, **options)
    pieces = LAYOUTS[stage]([torch.Size(shape).numel() for shape, _ in roles.values()], ranks)
    cut = zip(roles.items(), pieces)
    return [unit for (name, (shape, role)), own in cut if role.stacks for unit in units_of(name, shape, role, own)]
