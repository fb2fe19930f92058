"""Write the ops of one function of a draft, and name its variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dbo_runtime.lab.verify.draft.calls import FUNCTION, MODULE, Ref
from dbo_runtime.lab.verify.draft.folding import Local, Shared, Slot
from dbo_runtime.lab.verify.draft.helpers import Helpers
from dbo_runtime.lab.verify.draft.ops import DraftOp, find_origins, list_reads

WIDTH = 110
TENSORS = (Ref, Local, Shared, Slot)
RESERVED = {"self", "p", "model", "decoder", "layer", "index", "collectives", "positions", "part", "partial", "KNOWN"}


class Scope:
    """The variables of one written function.

    Args:
        helpers: the functions of the module.
        names: names of the parameters.
        kept: names reserved for these values.
    """

    def __init__(self, helpers: Helpers, names: Mapping[Any, str], kept: Mapping[Any, str] | None = None) -> None:
        self.names = dict(names)
        self.kept = dict(kept or {})
        self.done = 0
        self._helpers = helpers
        self._last: dict[Any, int] = {}

    def expect(self, ops: Sequence[DraftOp], results: Iterable[Any]) -> None:
        """Note how long each value is needed, so that names can be reused."""
        for number, op in enumerate(ops):
            self._last.update({item: number for call in op.calls for item in list_reads(call, TENSORS)})
        self._last.update(dict.fromkeys(results, len(ops)))

    def write(self, ops: Sequence[DraftOp], indent: str) -> list[str]:
        """Return the lines that declare the ops."""
        lines: list[str] = []
        for op in ops:
            write = {FUNCTION: self._write_functions, MODULE: self._write_module}.get(op.first.kind, self._write_reduce)
            lines += write(op, indent)
            self.done += 1
        return lines

    def _write_functions(self, op: DraftOp, indent: str) -> list[str]:
        origins = find_origins(op.calls, op.writes)
        views = [origin for item, origin in origins.items() if origin != item]
        copies = len(set(origins.values())) < len(origins) or any(map(self._is_live, views))
        helper = self._helpers.add_functions(op.name, op.calls, op.writes, TENSORS, copies)
        taken = [] if copies else views
        return self._write_compute(op, str(helper), helper.reads, ["x"] * len(op.writes), indent, taken)

    def _write_module(self, op: DraftOp, indent: str) -> list[str]:
        call = op.first
        reads: tuple[Any, ...] = call.args
        results = call.results
        is_plain = isinstance(results, TENSORS) or (
            type(results) is tuple and len(results) > 1 and all(isinstance(item, TENSORS) for item in results)
        )
        if is_plain and not call.kwargs and all(isinstance(item, TENSORS) for item in call.args):
            function = str(call.target)
        else:
            helper = self._helpers.add_module(op.name, call, TENSORS)
            function, reads = str(helper), helper.reads
        extra = ["ordered=True"] if call.ordered else []
        wanted = [op.name, *["residual" if "norm" in op.name else f"{op.name}_result"] * (len(op.writes) - 1)]
        if not call.reduces:
            return self._write_compute(op, function, reads, wanted, indent, call.overwritten, extra)
        if len(op.writes) != 1:
            note = f"{indent}# TODO: {op.name} reduces inside: its reduce cannot be split off, because it returns more."
            return [note, *self._write_compute(op, function, reads, wanted, indent, call.overwritten, extra)]
        args = [quote(op.name), f"collectives.without_reduce({function})", *map(self.names.__getitem__, reads), *extra]
        self._bind(op.writes[0], op.name)
        reduce = [quote(f"{op.name}_reduce"), "collectives.all_reduce", "part", "overwrites=(part,)"]
        return [
            *wrap(indent, "part = p.compute", args),
            *wrap(indent, f"{self.names[op.writes[0]]} = p.comm", reduce),
        ]

    def _write_reduce(self, op: DraftOp, indent: str) -> list[str]:
        read = self.names[op.first.args[0]]
        self._bind(op.writes[0], "x")
        args = [quote(op.name), "collectives.all_reduce", read, f"overwrites=({read},)"]
        return wrap(indent, f"{self.names[op.writes[0]]} = p.comm", args)

    def _write_compute(
        self,
        op: DraftOp,
        function: str,
        reads: Sequence[Any],
        wanted: Sequence[str],
        indent: str,
        overwritten: Sequence[Any],
        extra: Sequence[str] = (),
    ) -> list[str]:
        taken = [self.names[item] for item in overwritten if item in reads and not self._is_live(item)]
        args = [quote(op.name), function, *(self.names[item] for item in reads), *extra]
        args += [f"outputs={len(op.writes)}"] * (len(op.writes) != 1)
        args += [f"overwrites=({', '.join(taken)}{',' * (len(taken) == 1)})"] * bool(taken)
        for item, name in zip(op.writes, wanted, strict=True):
            self._bind(item, name)
        results = ", ".join(self.names[item] for item in op.writes)
        return wrap(indent, f"{results} = p.compute" if results else "p.compute", args)

    def _is_live(self, item: Any) -> bool:
        """Return whether a later op reads a value."""
        return self._last.get(item, -1) > self.done or isinstance(item, Shared)

    def _bind(self, item: Any, wanted: str) -> None:
        """Name a value. A name whose value is no longer read is free."""
        live = {name for other, name in self.names.items() if self._is_live(other) and other != item} | RESERVED
        wanted = self.kept.get(item, wanted)
        live |= {name for other, name in self.kept.items() if other != item}
        name, number = wanted, 1
        while name in live or name in self._helpers.sources:
            number += 1
            name = f"{wanted}_{number}"
        self.names[item] = name


def wrap(indent: str, start: str, args: Sequence[str], opening: str = "(", closing: str = ")") -> list[str]:
    """Return a call as lines of limited length."""
    line = f"{indent}{start}{opening}{', '.join(args)}{closing}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{indent}{start}{opening}", *(f"{indent}    {arg}," for arg in args), f"{indent}{closing}"]


def quote(text: str) -> str:
    """Return a word as a string literal."""
    return f'"{text}"'
