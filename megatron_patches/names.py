"""Every name of Megatron beyond its documented interface that we touch, checked before anything is patched."""

import importlib
import re
from dataclasses import dataclass
from typing import Any

from ds_basisrot.common.blocks import ConfigError

Table = tuple[tuple[str, tuple[str, ...]], ...]
"""(module, names) of what must be there; a dot leads to a class's attribute."""


@dataclass(frozen=True)
class Family:
    """Versions of megatron-core that are patched in the same way.

    Attributes:
        versions: in words.
        minors: first and last minor version of them, under major version 0; None: all that follow.
        registry: whether optimizers have a registry, which a new one is entered into.
        backward_takes_model_type: whether `backward_step` has it as an argument.
    """

    versions: str
    minors: tuple[int, int | None]
    registry: bool
    backward_takes_model_type: bool

    def has(self, version: str) -> bool:
        """Whether a version belongs to it."""
        numbers = re.match(r"0\.(\d+)\b", version)
        first, last = self.minors
        return numbers is not None and first <= int(numbers[1]) and (last is None or int(numbers[1]) <= last)


INNER_ADAM = Family("0.16.x", (16, 16), registry=False, backward_takes_model_type=True)
REGISTRY = Family("0.18 and newer", (18, None), registry=True, backward_takes_model_type=False)
FAMILIES = (INNER_ADAM, REGISTRY)

# Of all families.
CORE: Table = (
    (
        "megatron.core.pipeline_parallel.schedules",
        ("get_forward_backward_func", "forward_step", "backward_step", "deallocate_output_tensor"),
    ),
    ("megatron.core.optimizer", ("get_megatron_optimizer",)),
    ("megatron.core.optimizer.clip_grads", ("clip_grad_by_total_norm_fp32",)),
    (
        "megatron.core.parallel_state",
        (
            "get_model_parallel_group",
            "get_tensor_and_data_parallel_group",
            "get_expert_tensor_model_pipeline_parallel_group",
            "get_expert_tensor_and_model_parallel_group",
        ),
    ),
    ("megatron.core.dist_checkpointing.serialization", ("save", "load", "load_sharded_metadata")),
    ("megatron.core.utils", ("get_attr_wrapped_model", "get_model_config", "get_model_type")),
)


def version() -> str:
    """Of megatron-core."""
    import megatron.core

    return str(megatron.core.__version__)


def family() -> Family:
    """The family of the megatron-core that is here.

    Raises:
        ConfigError: with the version, and those that are supported.
    """
    found = version()
    for each in FAMILIES:
        if each.has(found):
            return each
    raise ConfigError(f"megatron-core {found}: megatron_patches is made for {', '.join(each.versions for each in FAMILIES)}")


def check() -> None:
    """Refuse a Megatron that is missing, of another version, or lacks one of the names.

    Raises:
        ConfigError: with the version and what is missing.
    """
    try:
        version()
    except ImportError as error:
        raise ConfigError(f"megatron-core cannot be imported ({error}): install it, or start from a Megatron-LM checkout") from None
    family()
    check_names(CORE)


def check_names(table: Table) -> None:
    """Refuse a Megatron that lacks one of the names.

    Raises:
        ConfigError: with the version and the missing names.
    """
    for module, wanted in table:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            found = None
        missing = [name for name in wanted if not _has(found, name)]
        if missing:
            raise ConfigError(
                f"megatron-core {version()} has no {module}.{', '.join(missing)}: megatron_patches is made for another version"
            )


def _has(module: Any, name: str) -> bool:
    for part in name.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True
