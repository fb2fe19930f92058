"""Collectives of tensor parallel ranks, as ops on the comm lane."""

from __future__ import annotations

from dbo_runtime.adapter import Collectives
from dbo_runtime.program import ProgramBuilder, Value


def record_reduce(p: ProgramBuilder, name: str, collectives: Collectives, x: Value) -> Value:
    """Declare the all-reduce of a module that ran without it, if results have to be reduced."""
    reduced: Value = (
        p.comm(name, collectives.all_reduce, x, overwrites=(x,), token_wise=True) if collectives.reduces else x
    )
    return reduced


def record_gather(
    p: ProgramBuilder,
    name: str,
    collectives: Collectives,
    x: Value,
    tokens: Value | None,
    token_wise: bool = True,
) -> Value:
    """Declare the all-gather of a chunk, [chunk, hidden] -> [tokens, hidden]. No chunk if *tokens* is None.

    It is *token_wise* if each nano-batch has a chunk of its own.
    """
    gathered: Value = x if tokens is None else p.comm(name, collectives.all_gather, x, tokens, token_wise=token_wise)
    return gathered
