"""Write the functions of a draft: runs of torch functions, and calls of modules that take more than values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dbo_runtime.lab.verify.draft.calls import Call, Named, Path, TokenCount, list_items
from dbo_runtime.lab.verify.draft.expressions import format_function, format_item

PARAMETERS = ("x", "y", "z")
TRIVIAL = 16  # larger numbers, and fractions that few constants have, come from a config
HALVES = 2


class Helper(NamedTuple):
    """A written function, with its bound arguments.

    Attributes:
        name: name of the function.
        bound: objects that its first parameters are bound to.
        reads: values that its other parameters take.
    """

    name: str
    bound: tuple[str, ...]
    reads: tuple[Any, ...]

    def __str__(self) -> str:
        """Format as an expression for a function of the values."""
        return f"partial({', '.join((self.name, *self.bound))})" if self.bound else self.name


@dataclass
class Helpers:
    """The functions of one draft. Equal functions are written only once.

    Attributes:
        sources: source texts by function name.
        reserved: names that functions must not have.
    """

    sources: dict[str, str] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)

    def add_functions(
        self, name: str, calls: Sequence[Call], writes: Sequence[Any], tensors: tuple[type, ...], copies: bool = False
    ) -> Helper:
        """Write a run of torch functions as one function. With *copies*, its results are not views."""
        made = {item for call in calls for item in list_items(call.results) if isinstance(item, tensors)}
        items = list(dict.fromkeys(_list_arguments(calls)))
        reads = tuple(item for item in items if isinstance(item, tensors) and item not in made)
        names = _Parameters(reads, [item for item in items if isinstance(item, Path)])
        uses = [item for item in _list_arguments(calls) if item in made]
        lines: list[str] = []
        for call in calls:
            text = format_function(call, names.get)
            (result,) = [item for item in list_items(call.results) if isinstance(item, tensors)] or [None]
            if result in writes or uses.count(result) != 1:
                names.bind(result, variable := f"value_{len(lines) + 1}")
                lines.append(f"{variable} = {text}")
            else:
                names.bind(result, text if text.isidentifier() or text.endswith(")") else f"({text})")
        if len(writes) == 1 and lines and lines[-1].startswith(f"{names.get(writes[0])} = "):
            text = lines.pop().partition(" = ")[2]
            lines.append(f"return ({text}).clone()" if copies else f"return {text}")
        else:
            lines.append(f"return {', '.join(names.get(item) + '.clone()' * copies for item in writes)}")
        note = _note_numbers(calls)
        return self._add(name, names, [*note, *lines], reads)

    def add_module(self, name: str, call: Call, tensors: tuple[type, ...]) -> Helper:
        """Write the call of a module whose arguments or results are not only values."""
        items = list(dict.fromkeys(_list_arguments([call])))
        reads = tuple(item for item in items if isinstance(item, tensors))
        assert isinstance(call.target, Path)
        names = _Parameters(reads, [call.target, *(item for item in items if isinstance(item, Path))], "module")
        args = [format_item(item, names.get) for item in call.args]
        args += [f"{key}={format_item(item, names.get)}" for key, item in call.kwargs]
        text = f"module({', '.join(args)})"
        selected = list(_list_selections(call.results, tensors))
        if len(selected) == 1:
            lines = [f"return {text}{selected[0]}"]
        else:
            lines = [f"result = {text}", f"return {', '.join(f'result{path}' for path in selected) or '()'}"]
        return self._add(f"call_{name}", names, [*_note_numbers([call]), *lines], reads)

    def _add(self, name: str, names: _Parameters, lines: list[str], reads: tuple[Any, ...]) -> Helper:
        body = "\n".join(f"    {line}" for line in lines)
        text = f"({', '.join(f'{parameter}: Any' for parameter in names.parameters)}) -> Any:\n{body}\n"
        equal = next((other for other, known in self.sources.items() if known == text), None)
        number, unique = 1, equal or name
        while unique in self.reserved or self.sources.get(unique, text) != text:
            number += 1
            unique = f"{name}_{number}"
        self.sources[unique] = text
        return Helper(unique, tuple(map(str, names.bound)), reads)


class _Parameters:
    """The names of a function's parameters and variables."""

    def __init__(self, reads: Sequence[Any], bound: Sequence[Path], first: str | None = None) -> None:
        self._names: dict[Any, str] = {}
        self.bound = list(dict.fromkeys(bound))
        self.parameters: list[str] = []
        for position, path in enumerate(self.bound):
            name = first if first and position == 0 else path.attributes.rpartition(".")[2] or path.owner
            self._take(path, name if name.isidentifier() else "held")
        for position, item in enumerate(reads):
            self._take(item, PARAMETERS[position] if position < len(PARAMETERS) else f"x{position + 1}")
        self._tokens = f"{self._names[reads[0]]}.shape[0]" if reads else "0"

    def get(self, item: Any) -> str:
        return self._tokens if isinstance(item, TokenCount) else self._names[item]

    def bind(self, item: Any, name: str) -> None:
        self._names[item] = name

    def _take(self, item: Any, name: str) -> None:
        while name in self.parameters:
            name += "_"
        self.parameters.append(name)
        self._names[item] = name


def _list_arguments(calls: Sequence[Call]) -> Iterator[Any]:
    for call in calls:
        for item in list_items((call.args, tuple(value for _, value in call.kwargs))):
            if isinstance(item, Named):
                yield item


def _list_selections(results: Any, tensors: tuple[type, ...], path: str = "") -> Iterator[str]:
    """Yield the position of each value in a result: `` or `[0]`."""
    if isinstance(results, tensors):
        yield path
    elif type(results) is tuple:
        for number, part in enumerate(results):
            yield from _list_selections(part, tensors, f"{path}[{number}]")


def _note_numbers(calls: Sequence[Call]) -> list[str]:
    """Return a comment on numbers that may be wrong for a model of other sizes."""
    arguments = [item for call in calls for item in list_items((call.args, tuple(value for _, value in call.kwargs)))]
    numbers = [item for item in arguments if type(item) in (int, float) and _is_of_a_config(item)]
    listed = ", ".join(map(repr, dict.fromkeys(numbers)))
    return [f"# TODO: {listed}: from this config? Then bind the model's attribute for it."] if numbers else []


def _is_of_a_config(number: float) -> bool:
    return abs(number) >= TRIVIAL or not float(number * HALVES).is_integer()
