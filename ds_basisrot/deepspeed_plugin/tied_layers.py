"""Which layers of a PipelineModule share weights across stages."""

from typing import Any

from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec


def tied_stages(module: PipelineModule) -> dict[str, list[int]]:
    """Key of each tied layer that lies on several stages, and these stages."""
    found: dict[str, set[int]] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            found.setdefault(spec.key, set()).add(module.stage_owner(index))
    return {key: sorted(stages) for key, stages in sorted(found.items()) if len(stages) > 1}


def tied_keys(module: Any) -> list[str]:
    """Keys of all tied layers of a model, the same on all stages; none where it is no pipeline."""
    specs = module._layer_specs if isinstance(module, PipelineModule) else ()
    return sorted({spec.key for spec in specs if isinstance(spec, TiedLayerSpec)})


def tied_names(module: PipelineModule) -> list[str]:
    """Names of this stage's parameters that are tied to another stage's."""
    return [f"tied_modules.{key}.{attribute}" for key, comm in sorted(module.tied_comms.items()) for attribute in comm["weight_attr"]]
