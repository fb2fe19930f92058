"""Fold the layers of a recording into one loop. Layers with the same calls are of one kind.

The data flow from layer to layer follows from the calls. A layer's result, the next layer's reading of it, and the
later layers' corresponding values form one *slot*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dbo_runtime.errors import ProgramError
from dbo_runtime.lab.verify.draft.calls import Call, Named, Recording, Ref, list_items


@dataclass(frozen=True, order=True)
class Slot(Named):
    """A value passed from layer to layer, by number."""

    number: int


@dataclass(frozen=True, order=True)
class Local(Named):
    """A result of a call of the same layer."""

    number: int


@dataclass(frozen=True)
class Shared(Named):
    """A value from before the layers that all layers may read, such as positions."""

    ref: Ref


@dataclass
class Kind:
    """Layers with the same calls.

    Attributes:
        layers: indices of these layers.
        calls: the calls, with a Slot, Local or Shared for each tensor.
        takes: slots that these layers read.
        gives: result passed on in each slot.
    """

    layers: list[int]
    calls: tuple[Call, ...]
    takes: tuple[Slot, ...] = ()
    gives: dict[Slot, Local] = field(default_factory=dict)


@dataclass(frozen=True)
class Folded:
    """A recording with folded layers.

    Attributes:
        before: calls before the layers.
        kinds: kinds of layers, by first appearance.
        after: calls after the layers.
        initial: first value of each slot that the first layer takes.
        final: slot in which each result of the last layer is read after it.
    """

    before: tuple[Call, ...]
    kinds: tuple[Kind, ...]
    after: tuple[Call, ...]
    initial: dict[Slot, Ref]
    final: dict[Ref, Slot]


def fold(recording: Recording) -> Folded:
    """Fold a recording's layers.

    Raises:
        ProgramError: a layer reads a value that neither it nor the previous layer computed.
    """
    first = next((number for number, call in enumerate(recording.calls) if call.layer is not None), None)
    if first is None:
        raise ProgramError("no layer calls anything")
    last = max(number for number, call in enumerate(recording.calls) if call.layer is not None)
    before, after = recording.calls[:first], recording.calls[last + 1 :]
    bodies = [
        tuple(call for call in recording.calls[first : last + 1] if call.layer == number)
        for number in range(recording.count)
    ]
    return _Folding(recording, before, bodies, after).run()


class _Folding:
    """The layers' inputs and outputs, connected by slots."""

    def __init__(
        self,
        recording: Recording,
        before: tuple[Call, ...],
        bodies: Sequence[tuple[Call, ...]],
        after: tuple[Call, ...],
    ) -> None:
        self._recording = recording
        self._before, self._bodies, self._after = before, bodies, after
        outside = {recording.x, recording.positions, *(ref for call in before for ref in call.writes)}
        read_by = [{ref for call in body for ref in call.reads} for body in bodies]
        self._shared = {recording.positions, *(outside & set().union(*read_by[1:]))}
        self._locals = [
            {ref: Local(number) for number, ref in enumerate(ref for call in body for ref in call.writes)}
            for body in bodies
        ]
        self._read_after = list(
            dict.fromkeys(
                ref
                for ref in [*(ref for call in after for ref in call.reads), *_list_refs(recording.result)]
                if ref not in outside and not any(ref in call.writes for call in after)
            )
        )
        self._joined: dict[Any, Any] = {}  # union-find: values in one slot

    def run(self) -> Folded:
        kinds: list[Kind] = []
        numbers: dict[str, int] = {}
        of_layer: list[int] = []
        takes = [self._list_taken(number) for number in range(len(self._bodies))]
        for number, body in enumerate(self._bodies):
            calls = tuple(call.rename(partial(self._name, number, takes[number])) for call in body)
            kind = numbers.setdefault(repr(calls), len(kinds))
            if kind == len(kinds):
                kinds.append(Kind([], calls))
            kinds[kind].layers.append(number)
            of_layer.append(kind)
        self._join(takes, of_layer)
        return self._number_slots(kinds, takes, of_layer)

    def _list_taken(self, number: int) -> list[Ref]:
        """Return the values that a layer reads from the previous layer; for the first layer, from earlier calls."""
        local = self._locals[number]
        reads = dict.fromkeys(ref for call in self._bodies[number] for ref in call.reads)
        taken = [ref for ref in reads if ref not in local and ref not in self._shared]
        if number:
            strange = [ref for ref in taken if ref not in self._locals[number - 1]]
            if strange:
                raise ProgramError(f"layer {number} reads a result of a layer other than {number - 1}")
        return taken

    def _name(self, number: int, taken: list[Ref], item: Any) -> Any:
        """Name a tensor of a layer. At first, slots are numbered in the order in which the layer reads them."""
        if not isinstance(item, Ref):
            return item
        if item in self._shared:
            return Shared(item)
        return Slot(taken.index(item)) if item in taken else self._locals[number][item]

    def _join(self, takes: list[list[Ref]], of_layer: list[int]) -> None:
        for number, kind in enumerate(of_layer):
            read = self._read_after if number == len(of_layer) - 1 else takes[number + 1]
            reader = "after" if number == len(of_layer) - 1 else of_layer[number + 1]
            for position, ref in enumerate(read):
                if ref not in self._locals[number]:
                    raise ProgramError("what follows the layers reads a result of a layer before the last one")
                self._unite(("gives", kind, self._locals[number][ref]), ("takes", reader, position))

    def _number_slots(self, kinds: list[Kind], takes: list[list[Ref]], of_layer: list[int]) -> Folded:
        if len(kinds) > 1 and kinds[0].layers == [0] and all(takes[kind.layers[0]] for kind in kinds[:2]):
            self._unite(("takes", 0, 0), ("takes", 1, 0))  # hidden states before and after the first layer
        slots: dict[Any, Slot] = {}

        def number(node: Any) -> Slot:
            return slots.setdefault(self._find(node), Slot(len(slots)))

        for index, kind in enumerate(kinds):
            names = [number(("takes", index, position)) for position in range(len(takes[kind.layers[0]]))]
            if len(set(names)) < len(names):
                raise ProgramError(f"layer {kind.layers[0]} reads one value in two roles")
            kind.takes = tuple(names)
            kind.calls = tuple(call.rename(partial(_renumber, names)) for call in kind.calls)
        final = {ref: number(("takes", "after", position)) for position, ref in enumerate(self._read_after)}
        for node in [node for node in self._joined if node[0] == "gives"]:
            _, index, local = node
            slot = number(node)
            if kinds[index].gives.setdefault(slot, local) != local:
                raise ProgramError(f"layer {kinds[index].layers[0]} passes on two values in one role")
        initial = dict(zip(kinds[of_layer[0]].takes, takes[0], strict=True))
        return Folded(self._before, tuple(kinds), self._after, initial, final)

    def _find(self, node: Any) -> Any:
        while self._joined.setdefault(node, node) != node:
            node = self._joined[node]
        return node

    def _unite(self, one: Any, other: Any) -> None:
        self._joined[self._find(one)] = self._find(other)


def _renumber(names: Sequence[Slot], item: Any) -> Any:
    return names[item.number] if isinstance(item, Slot) else item


def _list_refs(structure: Any) -> list[Ref]:
    return [item for item in list_items(structure) if isinstance(item, Ref)]
