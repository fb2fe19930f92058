"""Adapters whose `record` declares random things."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from dbo_runtime.decline import DeclineError
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.values import Value

ODD_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "name": ("attention", "", "a b", "\ud800", 1, None, ["a"], "L0.x"),
    "fn": (lambda *values: values, None, 1, "fn", len),
    "lane": ("compute", "comm", "side", "", 1, None, [], {}),
    "outputs": (1, 1, 0, 2, -1, 1001, 10**9, 1.0, "1", None, True),
    "ordered": (False, True, None, "x"),
    "exclusive": (None, None, "a2a", 1, [], {}),
    "communicator": (None, None, "tp", 1, [], {}),
    "overwrites": ((), (), [], None, (1,), "x", [[]]),
    "host_sync": (False, True),
    "may_move_to_side": (False, True),
}


class Unlikely:
    """Raises whatever is done with it."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    def __hash__(self) -> int:
        raise RuntimeError("hashed")

    def __repr__(self) -> str:
        return "<unlikely>"


def make_adapter(chance: Random) -> Any:
    """Return an adapter; some of them are right."""

    class Adapter:
        def decline(self, model: Any) -> None:
            return None

        def record(self, p: ProgramBuilder, model: Any, collectives: Any, x: Value, positions: Value) -> Any:
            readable: list[Any] = [x, positions]
            for number in range(chance.randint(0, 4)):
                readable += _declare(p, number, readable, chance)
            return chance.choice((readable[-1], readable[-1], readable[-1], None, 1, readable, Unlikely()))

    if chance.random() < 0.1:
        Adapter.record = chance.choice(_make_records(chance))  # type: ignore[method-assign]
    return Adapter()


def _declare(p: ProgramBuilder, number: int, readable: list[Any], chance: Random) -> list[Any]:
    arguments: dict[str, Any] = {"name": f"op{number}", "fn": lambda *values: values, "lane": "compute"}
    for name in chance.sample(sorted(ODD_ARGUMENTS), chance.choice((0, 0, 1, 2, 4))):
        arguments[name] = chance.choice(ODD_ARGUMENTS[name])
    reads = chance.sample(readable, min(len(readable), chance.randint(0, 2)))
    if chance.random() < 0.1:
        reads.append(chance.choice((1, None, Unlikely(), Value(0, "x"), list(readable))))
    if chance.random() < 0.1:
        arguments["overwrites"] = tuple(reads)
    if chance.random() < 0.05:
        chance.choice((p.input, lambda name: p.output(name, readable[0])))(chance.choice(ODD_ARGUMENTS["name"]))
    name, fn = arguments.pop("name"), arguments.pop("fn")
    if chance.random() < 0.6:
        with p.layer(chance.choice((number, number, number, 0, -1, "0", None, 10**30))):
            written = p.op(name, fn, *reads, **arguments)
    else:
        written = p.op(name, fn, *reads, **arguments)
    return [written] if isinstance(written, Value) else list(written)


def _make_records(chance: Random) -> list[Callable[..., Any]]:
    def fails(self: Any, p: Any, model: Any, collectives: Any, x: Any, positions: Any) -> Any:
        raise chance.choice((ValueError("no"), KeyError(1), RecursionError(), MemoryError(), DeclineError("declined")))

    def computes(self: Any, p: Any, model: Any, collectives: Any, x: Any, positions: Any) -> Any:
        return chance.choice((lambda: x + 1, lambda: x[0], lambda: x.shape, lambda: len(x), lambda: bool(x)))()

    def takes_others(self: Any, p: Any, model: Any, collectives: Any, x: Any, y: Any) -> Any:
        return x

    def takes_none() -> Any:
        return None

    return [fails, computes, takes_others, takes_none]


def make_class(chance: Random) -> Any:
    """Return what an entry point may load to: seldom the class of an adapter."""

    class Metaclass(type):
        def __getattr__(cls, name: str) -> Any:
            raise RuntimeError(name)

    def decline(self: Any, model: Any) -> None:
        return None

    def record(self: Any, p: Any, model: Any, collectives: Any, x: Any, positions: Any) -> Any:
        return None

    def fail(self: Any) -> None:
        raise chance.choice((ValueError("no"), RecursionError(), KeyError()))

    odd = (None, 1, "text", len, print, property(lambda self: 1 / 0), staticmethod(record), dict, lambda: 0, Unlikely())
    namespace: dict[str, Any] = {"decline": decline, "record": record}
    for name in chance.sample(("decline", "record", "take_inputs", "__init__"), chance.choice((0, 1, 1, 2))):
        namespace[name] = fail if name == "__init__" else chance.choice(odd)
    kind = Metaclass if chance.random() < 0.2 else type
    return chance.choice((kind("Adapter", (), namespace),) * 5 + odd)
