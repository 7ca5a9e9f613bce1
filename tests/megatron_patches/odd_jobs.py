"""What else a script may do in mid-run: jobs of two or four ranks, each a function with results. Needs cpu_cuda_shim."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import megatron.core.distributed
import megatron.core.optimizer
import megatron.core.pipeline_parallel
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron_job import Job, Microbatches, microbatch
from megatron_model import arguments, gpt, transformer_config
from recorder import Recorder
from torch import Tensor

import megatron_patches
from megatron_patches import job as patched

ASYNC = {"pipeline": {"schedule": "async_1f1b"}}
PAIR = Job("pair", pp=2, microbatches=2, clip=0.5)
SQUARE = Job("square", pp=2, dp=2, microbatches=2, clip=0.5)
LINE = Job("line", pp=4, microbatches=1, clip=0.5)


class Trainer:
    """A stage of a job with the patches, built as a script does.

    Args:
        job: sizes and options.
        config: changes of the TransformerConfig.
        freeze: which parameters, by name, do not learn.
        fp16: asks the optimizer for a loss scale.
        align: with `job.overlap`, reduce gradients at the same time on all stages.
    """

    def __init__(self, job: Job, freeze: Callable[[str], bool] = lambda name: False, fp16: bool = False, align: bool = True, **config: Any):
        megatron_patches.apply(ASYNC)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(job.tp, job.pp)
        self.job, self.stage = job, parallel_state.get_pipeline_model_parallel_rank()
        self.replica = parallel_state.get_data_parallel_rank()
        self.first, self.last = self.stage == 0, self.stage == job.pp - 1
        self.tensor_parallel = parallel_state.get_tensor_model_parallel_group()
        torch.manual_seed(job.seed + self.stage)
        model_parallel_cuda_manual_seed(job.seed + self.stage)
        self.config = transformer_config(job)
        for name, value in config.items():
            setattr(self.config, name, value)
        model = gpt(job, self.config, self.first, self.last)
        for name, p in model.named_parameters():
            p.requires_grad_(not freeze(name))
        wrapper = megatron.core.distributed.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=job.overlap,
            overlap_param_gather=job.gathers_late,
            use_distributed_optimizer=job.distributed_optimizer,
        )
        self.model = megatron.core.distributed.DistributedDataParallel(self.config, wrapper, model)
        self.optimizer = megatron.core.optimizer.get_megatron_optimizer(
            megatron.core.optimizer.OptimizerConfig(
                optimizer="adam", lr=job.lr, weight_decay=0.0, clip_grad=job.clip, fp16=fp16,
                use_distributed_optimizer=job.distributed_optimizer, overlap_param_gather=job.gathers_late,
            ),
            [self.model],
        )  # fmt: skip
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = megatron.core.distributed.finalize_model_grads
        if job.overlap:
            self.config.no_sync_func = self.model.no_sync
            self.config.grad_sync_func = self.model.start_grad_sync if align else None
        self.data: Iterator[Any] | None = Microbatches(job, self.replica) if self.reads else None

    @property
    def reads(self) -> bool:
        """Whether this rank has an iterator: the others of its stage get what it reads from it, as in Megatron's scripts."""
        return (self.first or self.last) and self.tensor_parallel.rank() == 0

    @property
    def pipeline(self) -> Any:
        return patched.current().pipeline

    def step(self, microbatches: int | None = None, forward_only: bool = False) -> list[float]:
        """One training step, or an evaluation; the losses of its microbatches on the last stage."""
        if not forward_only:
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
        reports = megatron.core.pipeline_parallel.get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=self.data,
            model=[self.model],
            num_microbatches=microbatches or self.job.microbatches,
            seq_length=self.job.sequence,
            micro_batch_size=self.job.micro_batch_size,
            forward_only=forward_only,
        )
        if not forward_only:
            self.optimizer.step()
        return [report["loss"] for report in reports]

    def evaluate(self) -> list[float]:
        """The losses on microbatches that are far from those that are trained."""
        training, self.data = self.data, self.data and Microbatches(self.job, self.replica, 1000)
        self.model.eval()
        with torch.no_grad():
            losses = self.step(forward_only=True)
        self.model.train()
        self.data = training
        return losses

    def weights(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def _shared(self, data: Iterator[Any] | None) -> tuple[Tensor, Tensor]:
        """What one rank of the stage reads."""
        if self.job.tp == 1:
            return next(data)
        empty = torch.empty(2, self.job.micro_batch_size, self.job.sequence, dtype=torch.long)
        both = empty if data is None else torch.stack(next(data))
        dist.broadcast(both, dist.get_global_rank(self.tensor_parallel, 0), group=self.tensor_parallel)
        return both[0], both[1]

    def _forward(self, data: Any, model: Any) -> tuple[Tensor, Callable]:
        tokens, labels = self._shared(data) if self.first or self.last else (None, None)
        job = self.job if tokens is None else dataclasses.replace(self.job, sequence=tokens.shape[1], micro_batch_size=tokens.shape[0])

        def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            total, number = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
            return total, number, {"loss": (total / number).item()}

        return model(*arguments(job, tokens), labels=labels), loss


def until_error(run: Callable[[], Any]) -> str | None:
    """What is said where it fails."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _collectives(job: Job) -> dict[str, Any]:
    trainer = Trainer(job)
    trainer.step()
    with Recorder() as recorder:
        for _ in range(3):
            trainer.step()
    return {"calls": recorder.calls, "stage": dist.get_process_group_ranks(parallel_state.get_data_parallel_group())}


def collectives() -> dict[str, Any]:
    return _collectives(SQUARE)


def collectives_sharded() -> dict[str, Any]:
    return _collectives(dataclasses.replace(SQUARE, distributed_optimizer=True))


def collectives_overlapped() -> dict[str, Any]:
    return _collectives(dataclasses.replace(SQUARE, overlap=True))


def _stops(job: Job, asked: int, before: int, cut: int | None = None) -> dict[str, Any]:
    """Rank `asked` is asked to stop before update `before`; the pipeline may be cut before another one."""
    trainer = Trainer(job)
    for update in range(before + 8):
        if update == before and dist.get_rank() == asked:
            trainer.pipeline.stop.wanted = True
        if update == cut:
            megatron_patches.drain()
        trainer.step()
        trainer.pipeline.listens = True
        if trainer.pipeline.stops:
            break
    return {"updates": trainer.pipeline.updates, "weights": trainer.weights()}


def stops_at_the_last_stage_of_a_replica() -> dict[str, Any]:
    return _stops(SQUARE, asked=3, before=2)


def stops_at_the_first_stage() -> dict[str, Any]:
    return _stops(LINE, asked=0, before=2)


def stops_at_the_last_stage() -> dict[str, Any]:
    return _stops(LINE, asked=3, before=2)


def stops_across_a_cut() -> dict[str, Any]:
    return _stops(LINE, asked=3, before=2, cut=5)


def grows() -> dict[str, Any]:
    """The number of microbatches changes in mid-run."""
    trainer = Trainer(LINE)
    return {
        "losses": [trainer.step(m) for m in (1, 1, 2, 2, 3)],
        "weights": trainer.weights(),
        "drawn": trainer.data and trainer.data.next_index,
    }


def grows_with_cuts() -> dict[str, Any]:
    """The same with a cut by hand, twice, before each change."""
    trainer = Trainer(LINE)
    losses = []
    for m, cut in ((1, False), (1, False), (2, True), (2, False), (3, True)):
        if cut:
            megatron_patches.drain()
            megatron_patches.drain()
        losses.append(trainer.step(m))
    return {"losses": losses, "weights": trainer.weights(), "drawn": trainer.data and trainer.data.next_index}


def _steps(job: Job, number: int = 4, **options: Any) -> dict[str, Any]:
    trainer = Trainer(job, **options)
    initial = trainer.weights()
    return {"losses": [trainer.step() for _ in range(number)], "weights": trainer.weights(), "initial": initial}


def plain() -> dict[str, Any]:
    return _steps(SQUARE)


def overlapped() -> dict[str, Any]:
    return _steps(dataclasses.replace(SQUARE, overlap=True), align=False)


def overlapped_and_aligned() -> dict[str, Any]:
    return _steps(dataclasses.replace(SQUARE, overlap=True), align=True)


def evaluates_at_odd_moments() -> dict[str, Any]:
    """Before the first step, after each, twice in a row, and after a cut."""
    trainer = Trainer(SQUARE)
    before, losses = [trainer.evaluate(), trainer.evaluate()], []
    for _ in range(4):
        losses.append(trainer.step())
        trainer.evaluate()
    weights = trainer.weights()
    evaluated = trainer.evaluate()
    megatron_patches.drain()
    return {"losses": losses, "weights": weights, "before": before, "after": [evaluated, trainer.evaluate()]}


def frozen_in_part() -> dict[str, Any]:
    return _steps(PAIR, freeze=lambda name: "layers.0" in name or "word_embeddings" in name)


def frozen_in_mid_run() -> dict[str, Any]:
    """Parameters that stop to learn after two steps: refused where that would meet forwards in flight, taken after a cut."""
    trainer = Trainer(PAIR)
    trainer.step(), trainer.step()
    for name, p in trainer.model.named_parameters():
        p.requires_grad_("layers.0" not in name)
    error = until_error(trainer.step) if trainer.first else None
    megatron_patches.drain()
    before = trainer.weights()
    return {"error": error, "losses": [trainer.step() for _ in range(3)], "before": before, "weights": trainer.weights()}


def recomputed_with_dropout() -> dict[str, Any]:
    return _steps(dataclasses.replace(PAIR, recompute=True), hidden_dropout=0.1, attention_dropout=0.1)


def changed_by_the_script() -> dict[str, Any]:
    """The script zeroes the output layer between two steps: the next losses are those of a model that knows nothing."""
    trainer = Trainer(PAIR)
    trainer.step(), trainer.step()
    if trainer.last:
        with torch.no_grad():
            trainer.model.module.output_layer.weight.zero_()
    return {"losses": trainer.step()}


class Shapes(Iterator[tuple[Tensor, Tensor]]):
    """Sequences get shorter and batches larger from one microbatch to the next."""

    def __init__(self, job: Job):
        self.job, self.index = job, 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        self.index += 1
        return microbatch(
            dataclasses.replace(self.job, sequence=18 - 2 * (self.index % 3), micro_batch_size=1 + self.index % 2), self.index, 0
        )


def other_shapes() -> dict[str, Any]:
    trainer = Trainer(PAIR)
    trainer.data = Shapes(PAIR)
    trainer.config.variable_seq_lengths = True
    return {"losses": [trainer.step() for _ in range(4)]}


def another_iterator() -> dict[str, Any]:
    """A new iterator is refused on the stage that has read ahead; behind drain and forget_data it is taken."""
    trainer = Trainer(PAIR)
    trainer.step()
    trainer.data = Microbatches(PAIR, 0, 500)
    error = until_error(trainer.step) if trainer.first else None
    megatron_patches.drain()
    megatron_patches.forget_data()
    trainer.step()
    return {"error": error, "drawn": trainer.data.next_index}


def data_that_end() -> dict[str, Any]:
    """As many microbatches as are trained, then none: what was to be read ahead is missing, which is known in the next step."""
    trainer = Trainer(PAIR)
    trainer.data = iter([microbatch(PAIR, m, 0) for m in range(6)])
    losses = [trainer.step() for _ in range(3)]
    return {"losses": losses, "error": until_error(trainer.step) if trainer.first else None}


def data_that_end_where_one_rank_reads() -> dict[str, Any]:
    """The same with two ranks in each stage, of which one reads: both know."""
    job = dataclasses.replace(PAIR, tp=2)
    trainer = Trainer(job)
    trainer.data = iter([microbatch(job, m, 0) for m in range(6)]) if trainer.reads else None
    losses = [trainer.step() for _ in range(3)]
    return {"losses": losses, "error": until_error(trainer.step) if trainer.first else None}


def refused_everywhere() -> dict[str, Any]:
    """Every rank says the same, and goes on."""
    late = dataclasses.replace(SQUARE, overlap=True, distributed_optimizer=True)
    return {
        "fp16": until_error(lambda: Trainer(SQUARE, fp16=True)),
        "late": until_error(lambda: Trainer(late)),
        "tokens": until_error(lambda: Trainer(SQUARE, calculate_per_token_loss=True)),
    }


def applied_again() -> dict[str, Any]:
    """A second configuration is refused while microbatches are in flight, and taken after a cut."""
    trainer = Trainer(PAIR)
    trainer.step()
    error = until_error(lambda: megatron_patches.apply(ASYNC))
    megatron_patches.drain()
    return {"error": error, "losses": _steps(PAIR)["losses"]}


PAIRS = (frozen_in_part, frozen_in_mid_run, recomputed_with_dropout, changed_by_the_script, other_shapes,
         another_iterator, applied_again, data_that_end)  # fmt: skip
SQUARES = (collectives, collectives_sharded, collectives_overlapped, stops_at_the_last_stage_of_a_replica, stops_at_the_first_stage,
           stops_at_the_last_stage, stops_across_a_cut, grows, grows_with_cuts, plain, overlapped, overlapped_and_aligned,
           evaluates_at_odd_moments, refused_everywhere, data_that_end_where_one_rank_reads)  # fmt: skip
