"""Every private name of DeepSpeed that we touch, checked when we bind."""

from typing import Any

from ..common.blocks import ConfigError

ENGINE = (
    "_is_supported_optimizer", "_do_sanity_check", "_configure_basic_optimizer", "_do_optimizer_sanity_check", "_configure_zero_optimizer",
    "_configure_bf16_optimizer", "_load_zero_checkpoint", "_take_model_step", "_copy_recovery_script",
)  # fmt: skip
PIPELINE_ENGINE = (
    "_train_schedule", "_exec_schedule", "_aggregate_total_loss", "_exec_load_micro_batch", "_exec_forward_pass", "_exec_backward_pass",
    "_exec_reduce_grads", "_exec_optimizer_step", "_reserve_pipe_buffers",
)  # fmt: skip
PIPELINE_ENGINE_ATTRIBUTES = ("_config", "pipe_buffers", "grad_layer", "data_iterator", "micro_batches", "clip_fp32_gradients")
PIPELINE_MODULE = ("_layer_specs", "_grid", "parts", "micro_offset")


def check(owner: Any, names: tuple[str, ...], what: str) -> None:
    """Refuse a DeepSpeed that lacks one of `names`.

    Raises:
        ConfigError: with the version and the missing names.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        from deepspeed.git_version_info import version

        raise ConfigError(f"DeepSpeed {version} has no {what}.{', '.join(missing)}: ds_basisrot is made for deepspeed 0.19.x")
