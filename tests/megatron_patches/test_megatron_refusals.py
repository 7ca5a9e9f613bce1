"""What the asynchronous schedule cannot train is refused with one line that names the flag and the way out, and on every rank."""

import sys
import types

import pytest
import torch

from ds_basisrot.common.blocks import ConfigError
from megatron_patches import names, refusals, training

names.check()


class Chunk(torch.nn.Module):
    """Has of a model chunk what is asked of one; nothing in it is refused."""

    def __init__(self, **config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = types.SimpleNamespace(cuda_graph_impl="none", **config)
        self.ddp_config = types.SimpleNamespace(num_distributed_optimizer_instances=1, grad_reduce_in_fp32=True)
        self.share_embeddings_and_output_weights = False

    def shared_embedding_or_output_weight(self):
        return self.weight


def optimizer_config(**changes):
    off = {"fp16": False, "bf16": True, "loss_scale": None, "overlap_param_gather_with_optimizer_step": False}
    return types.SimpleNamespace(**{**off, **changes})


def script_arguments(**changes):
    off = {name: None for name, _, _ in refusals.SCRIPT_OPTIONS}
    return types.SimpleNamespace(**{**off, "rerun_mode": "disabled", "ckpt_format": "torch_dist", "save": "checkpoints", **changes})


def refused(check, *given):
    """The line that refuses it."""
    with pytest.raises(ConfigError) as error:
        check(*given)
    line = str(error.value)
    assert len(line.splitlines()) == 1 and "async_1f1b" in line
    return line


def test_nothing_is_refused_of_a_plain_job():
    refusals.check_schedule(optimizer_config(), [Chunk()])
    refusals.check_arguments(script_arguments())
    refusals.check_arguments(None)
    refusals.check_call({"seq_length": 8, "micro_batch_size": 1, "collect_non_loss_data": False, "pg_collection": None})


@pytest.mark.parametrize(("name", "flag", "why"), refusals.MODEL_OPTIONS)
def test_options_of_the_model(name, flag, why):
    line = refused(refusals.check_schedule, optimizer_config(), [Chunk(**{name: 1})])
    assert line.startswith(f"{flag}: ") and why in line and line.endswith("remove the flag")


@pytest.mark.parametrize(("name", "flag", "why"), refusals.DDP_OPTIONS)
def test_options_of_the_wrapper(name, flag, why):
    chunk = Chunk()
    setattr(chunk.ddp_config, name, True)
    line = refused(refusals.check_schedule, optimizer_config(), [chunk])
    assert line.startswith(f"{flag}: ") and why in line and line.endswith("remove the flag")


@pytest.mark.parametrize(("name", "flag", "why"), refusals.SCRIPT_OPTIONS)
def test_options_of_the_script(name, flag, why):
    line = refused(refusals.check_arguments, script_arguments(**{name: [5]}))
    assert line.startswith(f"{flag}: ") and why in line and line.endswith("remove the flag")


@pytest.mark.parametrize(("name", "why"), refusals.CALL_OPTIONS)
def test_arguments_of_a_call(name, why):
    line = refused(refusals.check_call, {name: print})
    assert line.startswith(f"{name}: ") and why in line and line.endswith("leave it out")


def test_process_groups_of_its_own(monkeypatch):
    known = object()
    monkeypatch.setattr("megatron.core.parallel_state.get_pipeline_model_parallel_group", lambda: known)
    refusals.check_call({"pg_collection": types.SimpleNamespace(pp=known)})
    assert refused(refusals.check_call, {"pg_collection": types.SimpleNamespace(pp=object())}).startswith("pg_collection: ")


OPTIMIZERS = [
    ({"fp16": True}, "--fp16", "--bf16"),
    ({"loss_scale": 128.0}, "--loss-scale", "remove the flag"),
    ({"overlap_param_gather_with_optimizer_step": True}, "--overlap-param-gather-with-optimizer-step", "remove the flag"),
]


@pytest.mark.parametrize(("changes", "flag", "way_out"), OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else "")
def test_options_of_the_optimizer(changes, flag, way_out):
    line = refused(refusals.check_schedule, optimizer_config(**changes), [Chunk()])
    assert line.startswith(f"{flag}: ") and way_out in line


def test_virtual_stages(monkeypatch):
    flag = "--num-layers-per-virtual-pipeline-stage"
    assert refused(refusals.check_schedule, optimizer_config(), [Chunk(), Chunk()]).startswith(f"{flag}: ")
    monkeypatch.setattr("megatron.core.parallel_state.get_virtual_pipeline_model_parallel_world_size", lambda: 1)
    assert refused(refusals.check_schedule, optimizer_config(), [Chunk()]).startswith(f"{flag}: ")


def test_graphs_that_hold_addresses():
    chunk = Chunk()
    chunk.config.cuda_graph_impl = "local"
    assert refused(refusals.check_schedule, optimizer_config(), [chunk]).startswith("--cuda-graph-impl: ")


def test_several_instances_of_a_distributed_optimizer():
    chunk = Chunk()
    chunk.ddp_config.num_distributed_optimizer_instances = 2
    assert refused(refusals.check_schedule, optimizer_config(), [chunk]).startswith("--num-distributed-optimizer-instances: ")


def test_a_stage_without_trainable_parameters():
    chunk = Chunk().requires_grad_(False)
    assert "no trainable parameter" in refused(refusals.check_schedule, optimizer_config(), [chunk])


def test_tied_embeddings_that_cannot_be_summed():
    chunk = Chunk()
    chunk.share_embeddings_and_output_weights = True
    refusals.check_schedule(optimizer_config(), [chunk])
    chunk.ddp_config.grad_reduce_in_fp32 = False
    refusals.check_schedule(optimizer_config(bf16=False), [chunk])
    assert refused(refusals.check_schedule, optimizer_config(), [chunk]).startswith("--grad-reduce-in-bf16: ")
    chunk.other = torch.nn.Parameter(torch.zeros(1))
    chunk.weight.requires_grad_(False)
    assert "--untie-embeddings-and-output-weights" in refused(refusals.check_schedule, optimizer_config(bf16=False), [chunk])


def test_another_recovery_and_another_checkpoint_format():
    line = refused(refusals.check_arguments, script_arguments(rerun_mode="validate_results"))
    assert line.startswith("--rerun-mode: ") and "pass --rerun-mode disabled" in line
    line = refused(refusals.check_arguments, script_arguments(ckpt_format="fsdp_dtensor"))
    assert line.startswith("--ckpt-format: ") and line.endswith("use torch_dist")
    refusals.check_arguments(script_arguments(ckpt_format="torch", save=None))
    line = refused(refusals.check_arguments, script_arguments(non_persistent_ckpt_type="local"))
    assert line.startswith("--non-persistent-ckpt-type: ") and line.endswith("use global")


def test_a_training_package_that_was_not_patched(monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron.training.training", raising=False)
    job = types.SimpleNamespace(found_training=False)
    training.check_patched(job)
    monkeypatch.setitem(sys.modules, "megatron.training.training", types.ModuleType("megatron.training.training"))
    with pytest.raises(ConfigError, match="put its folder on sys.path before"):
        training.check_patched(job)
    job.found_training = True
    training.check_patched(job)
