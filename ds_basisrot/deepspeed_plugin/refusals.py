"""What the asynchronous schedule refuses of a model, before the engine is built."""

from typing import Any

from deepspeed.runtime.pipe.module import PipelineModule

from ..common.blocks import ConfigError
from . import private_names
from .config import pipeline_options
from .tied_layers import tied_stages


def check_before_build(engine_class: type, arguments: dict[str, Any]) -> None:
    """Check the arguments that PipelineEngine is built with, by name.

    Raises:
        ConfigError: naming the key or flag and what to do instead.
    """
    module, config = arguments["model"], arguments["config_class"]
    if engine_class.__name__ == "DualPipeVEngine":
        raise ConfigError("pipeline.schedule: async_1f1b does not go with DualPipeV; use PipelineModule, or remove the key")
    private_names.check(module, private_names.PIPELINE_MODULE, "PipelineModule")
    _check_layers(module)
    options = pipeline_options(config._param_dict.get("pipeline"))
    if options.lr_correction_updates and tied_stages(module):
        raise ConfigError("pipeline.lr_correction_updates: tied weights would get two learning rates; untie them or remove the key")
    if module._grid.get_slice_parallel_world_size() > 1:
        raise ConfigError("pipeline.schedule: async_1f1b does not go with tensor slicing in the topology yet; use pipe and data axes only")
    if module.get_additional_losses() is not None:
        raise ConfigError("pipeline.schedule: async_1f1b does not carry get_additional_losses() yet; return None from it")
    check_experts(module, "pipeline.schedule: async_1f1b")
    if arguments.get("optimizer") is None and not config.optimizer_name:
        raise ConfigError("optimizer: async_1f1b trains, so it needs an optimizer; add an optimizer block to the JSON")


def check_experts(module: Any, what: str, otherwise: str = "") -> None:
    """Refuse experts that are spread over ranks: norms and skipped updates would have to be agreed on between the replicas.

    Args:
        what: does not go with them.
        otherwise: what else to do.

    Raises:
        ConfigError: naming the layer.
    """
    for name, layer in module.named_modules():
        ranks = getattr(layer, "ep_size", 1)
        if isinstance(ranks, int) and ranks > 1:
            raise ConfigError(
                f"{what} does not go with expert parallelism yet; build {name} ({type(layer).__name__}) with ep_size=1{otherwise}"
            )


def _check_layers(module: PipelineModule) -> None:
    counts = [stop - start for start, stop in zip(module.parts, module.parts[1:])]
    if 0 in counts:
        raise ConfigError(
            f"num_stages: stage {counts.index(0)} of {len(counts)} would hold no layer ({sum(counts)} layers in all); use fewer stages"
        )
    for key, stages in tied_stages(module).items():
        if len(stages) > 2:
            raise ConfigError(
                f"pipeline.schedule: async_1f1b ties weights between two stages, as of embedding and output head; {key!r} lies on "
                f"{len(stages)} ({', '.join(map(str, stages))}); use fewer copies or other stages"
            )
