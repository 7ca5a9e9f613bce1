"""A user's list of pipeline layers, as DeepSpeed's PipelineModule takes it, built as one model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Layer:
    """One layer of a pipeline.

    Attributes:
        type_name: by which DeepSpeed's partitioning finds layers; None for a function without a name.
        module: None for a function.
    """

    type_name: str | None
    module: nn.Module | None

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained."""
        return [] if self.module is None else [p for p in self.module.parameters() if p.requires_grad]


class LayerList(nn.Module):
    """The layers as one module, with parameters named as in a PipelineModule that holds them all.

    Args:
        layers: modules, functions, and DeepSpeed's LayerSpec or TiedLayerSpec, which are built here.

    Raises:
        ValueError: an item that is nothing of these.
    """

    def __init__(self, layers: Iterable[Any]):
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.layers = tuple(self._built(index, layer) for index, layer in enumerate(layers))

    def _built(self, index: int, layer: Any) -> Layer:
        if isinstance(layer, nn.Module):
            self.add_module(str(index), layer)
            return Layer(type(layer).__name__, layer)
        if callable(getattr(layer, "build", None)):  # a LayerSpec, told without importing DeepSpeed
            key = getattr(layer, "key", None)
            if key is None:
                self.add_module(str(index), layer.build())
                return Layer(layer.typename.__name__, self.get_submodule(str(index)))
            if key not in self.tied_modules:
                self.tied_modules[key] = layer.build()
            return Layer(layer.typename.__name__, self.tied_modules[key])
        if callable(layer):
            return Layer(getattr(layer, "__name__", None), None)
        raise ValueError(f"layer {index} is no module, LayerSpec or function, but of type {type(layer).__name__}")


def layers_of(model: nn.Module) -> tuple[Layer, ...] | None:
    """The layers of a `LayerList`, or of an nn.Sequential as PipelineModule takes it; None for a model of another kind."""
    if isinstance(model, LayerList):
        return model.layers
    return LayerList(model).layers if isinstance(model, nn.Sequential) else None
