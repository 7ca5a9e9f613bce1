"""The JSON blocks: what is accepted, and the one line that refuses the rest."""

import pytest

from ds_basisrot.common.blocks import ConfigError, optimizer_params
from ds_basisrot.deepspeed_plugin.config import pipeline_options, validate, without_auto
from ds_basisrot.optim.refresh import ALLOCATIONS

OPTIMIZER = {"type": "BasisRotation", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "refresh_period": 10}}


def config(**changes):
    return {"optimizer": OPTIMIZER, "pipeline": {"schedule": "async_1f1b"}, **changes}


def asynchronous(**options):
    return {"pipeline": {"schedule": "async_1f1b", **options}}


def optimizer(**params):
    return {"type": "BasisRotation", "params": {**OPTIMIZER["params"], **params}}


def test_a_config_that_does_not_use_us_is_left_alone():
    validate({"optimizer": {"type": "AdamW", "params": {"nonsense": 1}}, "zero_optimization": {"stage": "2"}, "pipeline": {"stages": 2}})


@pytest.mark.parametrize("params", [{"refresh_allocation": a} for a in ALLOCATIONS] + [{"diagnostics_period": n} for n in (0, 10)])
def test_every_allocation_and_the_plugin_s_own_key_are_accepted(params):
    validate(config(optimizer=optimizer(**params)))


@pytest.mark.parametrize("name", ["BasisRotation", "basisrotation", "BASISROTATION"])
def test_any_letter_case_is_ours(name):
    assert validate(config(optimizer={**OPTIMIZER, "type": name}))[0] == "optimizer: BasisRotation"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}])
def test_the_optimizer_goes_with_every_zero_stage_and_precision(stage, precision):
    validate({"optimizer": OPTIMIZER, "zero_optimization": {"stage": stage}, **precision})


def test_float16_goes_with_every_zero_stage_but_none():
    for stage in (1, 2, 3):
        validate({"optimizer": OPTIMIZER, "zero_optimization": {"stage": stage}, "fp16": {"enabled": True}})
    with pytest.raises(ConfigError, match="fp16.enabled: without ZeRO, DeepSpeed 0.19 divides .* set zero_optimization.stage to 1"):
        validate({"optimizer": OPTIMIZER, "fp16": {"enabled": True}})
    validate({"optimizer": OPTIMIZER, "fp16": {"enabled": "auto"}})


def test_what_deepspeed_refuses_in_a_traceback_is_refused_in_a_line():
    for old_or_new in ("bf16", "bfloat16"):
        with pytest.raises(ConfigError, match=f"{old_or_new}.enabled, fp16.enabled: DeepSpeed trains in one"):
            validate({"optimizer": OPTIMIZER, old_or_new: {"enabled": True}, "fp16": {"enabled": True}})
    with pytest.raises(ConfigError, match="zero_optimization: must be an object .* remove the key"):
        validate({"optimizer": OPTIMIZER, "zero_optimization": None})
    for stage in (4, "4", True, "one", None):
        with pytest.raises(ConfigError, match="zero_optimization.stage: must be 0, 1, 2 or 3"):
            validate({"optimizer": OPTIMIZER, "zero_optimization": {"stage": stage}})


def test_words_are_read_as_deepspeed_reads_them():
    validate({"optimizer": OPTIMIZER, "zero_optimization": {"stage": "1"}, "bf16": {"enabled": "false"}, "fp16": {"enabled": "true"}})
    validate({"optimizer": OPTIMIZER, "bf16": {"enabled": False}, "bfloat16": {"enabled": True}, "fp16": {"enabled": False}})


@pytest.mark.parametrize("dtype", ["float16", "torch.float16", "fp16", "half"])
def test_autocast_to_float16_goes_without_zero_only(dtype):
    autocast = {"enabled": True, "dtype": dtype}
    validate({"optimizer": OPTIMIZER, "torch_autocast": autocast})
    with pytest.raises(ConfigError, match="torch_autocast.dtype: under ZeRO each rank decides alone .* use bfloat16"):
        validate({"optimizer": OPTIMIZER, "torch_autocast": autocast, "zero_optimization": {"stage": 1}})
    with pytest.raises(ConfigError, match="torch_autocast.dtype: async_1f1b cannot share a loss scale"):
        validate({"torch_autocast": autocast, "pipeline": {"schedule": "async_1f1b"}})


@pytest.mark.parametrize("block", ["bf16", "bfloat16", "fp16"])
def test_master_weights_of_less_precision_are_refused(block):
    key = f"{block[:2]}16_master_weights_and_grads"
    with pytest.raises(ConfigError, match=f"{block}.{key}: BasisRotation keeps master weights in float32; remove it"):
        validate({"optimizer": OPTIMIZER, "zero_optimization": {"stage": 1}, block: {"enabled": True, key: True}})


