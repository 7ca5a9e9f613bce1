"""What the asynchronous schedule cannot train, refused before the first step with the reason and the way out."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from ds_basisrot.common.blocks import ConfigError

from .tied_embeddings import are_tied, shared_weight

# Options of TransformerConfig that must be off: (name, command-line flag, why).
MODEL_OPTIONS = (
    ("calculate_per_token_loss", "--calculate-per-token-loss", "the last stage would tell all others the number of tokens in each update"),
    ("fp8", "--fp8-format", "cached 8-bit weights would not follow the weights that a microbatch was forwarded with"),
    (
        "num_microbatches_with_partial_activation_checkpoints",
        "num_microbatches_with_partial_activation_checkpoints",
        "it counts on a flush",
    ),
    ("delay_wgrad_compute", "--delay-wgrad-compute", "weight gradients would be computed with other weights than the forward's"),
    ("defer_embedding_wgrad_compute", "--defer-embedding-wgrad-compute", "it needs a flush"),
    ("overlap_p2p_comm", "--overlap-p2p-communication", "the schedule does that by itself"),
    ("fine_grained_activation_offloading", "--fine-grained-activation-offloading", "it needs a flush"),
    ("enable_cuda_graph", "--enable-cuda-graph", "graphs hold the addresses of one version of the weights"),
    ("external_cuda_graph", "--external-cuda-graph", "graphs hold the addresses of one version of the weights"),
    ("mtp_num_layers", "--mtp-num-layers", "its layers share embeddings with the first stage"),
    ("moe_paged_stash", "--moe-paged-stash", "it is emptied in every step, with forwards in flight"),
)

# Options of TransformerConfig from 0.18 on: ranks among which a weight is spread while it is not used.
WEIGHT_SHARDS = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")

DDP_OPTIONS = (
    ("overlap_param_gather", "--overlap-param-gather", "weights would be gathered after they are stashed"),
    ("use_megatron_fsdp", "--use-megatron-fsdp", "it moves the weights' storage"),
)

# Options of Megatron-LM's training script that must be off: (name, flag, why).
SCRIPT_OPTIONS = (
    ("perform_rl_step", "--perform-rl-step", "its data iterator changes in mid-run"),
    ("hybrid_context_parallel", "--hybrid-context-parallel", "it replaces the schedule itself"),
    ("iterations_to_skip", "--iterations-to-skip", "data is read ahead, so that other samples would be skipped"),
    ("dataloader_save", "--dataloader-save", "a loader's position would count data that was only read ahead"),
    ("log_params_norm", "--log-params-norm", "all stages would meet in every step"),
    ("log_straggler", "--log-straggler", "all stages would meet in every logged step"),
    ("adlr_autoresume", "--adlr-autoresume", "it stops stages at different updates"),
    ("save_dgrads_interval", "--save-dgrads-interval", "forwards of other steps are in flight"),
    ("save_activations_interval", "--save-activations-interval", "forwards of other steps are in flight"),
    ("save_tokens_per_expert_interval", "--save-tokens-per-expert-interval", "forwards of other steps are in flight"),
)


# Arguments of a schedule's call that must be left out: (name, why).
CALL_OPTIONS = (
    ("collect_non_loss_data", "it is for evaluation"),
    ("adjust_tensor_shapes_fn", "shapes travel with the tensors, and a teacher's forwards would be delayed with the student's"),
)


def check_schedule(config: Any, model_chunks: list[torch.nn.Module]) -> None:
    """Refuse an OptimizerConfig and model chunks that async_1f1b cannot train.

    Raises:
        ConfigError: the first fault.
    """
    if len(model_chunks) > 1 or parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        _refuse("--num-layers-per-virtual-pipeline-stage", "it does not interleave virtual stages; remove the flag")
    if config.fp16:
        _refuse("--fp16", "stages cannot share a loss scale; use --bf16")
    if config.loss_scale is not None:
        _refuse("--loss-scale", "stages cannot share a loss scale; remove the flag")
    if config.overlap_param_gather_with_optimizer_step:
        _refuse("--overlap-param-gather-with-optimizer-step", "weights would be gathered after they are stashed; remove the flag")
    model = model_chunks[0]
    for owner, options in ((get_model_config(model), MODEL_OPTIONS), (getattr(model, "ddp_config", None), DDP_OPTIONS)):
        for name, flag, why in options:
            if getattr(owner, name, None):
                _refuse(flag, f"{why}; remove the flag")
    if getattr(config, "use_layer_wise_distributed_optimizer", False):
        _refuse("--use-distributed-optimizer", f"with --optimizer {config.optimizer} norms meet all stages; use --optimizer adam")
    if any(getattr(get_model_config(model), name, 1) > 1 for name in WEIGHT_SHARDS):
        _refuse("--tensor-parallel-num-weight-shards", "weights would be gathered after they are stashed; remove the flag")
    if getattr(get_model_config(model), "cuda_graph_impl", "none") != "none":
        _refuse("--cuda-graph-impl", "graphs hold the addresses of one version of the weights; remove the flag")
    if getattr(getattr(model, "ddp_config", None), "num_distributed_optimizer_instances", 1) > 1:
        _refuse("--num-distributed-optimizer-instances", "a stage's gradient norm would count each instance; remove the flag")
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError("pipeline.schedule: async_1f1b: this stage has no trainable parameter; give it layers that have some")
    weight = shared_weight(model)
    if weight is not None and not weight.requires_grad:
        _refuse("frozen tied embeddings", "both stages send each other their gradients; pass --untie-embeddings-and-output-weights")
    if are_tied(model) and not model.ddp_config.grad_reduce_in_fp32 and config.bf16:
        _refuse("--grad-reduce-in-bf16", "tied embeddings need the sum of their gradients in float32; remove the flag")


def check_call(call: Mapping[str, Any]) -> None:
    """Refuse arguments of a schedule's call that async_1f1b would do nothing with.

    Raises:
        ConfigError: the first fault.
    """
    for name, why in CALL_OPTIONS:
        if call.get(name):
            _refuse(name, f"{why}; leave it out")
    groups = call.get("pg_collection")
    if groups is not None and groups.pp is not parallel_state.get_pipeline_model_parallel_group():
        _refuse("pg_collection", "the pipeline's group is the one of megatron.core.parallel_state; leave it out")


def check_arguments(arguments: Any) -> None:
    """Refuse arguments of Megatron-LM's training script that async_1f1b cannot train with; None: another script.

    Raises:
        ConfigError: the first fault.
    """
    if arguments is None:
        return
    if getattr(arguments, "rerun_mode", "disabled") != "disabled":
        _refuse("--rerun-mode", f"it cannot run a step again, got {arguments.rerun_mode!r}; pass --rerun-mode disabled")
    for name, flag, why in SCRIPT_OPTIONS:
        if getattr(arguments, name, None):
            _refuse(flag, f"{why}; remove the flag")
    if getattr(arguments, "non_persistent_ckpt_type", None) == "local":
        _refuse("--non-persistent-ckpt-type", "local checkpoints do not carry what stages know of each other; use global")
    if getattr(arguments, "ckpt_format", "torch_dist") != "torch_dist" and getattr(arguments, "save", None):
        _refuse(
            "--ckpt-format", f"what is in flight is known to torch_dist checkpoints only, got {arguments.ckpt_format!r}; use torch_dist"
        )


def check_saving(arguments: Any) -> None:
    """Refuse ways of saving that lose BasisRotation's states; None: another script than Megatron-LM's.

    Raises:
        ConfigError: the first fault.
    """
    if arguments is None or not getattr(arguments, "save", None):
        return
    if getattr(arguments, "non_persistent_ckpt_type", None) == "local":
        raise ConfigError("--non-persistent-ckpt-type: local checkpoints do not carry states of BasisRotation; use global")
    if getattr(arguments, "ckpt_format", "torch_dist") != "torch_dist":
        raise ConfigError(
            f"--ckpt-format: states of BasisRotation go into torch_dist checkpoints only, got {arguments.ckpt_format!r}; use torch_dist"
        )
    if getattr(arguments, "use_distributed_optimizer", False) and getattr(arguments, "dist_ckpt_optim_fully_reshardable", False):
        raise ConfigError(
            "--dist-ckpt-optim-fully-reshardable: it stores Adam's states, and not those of BasisRotation; remove the flag "
            "(other numbers of data-parallel ranks load without it)"
        )


def _refuse(what: str, why: str) -> None:
    raise ConfigError(f"{what}: does not go with pipeline.schedule async_1f1b: {why}")
