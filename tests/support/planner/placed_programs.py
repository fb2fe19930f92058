"""A decoder with a mixture of experts on plain numbers, whose ops may run on the side lane."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dbo_models.experts import ExpertsRecorder
from dbo_runtime.ir.program import Program, ProgramBuilder

LAYERS = 3


def make_experts(may_move_to_side: bool, run: Callable[..., Any] = lambda fn: fn) -> SimpleNamespace:
    """Return a mixture of experts on plain numbers; *run* wraps each part."""
    parts: dict[str, Callable[..., Any]] = {
        "gate": lambda x: x % 5,
        "dispatch": lambda x, routing: (x * 3 + routing, routing),
        "shared_experts": lambda x: x * 7,
        "experts": lambda received: received * 11 + 1,
        "combine": lambda routed, back: routed + back,
        "merge": lambda routed, *shared: routed - sum(shared),
    }
    wrapped = {name: run(fn) for name, fn in parts.items()}
    absent = dict.fromkeys(("exchanges_sizes", "is_fused", "is_sequence_parallel", "reduces_shared_experts"), False)
    return SimpleNamespace(**absent, has_shared_experts=True, may_move_to_side=may_move_to_side, **wrapped)


def record(may_move_to_side: bool = True, has_side: bool = True, run: Callable[..., Any] = lambda fn: fn) -> Program:
    """Return a decoder of data parallel attention, with keys concurrent to queries, and a mixture of experts."""
    p, experts = ProgramBuilder(has_side), make_experts(may_move_to_side, run)
    x = p.input("x")
    for index in range(LAYERS):
        with p.layer(index):
            keys = p.side("keys", run(lambda x: x + 1), x)
            queries = p.compute("queries", run(lambda x: x * 2), x)
            attended = p.compute("attention", run(lambda q, k: q * k % 1009), queries, keys, ordered=True)
            routed = ExpertsRecorder(p, None, experts).record(attended)
            x = p.compute("add", run(lambda x, routed: x + routed), attended, routed)
    return p.build(x)