def test_it_says_what_will_be_active():
    assert validate(config()) == [
        "optimizer: BasisRotation",
        "pipeline schedule: async_1f1b, weight stashing, clip_scope lagged_global",
    ]
    assert validate({"optimizer": {"type": "AdamW"}})[1] == "pipeline schedule: 1f1b (DeepSpeed's own)"


def test_deepspeed_s_own_pipeline_keys_and_strangers_are_left_alone():
    assert not pipeline_options({"activation_checkpoint_interval": 1, "partition": "best", "my_own_key": 3}).asynchronous


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"optimizer": optimizer(refresh_periods=5)}, "optimizer.params: unknown key 'refresh_periods'; did you mean 'refresh_period'?"),
        ({"optimizer": optimizer(freq=5)}, "optimizer.params: unknown key 'freq'; valid: lr, betas, eps"),
        ({"optimizer": optimizer(refresh_period=0)}, "optimizer.params.refresh_period: must be an integer >= 1 (updates), got 0"),
        ({"optimizer": optimizer(refresh_period=-3)}, "optimizer.params.refresh_period: must be an integer >= 1 (updates), got -3"),
        (
            {"optimizer": optimizer(refresh_allocation="stage")},
            "optimizer.params.refresh_allocation: must be one of uniform, stage_aware, inverse",
        ),
        ({"optimizer": optimizer(staleness=3)}, "optimizer.params.staleness: not set in the JSON; remove it, the pipeline engine knows"),
        ({"optimizer": optimizer(stalenes=3)}, "optimizer.params: unknown key 'stalenes'; valid: lr"),
        (
            {"optimizer": optimizer(diagnostics_period=-1)},
            "optimizer.params.diagnostics_period: must be an integer >= 0 (updates; 0: none), got -1",
        ),
        ({"optimizer": optimizer(diagnostics_period=True)}, "optimizer.params.diagnostics_period: must be an integer >= 0"),
        ({"optimizer": optimizer(diagnostics_perid=5)}, "unknown key 'diagnostics_perid'; did you mean 'diagnostics_period'?"),
        ({"optimizer": optimizer(lr="auto")}, 'optimizer.params.lr: "auto" is for Hugging Face\'s Trainer or accelerate to fill in'),
        ({"optimizer": optimizer(geometry="bilatral")}, "did you mean 'bilateral'?"),
        ({"optimizer": optimizer(rotate=["x"])}, "optimizer.params.rotate: must be"),
        ({"optimizer": {"type": "BasisRotaton"}}, "optimizer.type: unknown 'BasisRotaton'; did you mean 'BasisRotation'?"),
        ({"pipeline": {"schedule": "async"}}, "pipeline.schedule: must be '1f1b' or 'async_1f1b', got 'async'; did you mean"),
        ({"pipeline": {"schedule": "zb_h1"}}, "pipeline.schedule: must be '1f1b' or 'async_1f1b', got 'zb_h1'"),
        (
            {"pipeline": {"schedule": "async_1f1b", "weight_stash": True}},
            "pipeline: unknown key 'weight_stash'; did you mean 'weight_stashing'?",
        ),
        ({"pipeline": {"shedule": "async_1f1b"}}, "pipeline: unknown key 'shedule'; did you mean 'schedule'?"),
        ({"pipeline": {"schedule": "async_1f1b", "weight_stashing": "yes"}}, "pipeline.weight_stashing: must be true or false, got 'yes'"),
        (
            {"pipeline": {"schedule": "async_1f1b", "clip_scope": "global"}},
            "pipeline.clip_scope: must be 'lagged_global' or 'stage', got 'global'",
        ),
        (asynchronous(lr_correction_updates=1.5), "pipeline.lr_correction_updates: must be an integer >= 0 (updates; 0: off), got 1.5"),
        (asynchronous(lr_correction_updates=-1), "pipeline.lr_correction_updates: must be an integer >= 0"),
        (asynchronous(delay_compensation="0.04"), "pipeline.delay_compensation: must be a number >= 0 (0: off), got '0.04'"),
        (asynchronous(trace=True), "pipeline.trace: must be the name of a folder, got True"),
        (asynchronous(delay_compensation=0.04, weight_stashing=False), "pipeline.delay_compensation: needs weight_stashing true"),
        (asynchronous(weight_prediction=True, weight_stashing=False), "pipeline.weight_prediction: needs weight_stashing true"),
        ({**asynchronous(weight_prediction=True), "zero_optimization": {"stage": 1}}, "pipeline.weight_prediction: needs whole float32"),
        ({**asynchronous(weight_prediction=True), "bf16": {"enabled": True}}, "pipeline.weight_prediction: needs whole float32"),
        ({**asynchronous(weight_prediction=True), "optimizer": {"type": "NAdam"}}, "needs Adam, AdamW or BasisRotation, got 'nadam'"),
        ({**asynchronous(), "wall_clock_breakdown": True}, "wall_clock_breakdown: DeepSpeed 0.19's pipelines fail with it"),
        (
            {"pipeline": {"schedule": "1f1b", "weight_prediction": True}},
            'pipeline.weight_prediction: has no effect with "schedule": "1f1b"; choose "async_1f1b", or remove the key',
        ),
        ({"pipeline": {"weight_prediction": True}}, 'pipeline.weight_prediction: has no effect without "schedule": "async_1f1b"'),
        ({"optimizer": "BasisRotation"}, "optimizer: must be an object {...}, got 'BasisRotation'"),
        ({"optimizer": {"type": "BasisRotation", "params": [1]}}, "optimizer.params: must be an object {...}, got [1]"),
        (
            {"optimizer": optimizer(max_grad_norm=1.0)},
            "optimizer.params.max_grad_norm: not a parameter of BasisRotation; set the top-level",
        ),
        ({"optimizer": optimizer(torch_adam=True)}, "optimizer.params.torch_adam: not a parameter of BasisRotation; remove it"),
        ({"optimizer": {"type": "BasisRotation", "param": {"lr": 1}}}, "optimizer: unknown key 'param'; did you mean 'params'?"),
        (
            {"pipline": {"schedule": "async_1f1b"}},
            'pipline.schedule: nothing reads "async_1f1b" there; it belongs into the block "pipeline"',
        ),
        ({"optimizer": {"type": "SGD", "schedule": "async_1f1b"}}, "optimizer.schedule: nothing reads"),
        ({"pipeline": None}, "pipeline: must be an object {...}, got None; remove the key"),
        ({"schedule": "async_1f1b"}, "schedule: nothing reads"),
        (
            {"optimiser": {"type": "basisrotation"}},
            'optimiser.type: nothing reads "BasisRotation" there; it belongs into the block "optimizer"',
        ),
        ({"gradient_clipping": "1.0"}, "gradient_clipping: must be a number >= 0, got '1.0'"),
        (
            {"optimizer": {"type": "SGD"}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
            "torch_autocast.dtype: async_1f1b cannot",
        ),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "pipeline": {"schedule": "async_1f1b", "weight_stashing": False}},
            "pipeline.weight_stashing: false does not go with torch_autocast",
        ),
        ({"fp16": {"enabled": True}}, "fp16.enabled: async_1f1b cannot share a loss scale"),
        ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage: must be 0, 1, 2 or 3, got 'two'"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage: DeepSpeed's pipelines run with stages 0 and 1, got 2"),
        ({"optimizer": {"type": "AdamW"}, "fp16": {"enabled": True}}, "fp16.enabled: async_1f1b cannot share a loss scale"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer: Basis",
        ),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
            "zero_optimization.offload_optimizer: Basis",
        ),
        ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "zero_optimization.offload_param: not supported"),
        ({"zero_optimization": {"stage": 1, "elastic_checkpoint": True}}, "zero_optimization.elastic_checkpoint: DeepSpeed saves only"),
        ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, "zero_optimization.cpu_offload: BasisRotation multiplies"),
    ],
)
def test_a_fault_is_named_in_one_line(changes, message):
    with pytest.raises(ConfigError) as error:
        validate(config(**changes))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_a_client_fills_in_is_told_apart():
    whole = {"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "optimizer": optimizer(lr="auto"), "zero_optimization": {"stage": 2}}
    kept, left = without_auto(whole)
    assert left == ["train_batch_size", "bf16.enabled", "optimizer.params.lr"]
    assert validate(kept)[0] == "optimizer: BasisRotation"
    assert kept["zero_optimization"] == {"stage": 2} and "lr" not in kept["optimizer"]["params"]


def test_the_second_name_of_auto_means_the_same():
    assert (
        optimizer_params(optimizer(geometry="automatic"))["geometry"] == optimizer_params(optimizer(geometry="auto"))["geometry"] == "auto"
    )
    validate(config(optimizer=optimizer(geometry="automatic")))


def test_an_auto_of_ours_that_a_client_would_refuse_is_refused():
    assert without_auto({"optimizer": optimizer(geometry="auto")})[1] == []
    with pytest.raises(ConfigError, match="optimizer.params.geometry: .* write 'automatic'"):
        without_auto({"train_batch_size": "auto", "optimizer": optimizer(geometry="auto")})
