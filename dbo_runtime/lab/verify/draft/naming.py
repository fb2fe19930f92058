"""Find expressions for arguments in a forward: the tensors, and the objects that the model holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dbo_runtime.lab.verify.draft.calls import Literal, Path, Ref, TokenCount, Unknown

SMALL = 16  # smaller whole numbers are dimensions and the like, equal for all sizes of a model
NUMBERING = ("layer_id", "layer_index", "layer_name", "layer_num", "idx", "index", "prefix")
"""Prefixes of attributes that number a layer. They would tell any two layers apart."""
PLAIN = (bool, str, type(None), type(...))


class ArgumentNames:
    """Translates arguments into plain data.

    Args:
        model: the recorded model.
        decoder: the part of the model that has the layers.
        layers: the decoder's layers.
        tokens: number of tokens in the recorded step; it equals no size of the model.
    """

    def __init__(
        self, model: torch.nn.Module, decoder: torch.nn.Module, layers: Sequence[torch.nn.Module], tokens: int
    ) -> None:
        self._tokens = tokens
        self._model = model
        self._decoder = decoder
        self._layers = layers
        self._inside = [_list_parts("layer", layer) for layer in layers]
        self._outside = _list_parts("model", model) | _list_parts("decoder", decoder)

    def locate(self, part: Any, layer: int | None) -> Path:
        """Return the path to a module, parameter or buffer; from the layer if it is inside the layer."""
        inside = self._inside[layer] if layer is not None else {}
        return inside.get(id(part)) or self._outside[id(part)]

    def translate(self, item: Any, find: Callable[[torch.Tensor], Ref | None], layer: int | None) -> Any:
        """Return *item* with plain data for its parts. *find* knows the tensors of the step."""
        if isinstance(item, torch.Tensor):
            return find(item) or self._translate_held(item, layer)
        if isinstance(item, (tuple, list)):
            return tuple(self.translate(part, find, layer) for part in item)
        if isinstance(item, dict) and not self._find_object(item, layer):
            return {name: self.translate(part, find, layer) for name, part in item.items()}
        if isinstance(item, slice):
            return slice(*(self.translate(part, find, layer) for part in (item.start, item.stop, item.step)))
        if isinstance(item, PLAIN):
            return item
        if isinstance(item, (int, float)):
            return self._translate_number(item, layer)
        if isinstance(item, torch.dtype):
            return Literal(str(item))
        return self._find_object(item, layer) or Unknown(f"{type(item).__name__} {item!r:.60}")

    def _translate_held(self, tensor: torch.Tensor, layer: int | None) -> Any:
        try:
            return self.locate(tensor, layer)
        except KeyError:
            return self._find_object(tensor, layer) or Unknown(f"a tensor {list(tensor.shape)} from elsewhere")

    def _translate_number(self, number: float, layer: int | None) -> Any:
        """Return the path to an attribute with this value, because a tiny config's number is wrong elsewhere."""
        if number == self._tokens and isinstance(number, int):
            return TokenCount()
        if isinstance(number, int) and number < SMALL:
            return number
        for owner, thing in self._list_owners(layer):
            for prefix, attributes in _list_attributes(thing):
                for name, value in attributes.items():
                    if type(value) is type(number) and value == number:
                        return Path(owner, prefix + name)
        return number

    def _find_object(self, item: Any, layer: int | None) -> Path | None:
        for owner, thing in self._list_owners(layer):
            for name, value in vars(thing).items():
                if value is item:
                    return Path(owner, name)
        return None

    def _list_owners(self, layer: int | None) -> list[tuple[str, torch.nn.Module]]:
        inside = [("layer", self._layers[layer])] if layer is not None else []
        return [*inside, ("decoder", self._decoder), ("model", self._model)]


def describe_layers(
    decoder: torch.nn.Module, layers: Sequence[torch.nn.Module]
) -> tuple[tuple[Mapping[str, Any], ...], tuple[str, ...], str]:
    """Return facts that tell layers apart, class names of the decoder and its layers' parts, and a layer's modules."""
    parts = [decoder, *layers, *(child for layer in layers for child in layer.children())]
    classes = tuple(sorted({type(part).__name__ for part in parts}))
    tree = "\n".join(f"{name}: {type(part).__name__}" for name, part in layers[-1].named_modules() if name)
    return tuple(_list_facts(layer) for layer in layers), classes, tree


def _list_facts(layer: torch.nn.Module) -> dict[str, Any]:
    """Return plain attributes and classes of a layer and its children, by expression."""
    facts: dict[str, Any] = {}
    for prefix, part in [("layer", layer), *((f"layer.{name}", part) for name, part in layer.named_children())]:
        facts |= {
            f"{prefix}.{name}": value
            for name, value in vars(part).items()
            if isinstance(value, (bool, int, str)) and not name.startswith(("_", *NUMBERING))
        }
    facts |= {f"type(layer.{name}).__name__": type(part).__name__ for name, part in layer.named_children()}
    return dict(sorted(facts.items(), key=lambda fact: not isinstance(fact[1], bool)))  # booleans first


def _list_parts(owner: str, root: torch.nn.Module) -> dict[int, Path]:
    named = [*root.named_modules(), *root.named_parameters(), *root.named_buffers()]
    return {id(part): Path(owner, name) for name, part in named}


def _list_attributes(thing: torch.nn.Module) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the attributes of a module, and those of its config."""
    config: Any = getattr(thing, "config", None)
    return [("", vars(thing)), *([("config.", config.to_dict())] if hasattr(config, "to_dict") else [])]
