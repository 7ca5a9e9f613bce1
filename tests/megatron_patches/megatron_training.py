"""Trains a job on this rank, in the order of calls of Megatron's train_step. Import cpu_cuda_shim first.

What a patch may replace is looked up through Megatron's public names when it is called.
"""

from collections.abc import Callable
from typing import Any

import megatron.core.distributed
import megatron.core.optimizer
import megatron.core.pipeline_parallel
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator, init_num_microbatches_calculator
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron_job import EVALUATED, Job, Microbatches
from megatron_model import arguments, global_name, gpt, scheduler, transformer_config
from torch import Tensor, nn


def train(job: Job) -> dict[str, Any]:
    """Run the job on all ranks of the world.

    Returns:
        stage, tp_rank, replica: where this rank is.
        losses: of each step the mean of this replica's microbatches; evaluations: the same, of the evaluation. Empty but on the last stage.
        grad_norms: what `optimizer.step()` returned, by step; drawn: microbatches that it took from its iterator.
        initial, weights: by name in the whole model; main_weights: the float32 copies, of those that this rank holds whole.
        partitions: by name the dimension that is split over the tensor-parallel ranks; gated: the names of which each half is.
    """
    parallel_state.initialize_model_parallel(job.tp, job.pp)
    init_num_microbatches_calculator(dist.get_rank(), None, job.batch, job.micro_batch_size, job.dp)
    try:
        return _train(job)
    finally:
        destroy_num_microbatches_calculator()
        parallel_state.destroy_model_parallel()


def _train(job: Job) -> dict[str, Any]:
    stage, replica = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    config = transformer_config(job)
    model = wrapped_model(job, config)
    optimizer = built_optimizer(job, config, model)
    rates = scheduler(job, optimizer)
    initial = weights_of(job, model, stage)

    data = Microbatches(job, replica) if stage in (0, job.pp - 1) else None
    losses, evaluations, grad_norms = [], [], []
    for step in range(1, job.steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses += forward_backward(job, model, data, forward_only=False)
        updated, grad_norm, _ = optimizer.step()
        grad_norms.append(grad_norm)
        if updated:
            rates.step(increment=job.batch)
        if step == job.evaluate_after:
            evaluations += _evaluate(job, model, data and Microbatches(job, replica, EVALUATED))
    if job.gathers_late:
        model.disable_forward_pre_hook()
    return {
        "stage": stage,
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "replica": replica,
        "losses": losses,
        "evaluations": evaluations,
        "grad_norms": grad_norms,
        "drawn": data.next_index if data else 0,
        "initial": initial,
        "weights": weights_of(job, model, stage),
        "main_weights": weights_of(job, model, stage, main_weight),
        "gated": [name for name in initial if job.swiglu and "linear_fc1" in name],
        "partitions": weights_of(job, model, stage, lambda p: p.partition_dim if getattr(p, "tensor_model_parallel", False) else None),
    }


def wrapped_model(job: Job, config: TransformerConfig) -> nn.Module:
    """The stage of this rank, from the job's seed."""
    seed = job.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    model = gpt(job, config, parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage())
    if job.bf16:
        model = Float16Module(config, model)
    ddp_config = megatron.core.distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=job.overlap,
        overlap_param_gather=job.gathers_late,
        use_distributed_optimizer=job.distributed_optimizer,
    )
    return megatron.core.distributed.DistributedDataParallel(config, ddp_config, model)


def built_optimizer(job: Job, config: TransformerConfig, model: nn.Module) -> Any:
    """Megatron's optimizer of the job; what a schedule needs of both is put into the configuration."""
    optimizer = megatron.core.optimizer.get_megatron_optimizer(
        megatron.core.optimizer.OptimizerConfig(
            optimizer=job.optimizer,
            lr=job.lr,
            weight_decay=job.weight_decay,
            clip_grad=job.clip,
            bf16=job.bf16,
            params_dtype=job.dtype,
            use_distributed_optimizer=job.distributed_optimizer,
            overlap_param_gather=job.gathers_late,
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = megatron.core.distributed.finalize_model_grads
    if job.overlap:
        config.no_sync_func = model.no_sync
    return optimizer


def _evaluate(job: Job, model: nn.Module, data: Microbatches | None) -> list[float]:
    if job.gathers_late:
        model.disable_forward_pre_hook()
    model.eval()
    with torch.no_grad():
        losses = forward_backward(job, model, data, forward_only=True)
    model.train()
    if job.gathers_late:
        model.enable_forward_pre_hook()
    return losses


def forward_backward(job: Job, model: nn.Module, data: Microbatches | None, forward_only: bool) -> list[float]:
    """One call of the schedule; the mean loss on the last stage, nothing elsewhere."""
    reports = megatron.core.pipeline_parallel.get_forward_backward_func()(
        forward_step_func=lambda data, model: _forward_step(job, data, model),
        data_iterator=data,
        model=[model],
        num_microbatches=job.microbatches,
        seq_length=job.sequence,
        micro_batch_size=job.micro_batch_size,
        forward_only=forward_only,
    )
    if not parallel_state.is_pipeline_last_stage():
        return []
    losses = [report["lm loss"].tolist() for report in reports]
    return [sum(total / tokens for total, tokens in losses) / len(losses)]


def _forward_step(job: Job, data: Microbatches | None, model: nn.Module) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict]]]:
    tokens, labels = (None, None) if data is None else next(data)

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total, number = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
        return total, number, {"lm loss": torch.stack([total.detach().clone(), number])}

    return model(*arguments(job, tokens), labels=labels), loss


def weights_of(job: Job, model: nn.Module, stage: int, of: Callable[[nn.Parameter], Any] = lambda p: p) -> dict[str, Any]:
    """Something of each parameter, by name in the whole model; what is None is left out."""
    values = {global_name(name, stage * job.layers // job.pp): of(p) for name, p in model.named_parameters()}
    return {name: v.detach().clone() if isinstance(v, Tensor) else v for name, v in values.items() if v is not None}


def main_weight(p: nn.Parameter) -> Tensor | None:
    """The float32 copy of a parameter, where this rank holds it whole."""
    main = getattr(p, "main_param", None)
    return main if main is not None and main.shape == p.shape else None
