"""Train a decoder-only GPT as a DeepSpeed pipeline; the ds_config JSON alone selects the optimizer and the schedule.

Started by a launcher, for example:

    deepspeed --num_gpus 4 launch/pretrain_gpt.py --ds-config launch/ds_config/basis_rotation.json --name first
    torchrun --nproc_per_node 4 launch/pretrain_gpt.py --name first --updates 4000 --resume
"""

import contextlib
import importlib.metadata
import io
import os
import platform
import sys
import time
import traceback

from flags import Job, model_flags, read_job, refuse
from lr_schedule import WarmupCosine
from run_folder import TAG
from text_data import VOCABULARY, held_out_batches, training_batches

NEIGHBOUR_GONE = (" by peer", "Connection was likely closed")  # what Gloo and the rendezvous store say


def main() -> None:
    """Check the flags, train, and end the process.

    The process ends without unwinding: an engine that failed in the middle of a schedule cannot be unwound (its neighbours
    wait in receives, and the launcher ends them once this process is gone), and after a good end there is nothing left to do.
    """
    try:
        job = read_job()
    except ValueError as error:
        refuse(str(error))
    code = 1
    try:
        train(job)
        code = 0
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        if any(sign in str(error) for sign in NEIGHBOUR_GONE):  # it has said why, and the launcher is about to end this process too
            time.sleep(5)
        print(f"rank {os.environ.get('RANK')} failed\n{traceback.format_exc()}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def train(job: Job) -> None:
    """Train from the first update, or from the last checkpoint, to --updates; every process calls it."""
    import torch  # here and below, so that a mistake in the flags is reported at once
    from deepspeed import comm

    from ds_basisrot import StopOnSignal

    flags, folder, model = job.flags, job.folder, model_flags(job.flags)
    torch.set_num_threads(flags.threads)
    engine = build_engine(job)
    leads = engine.global_rank == 0
    replica, replicas = engine.mpu.get_data_parallel_rank(), engine.mpu.get_data_parallel_world_size()
    micro_batch, accumulated = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    parameters = parameter_count(engine, replicas)
    if leads:
        from progress import ProgressLine, print_table

        print(f"text: {job.text.total_bytes} bytes, sha256 {job.text.sha256}", flush=True)
        print(f"model: {parameters} parameters, {flags.layers} blocks in {flags.stages} stages, {replicas} replica(s)", flush=True)
        metrics = folder.start(model, job.updates_done)
        progress = ProgressLine(job.updates_done, flags.updates)

    stop_wanted = StopOnSignal(engine)
    batches = training_batches(job.text.train, flags.context, micro_batch, flags.seed, replica, job.updates_done * accumulated)
    training_s = 0.0
    for update in range(job.updates_done + 1, flags.updates + 1):
        lr = engine.get_lr()[0]
        started = time.perf_counter()
        loss = float(engine.train_batch(batches))
        update_s = time.perf_counter() - started
        training_s += update_s

        last, stopped = update == flags.updates, stop_wanted()
        held_out_loss = None
        if last or update % flags.eval_interval == 0:
            held_out = held_out_batches(job.text.held_out, flags.context, micro_batch, replica, replicas, flags.eval_batches)
            held_out_loss = float(engine.eval_batch(held_out, num_micro_batches=flags.eval_batches))
        if leads:
            tokens = engine.global_samples * flags.context
            metrics.write(update=update, loss=loss, held_out_loss=held_out_loss, lr=lr, updates_per_s=round(1 / update_s, 3), tokens=tokens)
            progress.show(update, loss, (update - job.updates_done) / training_s, held_out_loss)
        if last or stopped or update % flags.save_interval == 0:
            client_state = {"model": model, "data_sha256": job.text.sha256}
            engine.save_checkpoint(str(folder.checkpoints), tag=TAG.format(update), client_state=client_state)
        if stopped and not last:
            if leads:
                progress.close()
                how = f"--name {flags.name} --resume goes on from there"
                print(f"stopped by a signal after update {update}, which is saved; {how}", flush=True)
            comm.barrier()
            return

    if leads:
        progress.close()
        summary = describe(job, (flags.updates - job.updates_done) / training_s, parameters, replicas)
        title = f"{flags.name}: {summary['optimizer']}, {flags.stages} stages, {summary['schedule']}"
        print_table(folder.finish(summary, title))
    comm.barrier()


def build_engine(job: Job):
    """The DeepSpeed engine of this process's stage, at the first update or at the last checkpoint."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.config import DeepSpeedConfigError
    from gpt_model import pipeline

    from ds_basisrot.common.blocks import ConfigError

    flags, ds_config = job.flags, job.ds_config
    needs_plugin = str(ds_config["optimizer"].get("type")).lower() == "basisrotation" or "schedule" in ds_config.get("pipeline", {})
    if needs_plugin and "ds_basisrot.deepspeed_plugin" not in sys.modules:
        refuse(f"--ds-config {flags.ds_config} needs ds_basisrot, which is not active: pip install it, and unset DS_BASISROT_AUTOLOAD")
    if get_accelerator().device_name() == "cpu":
        # A faster all-reduce within one machine, which DeepSpeed would compile with a C++ compiler at every first start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    with contextlib.redirect_stdout(io.StringIO()):  # the list of layers that PipelineModule prints
        module = pipeline(vocabulary=VOCABULARY, **model_flags(flags))
    own_schedule = None if "scheduler" in ds_config else lambda optimizer: WarmupCosine(optimizer, flags.warmup, flags.updates)
    try:
        engine, *_ = deepspeed.initialize(
            model=module, model_parameters=list(module.parameters()), config=ds_config, lr_scheduler=own_schedule
        )
    except (AssertionError, AttributeError, DeepSpeedConfigError, TypeError, ValueError) as error:  # a wrong JSON, told by whoever noticed
        refuse(f"--ds-config {flags.ds_config}: {' '.join(str(error).split())}")
    if flags.resume:
        try:
            path, saved = engine.load_checkpoint(str(job.folder.checkpoints))
        except ConfigError as error:
            refuse(f"--resume: {error}")
        except (KeyError, RuntimeError, ValueError) as error:  # most likely the optimizer of another JSON
            reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
            refuse(f"--resume: {job.folder.path} does not load with {flags.ds_config}; give the --ds-config it began with ({reason})")
        if engine.global_steps != job.updates_done:  # as a universal checkpoint that was converted from an older one
            refuse(f"--resume: {path} is of update {engine.global_steps}, the run's latest checkpoint of {job.updates_done}")
        if engine.global_rank == 0 and saved["data_sha256"] != job.text.sha256:
            print("warning: this is not the text that the run was trained on so far", flush=True)
        if isinstance(engine.lr_scheduler, WarmupCosine):
            engine.lr_scheduler.apply()  # the optimizer, loaded after it under ZeRO, brought its old learning rate along
    return engine


def schedule_name(ds_config: dict) -> str:
    """The JSON's pipeline.schedule, or "1f1b" with flushes, which is what DeepSpeed itself does."""
    return ds_config.get("pipeline", {}).get("schedule", "1f1b")


def parameter_count(engine, replicas: int) -> int:
    """Parameters of the whole model: the sum over the stages of one replica."""
    import torch
    from deepspeed import comm

    count = torch.tensor(sum(p.numel() for p in engine.module.parameters()), device=engine.device)
    comm.all_reduce(count)
    return int(count) // replicas


def describe(job: Job, updates_per_s: float, parameters: int, replicas: int) -> dict:
    """What summary.json says besides the losses. Rates are of this start only, evaluation and checkpoints left out."""
    flags, stages = job.flags, job.flags.stages
    schedule = schedule_name(job.ds_config)
    files = ["Python standard library"] if flags.data is None else [str(file) for file in flags.data]
    return {
        "name": flags.name,
        "optimizer": job.ds_config["optimizer"]["type"],
        "schedule": schedule,
        "updates_per_s": updates_per_s,
        "stages": stages,
        "replicas": replicas,
        "staleness_microbatches": [stages - 1 - stage if schedule == "async_1f1b" else 0 for stage in range(stages)],
        "model": {**model_flags(flags), "parameters": parameters},
        "data": {"files": files, "bytes": job.text.total_bytes, "sha256": job.text.sha256},
        "picture": str(job.folder.picture),
        "ds_config": job.ds_config,
        "versions": {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}},
    }


if __name__ == "__main__":
    main()
