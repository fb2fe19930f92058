"""Parts of decoder layers that `dbo_models.layers` does not cover. docs/write-an-adapter.md shows each in use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import add
from typing import Any

from dbo_models.collectives import record_reduce
from dbo_models.layers import Attend, call_attention
from dbo_runtime.adapter import Collectives
from dbo_runtime.program import ProgramBuilder, Value


def record_layers(
    p: ProgramBuilder,
    decoder: Any,
    record_layer: Callable[[Any, Value], Value],
    norm: Callable[[Any, Any], Any],
    x: Value,
) -> Value:
    """Declare all layers of a decoder, and its last norm, which *norm* calls; return the normed hidden states.

    *record_layer* declares one layer: a layer and its input -> its output.
    """
    for index, layer in enumerate(decoder.layers):
        with p.layer(index):
            x = record_layer(layer, x)
    hidden: Value = p.compute("final_norm", partial(norm, decoder.norm), x)
    return hidden


def record_block(
    p: ProgramBuilder, name: str, module: Callable[..., Any], collectives: Collectives, *reads: Value
) -> Value:
    """Declare a module that ends in an all-reduce as two ops: the module without its all-reduce, and `{name}_reduce`.

    Returns [tokens, hidden], reduced.
    """
    part = p.compute(name, collectives.without_reduce(module), *reads)
    return _reduce(p, name, collectives, part)


def record_attention_block(
    p: ProgramBuilder,
    attention: Any,
    collectives: Collectives,
    positions: Value,
    x: Value,
    attend: Attend = call_attention,
) -> Value:
    """Declare attention [tokens, hidden] -> [tokens, hidden], and its all-reduce.

    Query and key norms, sliding windows and soft caps are inside the module, so they need no declaration.
    """
    module = collectives.without_reduce(partial(attend, attention))
    return _reduce(p, "attention", collectives, p.compute("attention", module, positions, x, ordered=True))


def record_parallel_blocks(
    p: ProgramBuilder,
    attention: Any,
    mlp: Any,
    collectives: Collectives,
    positions: Value,
    x: Value,
    x_of_mlp: Value | None = None,
    attend: Attend = call_attention,
) -> Value:
    """Declare attention and MLP whose partial sums are added before one all-reduce, as in Cohere's and Falcon's layers.

    Both modules must leave their reduce to the layer (`reduce_results=False`). *x* is the output of the shared norm. If
    attention and MLP have a norm each, *x* is the output of attention's and *x_of_mlp* of the MLP's [tokens, hidden].

    Returns the sum of both [tokens, hidden], reduced.
    """
    attended = p.compute("attention", partial(attend, attention), positions, x, ordered=True)
    part = p.compute("mlp", mlp, x if x_of_mlp is None else x_of_mlp)
    both = p.compute("parallel_add", add, attended, part)
    return _reduce(p, "parallel", collectives, both)


def record_add(p: ProgramBuilder, name: str, residual: Value, x: Value, scale: float | None = None) -> Value:
    """Declare the addition of a block's result, times *scale* if given, to the residual [tokens, hidden]."""
    function = add if scale is None else partial(_add_scaled, scale)
    total: Value = p.compute(name, function, residual, x)
    return total


def record_scale(p: ProgramBuilder, name: str, x: Value, scale: float) -> Value:
    """Declare a multiplication by *scale*, [tokens, hidden] -> [tokens, hidden], such as that of embedded tokens."""
    scaled: Value = p.compute(name, partial(_scale, scale), x)
    return scaled


def _reduce(p: ProgramBuilder, name: str, collectives: Collectives, part: Value) -> Value:
    reduced: Value = record_reduce(p, f"{name}_reduce", collectives, part)
    return reduced


def _add_scaled(scale: float, residual: Any, x: Any) -> Any:
    return residual + x * scale


def _scale(scale: float, x: Any) -> Any:
    return x * scale
