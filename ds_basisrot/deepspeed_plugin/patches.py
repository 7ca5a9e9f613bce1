"""What we change in DeepSpeed, in place, after its engine modules were imported: wrappers that do nothing unless the JSON asks."""

import functools
import inspect
from types import ModuleType
from typing import Any

from .. import _activation
from ..common.blocks import OPTIMIZER_TYPE, ConfigError, check_optimizer_type, is_basis_rotation
from . import private_names
from .config import SHARDED_OPTIMIZER, check_client_optimizer, pipeline_options, validate


def patch_engine(module: ModuleType) -> None:
    """Register the optimizer type in `deepspeed.runtime.engine`."""
    cls = module.DeepSpeedEngine
    private_names.check(cls, private_names.ENGINE, "DeepSpeedEngine")

    @_wraps(cls, "_is_supported_optimizer")
    def _is_supported_optimizer(original, engine, name):
        if is_basis_rotation(name):
            return True
        supported = original(engine, name)
        if not supported:
            check_optimizer_type(name)
        return supported

    @_wraps(cls, "_do_sanity_check")
    def _do_sanity_check(original, engine):
        validate(engine._config._param_dict)
        _check_pipeline_engine_was_patched(engine)
        if type(engine.client_optimizer).__name__ == OPTIMIZER_TYPE:
            check_client_optimizer(engine._config._param_dict)
        return original(engine)

    @_wraps(cls, "_configure_basic_optimizer")
    def _configure_basic_optimizer(original, engine, model_parameters):
        if not is_basis_rotation(engine.optimizer_name()):
            return original(engine, model_parameters)
        from .optimizer import build

        return build(engine, model_parameters, engine.optimizer_params() or {})

    @_wraps(cls, "_do_optimizer_sanity_check")
    def _do_optimizer_sanity_check(original, engine, basic_optimizer):
        if type(basic_optimizer).__name__ == SHARDED_OPTIMIZER:
            from .zero import allow

            allow(type(basic_optimizer))
        return original(engine, basic_optimizer)

    for name in ("_configure_zero_optimizer", "_configure_bf16_optimizer"):

        @_wraps(cls, name)
        def _configure(original, engine, optimizer, *args, **kwargs):
            wrapper = original(engine, optimizer, *args, **kwargs)
            if type(optimizer).__name__ == SHARDED_OPTIMIZER:
                from .zero import bind

                bind(optimizer, wrapper, engine)
            return wrapper

    @_wraps(cls, "save_checkpoint")
    def save_checkpoint(original, engine, *args, **kwargs):
        if not _is_ours(engine):
            return original(engine, *args, **kwargs)
        from .whole_checkpoints import save

        return save(engine, original, *args, **kwargs)

    @_wraps(cls, "load_checkpoint")
    def load_checkpoint(original, engine, *args, **kwargs):
        if not _is_ours(engine):
            return original(engine, *args, **kwargs)
        from .whole_checkpoints import load

        return load(engine, original, *args, **kwargs)


def _is_ours(engine: Any) -> bool:
    """Whether a job uses the optimizer or the asynchronous schedule: what is checkpointed of others stays DeepSpeed's business."""
    optimizer = type(getattr(engine, "basic_optimizer", None)).__name__
    return optimizer in (OPTIMIZER_TYPE, SHARDED_OPTIMIZER) or hasattr(engine, "async_pipeline")


def patch_pipeline_engine(module: ModuleType) -> None:
    """Give `deepspeed.runtime.pipe.engine.PipelineEngine` the asynchronous schedule where its JSON selects it."""
    cls = module.PipelineEngine

    @_wraps(cls, "__init__")
    def __init__(original, engine, *args, **kwargs):
        arguments = _engine_arguments(module.DeepSpeedEngine, args, kwargs)
        config = getattr(arguments.get("config_class"), "_param_dict", {})
        options = pipeline_options(config.get("pipeline"))
        if options.asynchronous:
            validate(config)
            private_names.check(cls, private_names.PIPELINE_ENGINE, "PipelineEngine")
            from .refusals import check_before_build

            check_before_build(type(engine), arguments)
        original(engine, *args, **kwargs)
        if options.asynchronous:
            from .async_pipeline import AsyncPipeline

            engine.async_pipeline = AsyncPipeline(engine, options)


def _check_pipeline_engine_was_patched(engine: Any) -> None:
    """Refuse the asynchronous schedule where the hook that would provide it failed: DeepSpeed would train synchronously without a word."""
    failure = _activation.failures.get("deepspeed.runtime.pipe.engine")
    if failure is not None and pipeline_options(engine._config._param_dict.get("pipeline")).asynchronous:
        raise ConfigError(f"pipeline.schedule: async_1f1b is not available, DeepSpeed's pipeline engine could not be patched ({failure})")


def _wraps(cls: type, name: str) -> Any:
    """Replace method `name` of `cls` by the decorated function, which gets the original first."""

    def decorate(function: Any) -> Any:
        original = getattr(cls, name)

        @functools.wraps(original)
        def method(engine, *args, **kwargs):
            return function(original, engine, *args, **kwargs)

        setattr(cls, name, method)
        return function

    return decorate


def _engine_arguments(engine_class: type, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of DeepSpeedEngine by name, out of those of PipelineEngine(has_bool_tensors, *args, **kwargs)."""
    rest = {name: value for name, value in kwargs.items() if name != "has_bool_tensors"}
    return inspect.signature(engine_class.__init__).bind_partial(None, *args[1:], **rest).arguments
