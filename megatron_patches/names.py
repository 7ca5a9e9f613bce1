"""Every name of Megatron beyond its documented interface that we touch, checked before anything is patched."""

import importlib

from ds_basisrot.common.blocks import ConfigError

SUPPORTED = ("0.16.",)

# Of megatron-core 0.16: (module, names).
CORE = (
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


def check() -> None:
    """Refuse a Megatron that is missing, of another version, or lacks one of the names.

    Raises:
        ConfigError: with the version and what is missing.
    """
    try:
        found = version()
    except ImportError as error:
        raise ConfigError(f"megatron-core cannot be imported ({error}): install it, or start from a Megatron-LM checkout") from None
    if not found.startswith(SUPPORTED):
        raise ConfigError(f"megatron-core {found}: megatron_patches is made for {', '.join(f'{each}x' for each in SUPPORTED)}")
    check_names(CORE)


def check_names(table: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    """Refuse a Megatron that lacks one of the names.

    Raises:
        ConfigError: with the version and the missing names.
    """
    for module, wanted in table:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            found = None
        missing = [name for name in wanted if not hasattr(found, name)]
        if missing:
            raise ConfigError(
                f"megatron-core {version()} has no {module}.{', '.join(missing)}: megatron_patches is made for another version"
            )
