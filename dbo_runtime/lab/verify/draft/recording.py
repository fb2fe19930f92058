"""Record the calls of a model's own forward while vLLM runs it: its layers' modules, and the code between them.

The forward runs on real tensors, so any Python in it is followed as it is. A tensor is known by its identity. A tensor
that a call returns, or changes in place, gets a new name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from dbo_runtime.errors import ProgramError
from dbo_runtime.lab.sanitizer.memory import copy_tensors, find_change, list_tensors
from dbo_runtime.lab.verify.draft.calls import FUNCTION, MODULE, REDUCE, Call, Path, Recording, Ref, drop_unused
from dbo_runtime.lab.verify.draft.expressions import is_in_place
from dbo_runtime.lab.verify.draft.module_traits import ALL_REDUCE, describe_module
from dbo_runtime.lab.verify.draft.naming import ArgumentNames, describe_layers

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel


class Recorder(TorchFunctionMode):
    """Records the calls of one forward.

    Args:
        model: the model, as vLLM made it.
        tokens: number of tokens in the step.
    """

    def __init__(self, model: torch.nn.Module, tokens: int) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.decoder, self.list_name = find_layers(model)
        self.layers: Sequence[torch.nn.Module] = list(getattr(self.decoder, self.list_name))
        self._model = model
        self._names = ArgumentNames(model, self.decoder, self.layers, tokens)
        self._refs: dict[int, Ref] = {}
        self._held: list[torch.Tensor] = []  # keeps identities from being reused
        self._count = 0
        self._depth = 0
        self._layer: int | None = None
        self._given: list[torch.Tensor] = []

    def name(self, tensor: torch.Tensor) -> Ref:
        """Give a tensor a new name."""
        ref = self._refs[id(tensor)] = Ref(self._count)
        self._held.append(tensor)
        self._count += 1
        return ref

    def find(self, tensor: torch.Tensor) -> Ref | None:
        """Return the name of a tensor; None if it was neither given nor computed here."""
        return self._refs.get(id(tensor))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, and record it if it is called between modules."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._depth == 0 and next(list_tensors([result]), None) is not None:
            with self._paused():
                name = resolve_name(func) or getattr(func, "__name__", str(func))
                views = [] if is_in_place(name) else list_shared(list_tensors([args, kwargs]), result)
                found = dict.fromkeys(map(self.find, views))
                self._note(FUNCTION, name, args, kwargs, result, tuple(ref for ref in found if ref is not None))
        return result

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Replace an all-reduce that a layer itself calls."""
        if self._depth:
            return partial
        with self._paused():
            total = partial.clone()
            self._note(REDUCE, "all_reduce", (partial,), {}, total)
        return total

    @contextmanager
    def listening(self) -> Iterator[None]:
        """In this context, record calls."""
        layers = {id(layer): number for number, layer in enumerate(self.layers)}
        chain = {id(part) for part in self._model.modules() if any(layer in part.modules() for layer in self.layers)}
        chain -= layers.keys()
        with ExitStack() as stack:
            for module in self._model.modules():
                if id(module) in layers:
                    self._listen_to_layer(stack, module, layers[id(module)])
                elif id(module) not in chain:
                    stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._leave, with_kwargs=True).remove)
                else:
                    self._replace_reduce(stack, module)
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # nothing compiles under a mode like this
            stack.enter_context(self)
            yield

    def _listen_to_layer(self, stack: ExitStack, layer: torch.nn.Module, number: int) -> None:
        def enter(*_: Any) -> None:
            self._layer = number

        def leave(*_: Any) -> None:
            if number == len(self.layers) - 1:  # calls between two layers belong to the first
                self._layer = None

        stack.callback(layer.register_forward_pre_hook(enter).remove)
        stack.callback(layer.register_forward_hook(leave).remove)
        self._replace_reduce(stack, layer)
        if vars(layer).get("tp_size") == 1:  # otherwise a layer would leave out its own reduce
            stack.enter_context(patch.object(layer, "tp_size", 2))

    def _replace_reduce(self, stack: ExitStack, module: torch.nn.Module) -> None:
        names = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
        if ALL_REDUCE in names:
            stack.enter_context(patch.dict(names, {ALL_REDUCE: self.reduce}))

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._given = copy_tensors([*args, *kwargs.values()])

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        given = list(list_tensors([*args, *kwargs.values()]))
        if self._depth == 1 and not self._is_identity(given, result):
            refs = [
                self.find(item)
                for position, item in enumerate(given)
                if self._is_taken(module, position, given, result)
            ]
            taken = tuple(dict.fromkeys(ref for ref in refs if ref is not None))
            target = self._names.locate(module, self._layer)
            args, kwargs = order_arguments(module, args, kwargs)
            self._note(MODULE, target, args, kwargs, result, taken, **describe_module(module))
        self._depth -= 1

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _is_identity(self, given: list[torch.Tensor], result: Any) -> bool:
        """Return whether a module returned its input, as dropout does."""
        return any(
            item is result and not find_change(item, [copy]) for item, copy in zip(given, self._given, strict=True)
        )

    def _is_taken(self, module: torch.nn.Module, position: int, given: list[torch.Tensor], result: Any) -> bool:
        """Return whether a module changed or returned its input, or may do so on another platform."""
        item = given[position]
        fuses = "Norm" in type(module).__name__ and len(given) > 1
        return fuses or bool(list_shared([item], result)) or bool(find_change(item, [self._given[position]]))

    def _note(
        self,
        kind: str,
        target: Path | str,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        overwritten: tuple[Ref, ...] = (),
        **traits: bool,
    ) -> None:
        arguments = self._names.translate(tuple(args), self.find, self._layer)
        named = tuple((name, self._names.translate(item, self.find, self._layer)) for name, item in kwargs.items())
        results = self._name_results(result)
        self.calls.append(Call(kind, target, arguments, named, results, self._layer, overwritten=overwritten, **traits))

    def _name_results(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            return self.name(result)
        if isinstance(result, (tuple, list)):
            return tuple(self._name_results(item) for item in result)
        return None


def record_forward(
    model: VllmModel, forward: Callable[..., Any], architecture: str, x: torch.Tensor, positions: torch.Tensor
) -> Recording:
    """Run a model's own forward on embedded tokens [tokens, hidden], and return its calls.

    Raises:
        ProgramError: the model has no list of layers.
    """
    recorder = Recorder(model, x.shape[0])
    x = x.clone()
    given, places = recorder.name(x), recorder.name(positions)
    with recorder.listening():
        hidden = forward(input_ids=None, positions=positions, intermediate_tensors=None, inputs_embeds=x)
    names = {id(part): name for name, part in model.named_modules()}
    decoder = recorder.decoder
    facts, classes, tree = describe_layers(decoder, recorder.layers)
    result = recorder.find(hidden) if isinstance(hidden, torch.Tensor) else None
    return Recording(
        architecture,
        names[id(decoder)],
        recorder.list_name,
        len(recorder.layers),
        given,
        places,
        result,
        drop_unused(tuple(recorder.calls), result),
        facts,
        classes,
        tree,
    )


def find_layers(model: torch.nn.Module) -> tuple[torch.nn.Module, str]:
    """Return the object that has the longest list of layers, and the list's name.

    Raises:
        ProgramError: there is none.
    """
    lists = [
        (len(child), part, name)
        for part in model.modules()
        for name, child in part.named_children()
        if isinstance(child, torch.nn.ModuleList) and len(child)
    ]
    if not lists:
        raise ProgramError(
            f"{type(model).__name__} has no list of layers (torch.nn.ModuleList), so no draft can be written; write "
            "the adapter by hand: docs/write-an-adapter.md."
        )
    _, decoder, name = max(lists, key=lambda entry: entry[0])
    return decoder, name


def list_shared(given: Iterable[torch.Tensor], result: Any) -> list[torch.Tensor]:
    """Return the given tensors that share memory with a result."""
    storages = {part.untyped_storage().data_ptr() for part in list_tensors([result])}
    return [item for item in given if item.untyped_storage().data_ptr() in storages]


def order_arguments(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a module call's arguments: positional as far as its forward takes them so, and the rest by name."""
    names = list(inspect.signature(type(module).forward).parameters.values())[1 + len(args) :]
    rest = dict(kwargs)
    ordered = list(args)
    for parameter in names:
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD or parameter.name not in rest:
            break
        ordered.append(rest.pop(parameter.name))
    return tuple(ordered), rest
