"""Megatron's GPTModel for a job, or a stage of it. Import cpu_cuda_shim first."""

import dataclasses
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron_job import Job
from torch import Tensor, nn


def transformer_config(job: Job) -> TransformerConfig:
    """The job's model, in the layout that Megatron's arguments give it; without fused kernels, which need a GPU."""
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1} if job.recompute else {}
    moe = {"num_moe_experts": job.experts, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2} if job.experts else {}
    swiglu = {"gated_linear_unit": True, "activation_func": nn.functional.silu} if job.swiglu else {}
    return TransformerConfig(
        num_layers=job.layers,
        hidden_size=job.hidden,
        ffn_hidden_size=job.ffn,
        num_attention_heads=job.heads,
        num_query_groups=job.query_groups,
        pipeline_model_parallel_size=job.pp,
        tensor_model_parallel_size=job.tp,
        pipeline_dtype=job.dtype,
        params_dtype=job.dtype,
        bf16=job.bf16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=not (job.swiglu or job.experts),
        deallocate_pipeline_outputs=True,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **recompute,
        **moe,
        **swiglu,
    )


def gpt(job: Job, config: TransformerConfig, first: bool, last: bool) -> GPTModel:
    """The stage of the job that this rank holds."""
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=job.experts, normalization=config.normalization),
        job.vocabulary,
        job.sequence,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=job.tied,
        position_embedding_type="rope",
    )


def part_of_model(job: Job, part: int, parts: int) -> GPTModel:
    """Stage `part` of `parts` in a process that is no stage of any pipeline: a model of its layers only, or this rank's shard of it."""
    alone = dataclasses.replace(job, layers=job.layers // parts, pp=1, tp=parallel_state.get_tensor_model_parallel_world_size())
    return gpt(alone, transformer_config(alone), part == 0, part == parts - 1)


def global_name(name: str, first_layer: int) -> str:
    """A stage's parameter's name in the whole model: without wrappers, layers counted from the first stage's first one."""
    name = name.removeprefix("module.").removeprefix("module.")
    head, layers, rest = name.partition("decoder.layers.")
    if not layers:
        return name
    index, _, rest = rest.partition(".")
    return f"{head}{layers}{int(index) + first_layer}.{rest}"


def arguments(job: Job, tokens: Tensor | None) -> tuple[Tensor | None, Tensor, Tensor]:
    """Tokens, position ids and attention mask (True: hidden), as a Megatron model takes them."""
    positions = torch.arange(job.sequence).expand(job.micro_batch_size, -1)
    mask = torch.ones(job.sequence, job.sequence, dtype=torch.bool).triu(1)[None, None]
    return tokens, positions, mask


def scheduler(job: Job, optimizer: Any) -> OptimizerParamScheduler:
    """Learning rate and weight decay as training.py sets them, in samples; it also applies each group's `wd_mult`."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=job.lr,
        min_lr=0.0,
        lr_warmup_steps=job.warmup * job.batch,
        lr_decay_steps=(job.steps + job.warmup + 1) * job.batch,
        lr_decay_style="constant",
        start_wd=job.weight_decay,
        end_wd=job.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
