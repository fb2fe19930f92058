"""Write the source of an adapter from a folded recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dbo_runtime.errors import ProgramError
from dbo_runtime.lab.verify.draft.calls import REDUCE, Path, Recording, Ref, list_items
from dbo_runtime.lab.verify.draft.expressions import find_unknown
from dbo_runtime.lab.verify.draft.folding import Folded, Kind, Shared, Slot
from dbo_runtime.lab.verify.draft.helpers import Helpers
from dbo_runtime.lab.verify.draft.ops import group, list_reads
from dbo_runtime.lab.verify.draft.scope import RESERVED, TENSORS, Scope, quote, wrap

SIGNATURE = (
    "    def record(self, p: ProgramBuilder, model: Any, collectives: Any, x: Value, positions: Value) -> Value:"
)


@dataclass
class AdapterSource:
    """Writes one adapter.

    Args:
        recording: the recording of the model's forward.
        folded: the recording with one kind for layers with the same calls.
        name: name of the class.
    """

    recording: Recording
    folded: Folded
    name: str

    def __post_init__(self) -> None:
        self._helpers = Helpers(reserved={*RESERVED, "Decline", "ProgramBuilder", "Value", "Any"})
        self._passed = sorted({slot for kind in self.folded.kinds for slot in kind.gives})
        slots = sorted({*self._passed, *self.folded.initial})
        names = ("hidden" if self._is_shared(self.recording.x) else "x", "residual")
        self._slots = {slot: names[n] if n < len(names) else f"carried_{n}" for n, slot in enumerate(slots)}
        self._shared: dict[Ref, str] = {self.recording.x: "x", self.recording.positions: "positions"}

    def write(self) -> str:
        """Return the module's source.

        Raises:
            ProgramError: a call cannot be written.
        """
        calls = [*self.folded.before, *self.folded.after, *(call for kind in self.folded.kinds for call in kind.calls)]
        for call in calls:
            unknown = find_unknown(call)
            if unknown is not None:
                raise ProgramError(unknown)
        record = self._write_record()
        layers = [line for number, kind in enumerate(self.folded.kinds) for line in self._write_layer(number, kind)]
        helpers = [f"\n\ndef {name}{text.rstrip()}" for name, text in self._helpers.sources.items()]
        body = "\n".join([*record, *layers, *helpers])
        return f"{write_head(self.recording, self.name, body)}{body}\n"

    def _write_record(self) -> list[str]:
        recording, folded = self.recording, self.folded
        needed = [*folded.initial.values(), *self._list_shared(), *_refs(recording.result)]
        before = group(folded.before, TENSORS, needed)
        after = group(folded.after, TENSORS, _refs(recording.result), before)
        kept = {ref: self._slots[slot] for slot, ref in folded.initial.items()}
        scope = Scope(self._helpers, {recording.x: "x", recording.positions: "positions"}, kept)
        scope.expect([*before, *after], needed)
        lines = scope.write(before, "        ")
        self._shared |= {ref: scope.names[ref] for ref in self._list_shared()}
        lines += [
            f"        {self._slots[slot]} = {scope.names[ref]}"
            for slot, ref in folded.initial.items()
            if self._slots[slot] != scope.names[ref]
        ]
        lines += self._write_loop()
        scope.names |= {ref: self._slots[slot] for ref, slot in folded.final.items()}
        scope.done = len(before)
        scope.kept = {}
        lines += scope.write(after, "        ")
        return [
            SIGNATURE,
            '        """Declare one micro-batch: embedded tokens in, hidden states out."""',
            f"        decoder = {Path('model', recording.decoder)}",
            *lines,
            f"        return {scope.names[recording.result]}",
        ]

    def _write_loop(self) -> list[str]:
        kinds = self.folded.kinds
        indent = "                "
        lines = [
            f"        for index, layer in enumerate(decoder.{self.recording.layers}):",
            "            with p.layer(index):",
        ]
        for number, kind in enumerate(kinds):
            condition = "" if len(kinds) == 1 else self._tell_apart(number)
            if condition.startswith("#"):
                lines.append(f"{indent}{condition}")
                condition = f"index in {set(kind.layers)!r}"
            if len(kinds) > 1:
                word = "else:" if number == len(kinds) - 1 else f"{'el' if number else ''}if {condition}:"
                lines.append(f"{indent}{word}")
            inner = indent if len(kinds) == 1 else f"{indent}    "
            args = [
                "p",
                "layer",
                "collectives",
                *self._list_extra(kind),
                *(self._name(item) for item in self._list_taken(kind)),
            ]
            given = ", ".join(self._slots[slot] for slot in self._passed)
            lines += wrap(inner, f"{given} = self.{self._name_kind(number)}", args)
        return lines

    def _tell_apart(self, number: int) -> str:
        """Return a condition that only layers of this kind meet, among the layers of this and later kinds."""
        kinds = self.folded.kinds[number:]
        kind = kinds[0]
        if number == len(self.folded.kinds) - 1:
            return ""
        if kind.layers == [0]:
            return "index == 0"
        facts = self.recording.facts
        for expression in facts[kind.layers[0]] if facts else ():
            values = [{repr(facts[layer].get(expression)) for layer in one.layers} for one in kinds]
            if len(values[0]) == 1 and all(values[0].isdisjoint(others) for others in values[1:]):
                return _compare(expression, facts[kind.layers[0]][expression])
        return "# TODO: these layers of the draft's config call something else; say how to tell them apart."

    def _write_layer(self, number: int, kind: Kind) -> list[str]:
        gives = [kind.gives.get(slot) for slot in self._passed]
        needed = [local for local in gives if local is not None]
        ops = group(kind.calls, TENSORS, needed)
        taken = self._list_taken(kind)
        scope = Scope(self._helpers, {item: self._name(item) for item in taken})
        scope.expect(ops, needed)
        lines = [*_note_unreduced(kind), *scope.write(ops, "        ")]
        extra = self._list_extra(kind)
        parameters = [
            "self",
            "p: ProgramBuilder",
            "layer: Any",
            "collectives: Any",
            *(f"{name}: Any" for name in extra),
            *(f"{self._name(item)}: Value" for item in taken),
        ]
        results = ", ".join("None" if local is None else scope.names[local] for local in gives)
        passed = ", ".join(self._slots[slot] for slot in self._passed)
        signature = wrap("    ", f"def {self._name_kind(number)}", parameters)
        signature[-1] += " -> Any:"
        return [
            "",
            *signature,
            f'        """Declare {self._describe(number)}; return {passed}."""',
            *lines,
            f"        return {results}",
        ]

    def _name_kind(self, number: int) -> str:
        kinds = self.folded.kinds
        if len(kinds) == 1 or (len(kinds) == 2 and number == 1 and kinds[0].layers == [0]):
            return "record_layer"
        return "record_first_layer" if kinds[number].layers == [0] else f"record_layer_{number + 1}"

    def _describe(self, number: int) -> str:
        name = self._name_kind(number)
        return {"record_layer": "one layer", "record_first_layer": "the first layer"}.get(
            name, "one layer of this kind"
        )

    def _list_taken(self, kind: Kind) -> list[Any]:
        shared = dict.fromkeys(item for call in kind.calls for item in list_reads(call, (Shared,)))
        return [*shared, *sorted(kind.takes)]

    def _list_extra(self, kind: Kind) -> list[str]:
        """Return the objects outside a layer that its calls use: the decoder, the model."""
        items = [item for call in kind.calls for item in list_items((call.target, call.args, call.kwargs))]
        owners = {item.owner for item in items if isinstance(item, Path)}
        return [name for name in ("decoder", "model") if name in owners]

    def _name(self, item: Any) -> str:
        return self._slots[item] if isinstance(item, Slot) else self._shared[item.ref]

    def _list_shared(self) -> list[Ref]:
        reads = (item for kind in self.folded.kinds for call in kind.calls for item in list_reads(call, (Shared,)))
        return [item.ref for item in dict.fromkeys(reads)]

    def _is_shared(self, ref: Ref) -> bool:
        return ref in self._list_shared()


def write_head(recording: Recording, name: str, body: str) -> str:
    """Return the head of a module: imports, the class, and its `decline`."""
    known = wrap("", "KNOWN = frozenset", [*map(quote, recording.classes)], "({", "})")
    decoder = Path("model", recording.decoder)
    imports = "from functools import partial\n" if "partial(" in body else ""
    libraries = "import torch\n\n" if "torch." in body else ""
    return f'''"""{recording.architecture} for dbo_runtime: a draft, to be read against the model's forward."""

