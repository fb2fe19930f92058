"""The calls of a forward: modules, torch functions and reduces, with their arguments and results as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

MODULE, FUNCTION, REDUCE = "module", "function", "reduce"


class Named:
    """An item that has a name in a draft's source. Items of different subclasses are never equal."""


@dataclass(frozen=True)
class Ref(Named):
    """A tensor that the forward is given or computes, numbered in order of appearance."""

    number: int


@dataclass(frozen=True)
class Path(Named):
    """Something that a model holds, such as `layer.mlp` or `decoder.norm`.

    Attributes:
        owner: start of the path: `layer`, `decoder` or `model`.
        attributes: attributes from there, separated by dots; empty for the owner itself.
    """

    owner: str
    attributes: str

    def __str__(self) -> str:
        """Format as an expression."""
        text = self.owner
        for name in self.attributes.split(".") if self.attributes else ():
            text += f"[{name}]" if name.isdecimal() else f".{name}"
        return text


@dataclass(frozen=True)
class TokenCount(Named):
    """The number of tokens in the step."""


@dataclass(frozen=True)
class Literal:
    """An expression that is the same in every model, such as `torch.float32`."""

    text: str


@dataclass(frozen=True)
class Unknown:
    """An argument without a known expression."""

    what: str


@dataclass(frozen=True)
class Call:
    """One call of a forward.

    Attributes:
        kind: MODULE, FUNCTION or REDUCE.
        target: the module; or the function's name, such as `torch.Tensor.add`.
        args: arguments, with a Ref, Path, TokenCount, Literal or Unknown for each item that is not plain; tuples and
            dictionaries of these.
        kwargs: keyword arguments, in the same form.
        results: a Ref, None, or a tuple of these.
        layer: the layer that made the call; None outside layers.
        ordered: whether the call reads or writes state of requests, such as the KV cache.
        reduces: whether the call ends in an all-reduce.
        leaves_reduce: whether the results are partial sums that the layer has to reduce.
        overwritten: the arguments that the call may change or return.
    """

    kind: str
    target: Path | str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    results: Any = None
    layer: int | None = None
    ordered: bool = False
    reduces: bool = False
    leaves_reduce: bool = False
    overwritten: tuple[Any, ...] = ()

    @property
    def reads(self) -> tuple[Any, ...]:
        """The tensors among the arguments, each once, in order."""
        return tuple(dict.fromkeys(item for item in list_items((self.args, self.kwargs)) if isinstance(item, Ref)))

    @property
    def writes(self) -> tuple[Any, ...]:
        """The tensors among the results, in order."""
        return tuple(item for item in list_items(self.results) if isinstance(item, Ref))

    def rename(self, rename: Callable[[Any], Any]) -> Call:
        """Return the call outside any layer, with each argument and result renamed."""
        return replace(
            self,
            args=map_items(self.args, rename),
            kwargs=map_items(self.kwargs, rename),
            results=map_items(self.results, rename),
            overwritten=map_items(self.overwritten, rename),
            layer=None,
        )


@dataclass(frozen=True)
class Recording:
    """All calls of a forward.

    Attributes:
        architecture: the model's architecture.
        decoder: path from the model to the object that has the layers, such as `model`.
        layers: the decoder's attribute that has the layers.
        count: number of layers.
        x: the embedded tokens.
        positions: positions of the tokens.
        result: the returned hidden states.
        calls: the calls in order.
        facts: values of each layer that may tell kinds of layers apart, by expression, such as `layer.is_sliding`.
        classes: class names of the decoder, its layers and their parts.
        tree: the modules of a layer, one per line.
    """

    architecture: str
    decoder: str
    layers: str
    count: int
    x: Ref
    positions: Ref
    result: Any
    calls: tuple[Call, ...]
    facts: tuple[Mapping[str, Any], ...] = ()
    classes: tuple[str, ...] = ()
    tree: str = ""


def list_items(structure: Any) -> Iterator[Any]:
    """Yield the items in nested tuples, lists and dictionaries."""
    if type(structure) in (tuple, list):
        for item in structure:
            yield from list_items(item)
    elif isinstance(structure, dict):
        yield from list_items(list(structure.values()))
    elif isinstance(structure, slice):
        yield from list_items((structure.start, structure.stop, structure.step))
    else:
        yield structure


def map_items(structure: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested tuples, lists and dictionaries with each item replaced by the function's result."""
    if type(structure) in (tuple, list):
        return type(structure)(map_items(item, function) for item in structure)
    if isinstance(structure, dict):
        return {name: map_items(item, function) for name, item in structure.items()}
    if isinstance(structure, slice):
        return slice(*(map_items(item, function) for item in (structure.start, structure.stop, structure.step)))
    return function(structure)


def drop_unused(calls: tuple[Call, ...], result: Any) -> tuple[Call, ...]:
    """Return the calls without functions whose results are never read, such as sizes and unused masks."""
    needed = {item for item in list_items(result) if isinstance(item, Ref)}
    kept = []
    for call in reversed(calls):
        if call.kind == FUNCTION and needed.isdisjoint(call.writes):
            continue
        needed.update(call.reads)
        kept.append(call)
    return tuple(reversed(kept))
