"""Which layers of a PipelineModule share weights across stages."""

from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec


def tied_stages(module: PipelineModule) -> dict[str, list[int]]:
    """Key of each tied layer that lies on several stages, and these stages."""
    found: dict[str, set[int]] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            found.setdefault(spec.key, set()).add(module.stage_owner(index))
    return {key: sorted(stages) for key, stages in sorted(found.items()) if len(stages) > 1}


def tied_names(module: PipelineModule) -> list[str]:
    """Names of this stage's parameters that are tied to another stage's."""
    return [f"tied_modules.{key}.{attribute}" for key, comm in sorted(module.tied_comms.items()) for attribute in comm["weight_attr"]]