from __future__ import annotations

{imports}from typing import Any

{libraries}from dbo_runtime import Decline, ProgramBuilder, Value

{chr(10).join(known)}


class {name}:
    """Splits the layers of vLLM's {recording.architecture} at their reduces."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model, as configured and loaded, cannot be split, or None if it can."""
        layers = {decoder}.{recording.layers}
        parts = [{decoder}, *layers, *(part for layer in layers for part in layer.children())]
        unknown = {{type(part).__name__ for part in parts}} - KNOWN
        return Decline("its parts are not known", ", ".join(sorted(unknown))) if unknown else None

'''


def _compare(expression: str, value: Any) -> str:
    """Return the condition that an expression has this value."""
    if isinstance(value, bool):
        return expression if value else f"not {expression}"
    return f"{expression} == {value!r}"


def _note_unreduced(kind: Kind) -> list[str]:
    """Return a comment if modules of a layer leave their all-reduce to the layer, but it called none."""
    leaving = [str(call.target) for call in kind.calls if call.leaves_reduce]
    if not leaving or any(call.kind == REDUCE for call in kind.calls):
        return []
    return [f"        # TODO: {', '.join(leaving)} is not reduced, and the layer called no all-reduce: declare one."]


def _refs(structure: Any) -> list[Ref]:
    return [item for item in list_items(structure) if isinstance(item, Ref)]
