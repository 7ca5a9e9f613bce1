"""Imports point only downwards: the method and the pipelines know torch and themselves, nothing of DeepSpeed or Megatron."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "optim": {"torch"},
    "pipeline": {"torch"},
    "sharding": {"torch", "ds_basisrot.optim"},
    "bench": {"torch", "numpy", "deepspeed", "ds_basisrot.optim", "ds_basisrot.pipeline"},
    "common": {"torch", "pydantic", "ds_basisrot.optim"},
    "deepspeed_plugin": {"torch", "deepspeed", "pydantic", "safetensors", "ds_basisrot"}
    | {"ds_basisrot.optim", "ds_basisrot.pipeline", "ds_basisrot.sharding", "ds_basisrot.common"},
    "megatron_patches": {"torch", "megatron", "yaml", "ds_basisrot"}
    | {"ds_basisrot.optim", "ds_basisrot.pipeline", "ds_basisrot.sharding", "ds_basisrot.common"},
}


def imported(path):
    """Top modules that a file imports; our own as `ds_basisrot.<layer>`."""
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = [*here[: len(here) - node.level], *(node.module or "").split(".")]
            names = [[part for part in base if part]]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module.split(".")]
        else:
            continue
        for name in names:
            yield ".".join(name[:2]) if name[0] == "ds_basisrot" else name[0]


@pytest.mark.parametrize("layer", ALLOWED)
def test_a_layer_imports_only_what_is_below_it(layer):
    own = layer if (ROOT / layer).is_dir() else f"ds_basisrot.{layer}"
    paths = list(ROOT.joinpath(*own.split(".")).glob("*.py"))
    assert paths
    for path in paths:
        strangers = set(imported(path)) - ALLOWED[layer] - {own} - set(sys.stdlib_module_names)
        assert not strangers, f"{path.name} imports {strangers}"
