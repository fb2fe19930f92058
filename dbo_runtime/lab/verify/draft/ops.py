"""Group calls into an adapter's ops: one per module and per reduce, and one per run of functions in between."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from dbo_runtime.lab.verify.draft.calls import FUNCTION, MODULE, Call, Path, list_items
from dbo_runtime.lab.verify.draft.expressions import get_word

MAX_WORDS = 3  # words in the name of a run of functions


@dataclass(frozen=True)
class DraftOp:
    """One op to write.

    Attributes:
        name: name of the op, unique in its function.
        calls: one call, or several functions.
        writes: results that are read elsewhere; for a module or a reduce, all results.
    """

    name: str
    calls: tuple[Call, ...]
    writes: tuple[Any, ...]

    @property
    def first(self) -> Call:
        """The only call of a module or reduce op."""
        return self.calls[0]


def group(
    calls: Sequence[Call], tensors: tuple[type, ...], needed: Iterable[Any], others: Sequence[DraftOp] = ()
) -> list[DraftOp]:
    """Return the ops of a layer, or of the calls before or after all layers.

    Args:
        calls: the calls in order.
        tensors: types that name tensors in the calls.
        needed: tensors that are read afterwards.
        others: ops whose names are taken.
    """
    runs: list[list[Call]] = []
    for call in calls:
        if call.kind == FUNCTION and runs and runs[-1][0].kind == FUNCTION:
            runs[-1].append(call)
        else:
            runs.append([call])
    ops: list[DraftOp] = []
    taken = {op.name for op in others}
    for number, run in enumerate(runs):
        later = {item for other in runs[number + 1 :] for call in other for item in list_reads(call, tensors)}
        writes = [item for call in run for item in list_writes(call, tensors)]
        if run[0].kind == FUNCTION:
            writes = [item for item in writes if item in later or item in needed]
        word = _name(run, ops)
        name = next(name for name in chain([word], (f"{word}_{n}" for n in count(2))) if name not in taken)
        taken.add(name)
        ops.append(DraftOp(name, tuple(run), tuple(writes)))
    return ops


def list_reads(call: Call, tensors: tuple[type, ...]) -> list[Any]:
    """Return the tensors among a call's arguments, each once."""
    return list(dict.fromkeys(item for item in list_items((call.args, call.kwargs)) if isinstance(item, tensors)))


def list_writes(call: Call, tensors: tuple[type, ...]) -> list[Any]:
    """Return the tensors among a call's results."""
    return [item for item in list_items(call.results) if isinstance(item, tensors)]


def find_origins(run: Sequence[Call], writes: Sequence[Any]) -> dict[Any, Any]:
    """Return, for each result of a run of functions, the value that owns its memory: the result, or a viewed value."""
    origins: dict[Any, Any] = {}
    for call in run:
        (origin, *_) = [origins.get(item, item) for item in call.overwritten] or [None]
        for item in list_items(call.results):
            origins[item] = item if origin is None else origin
    return {item: origins[item] for item in writes}


def _name(run: Sequence[Call], before: Sequence[DraftOp]) -> str:
    call = run[0]
    if call.kind == MODULE:
        assert isinstance(call.target, Path)
        words = [word for word in call.target.attributes.split(".") if not word.isdecimal()]
        return "_".join(words) or "module"
    if call.kind == FUNCTION:
        return "_".join(list(dict.fromkeys(map(get_word, run)))[:MAX_WORDS])
    return f"{before[-1].name}_reduce" if before else "reduce"
