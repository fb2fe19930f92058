"""Parts of decoder layers that `dbo_models.layers` does not cover. docs/write-an-adapter.md shows each in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any

from dbo_models.collectives import record_reduce
from dbo_models.layers import Attend, WithoutReduce, call_attention, keep_reduce, record_divided
from dbo_runtime.adapter import Collectives
from dbo_runtime.program import ProgramBuilder, Value


@dataclass(frozen=True)
class BlockRecorder:
    """Declares blocks of layers: modules that end in an all-reduce.

    Attributes:
        p: builder of the micro-batch's program.
        collectives: the ranks' communication.
        positions: positions of the tokens [tokens].
        attend: calls an attention module.
    """

    p: ProgramBuilder
    collectives: Collectives
    positions: Value
    attend: Attend = call_attention

    def record_block(self, name: str, module: Callable[..., Any], *reads: Value) -> Value:
        """Declare a module as two ops: the module without its all-reduce, and `{name}_reduce`.

        Returns [tokens, hidden], reduced.
        """
        part = self.p.compute(name, self.collectives.without_reduce(module), *reads, token_wise=True)
        return self._reduce(name, part)

    def record_attention(self, attention: Any, x: Value) -> Value:
        """Declare attention [tokens, hidden] -> [tokens, hidden], and its all-reduce.

        Query and key norms, sliding windows and soft caps are inside the module, so they need no declaration.
        """
        return self._reduce("attention", self._record_attention(attention, x, self.collectives.without_reduce))

    def record_parallel(self, attention: Any, mlp: Any, x: Value, x_of_mlp: Value | None = None) -> Value:
        """Declare attention and MLP whose partial sums are added before one all-reduce, as in Cohere's layers.

        Both modules must leave their reduce to the layer (`reduce_results=False`). *x* is the output of the shared
        norm. If attention and MLP have a norm each, *x* is the output of attention's and *x_of_mlp* of the MLP's
        [tokens, hidden].

        Returns the sum of both [tokens, hidden], reduced.
        """
        attended = self._record_attention(attention, x, keep_reduce)
        part = self.p.compute("mlp", mlp, x if x_of_mlp is None else x_of_mlp, token_wise=True)
        return self._reduce("parallel", self.p.compute("parallel_add", add, attended, part, token_wise=True))

    def _record_attention(self, attention: Any, x: Value, without_reduce: WithoutReduce) -> Value:
        module = without_reduce(partial(self.attend, attention))
        divided = record_divided(self.collectives, attention, self.attend, without_reduce)
        attended: Value = self.p.compute("attention", module, self.positions, x, ordered=True, divided=divided)
        return attended

    def _reduce(self, name: str, part: Value) -> Value:
        reduced: Value = record_reduce(self.p, f"{name}_reduce", self.collectives, part)
        return reduced


def get_decoder(model: Any) -> Any:
    """Return the decoder of a language model, also inside a model that sees images."""
    return getattr(model, "language_model", model).model


def record_layers(
    p: ProgramBuilder, decoder: Any, record_layer: Callable[[Any, Value], Value], norm: Callable[[Any], Any], x: Value
) -> Value:
    """Declare all layers of a decoder, and its last norm, which *norm* calls; return the normed hidden states.

    *record_layer* declares one layer: a layer and its input -> its output.
    """
    for index, layer in enumerate(decoder.layers):
        with p.layer(index):
            x = record_layer(layer, x)
    hidden: Value = p.compute("final_norm", norm, x, token_wise=True)
    return hidden


def record_add(p: ProgramBuilder, name: str, residual: Value, x: Value, scale: float | None = None) -> Value:
    """Declare the addition of a block's result, times *scale* if given, to the residual [tokens, hidden]."""
    function = add if scale is None else partial(_add_scaled, scale)
    total: Value = p.compute(name, function, residual, x, token_wise=True)
    return total


def record_scale(p: ProgramBuilder, name: str, x: Value, scale: float) -> Value:
    """Declare a multiplication by *scale*, [tokens, hidden] -> [tokens, hidden], such as that of embedded tokens."""
    scaled: Value = p.compute(name, partial(_scale, scale), x, token_wise=True)
    return scaled


def _add_scaled(scale: float, residual: Any, x: Any) -> Any:
    return residual + x * scale


def _scale(scale: float, x: Any) -> Any:
    return x * scale
