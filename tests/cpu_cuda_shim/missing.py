"""What Megatron finds on a GPU machine and not here: compilers, their results, Transformer Engine."""

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import wrapt

# Called at the start of a script: they build fused GPU kernels, and the index builders of data sets.
COMPILERS = {"megatron.legacy.fused_kernels": "load", "megatron.core.datasets.utils": "compile_helpers"}
HELPERS = "megatron.core.datasets.helpers_cpp"


class WheelsHelpers:
    """Finds the data sets' C++ helpers in the installed megatron-core, for a checkout in which they were not built."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != HELPERS:
            return None
        try:
            files = importlib.metadata.files("megatron-core") or []
        except importlib.metadata.PackageNotFoundError:
            return None
        built = [file.locate() for file in files if file.name.startswith("helpers_cpp.") and file.suffix == ".so"]
        return importlib.util.spec_from_file_location(name, built[0]) if built else None


def install() -> None:
    """Skip the compilers, look for the helpers in the wheel after everywhere else, and add missing names."""
    for module, function in COMPILERS.items():
        wrapt.register_post_import_hook(lambda imported, _name=function: setattr(imported, _name, lambda *args: None), module)
    sys.meta_path.append(WheelsHelpers)
    wrapt.register_post_import_hook(_name_missing_gemm, "megatron.core.transformer.moe.moe_utils")


def _name_missing_gemm(moe_utils: ModuleType) -> None:
    """0.16 asks whether this is None, but defines it only where Transformer Engine is."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
