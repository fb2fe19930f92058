"""Tries an adapter's programs of two stages of a pipeline on a model that is whole, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from vllm.sequence import IntermediateTensors

from dbo_runtime.adapter import POSITIONS, ModelAdapter, StageAdapter, X, name_adapter, record_program
from dbo_runtime.errors import ProgramError
from dbo_runtime.program import Op, Program, Value
from dbo_runtime.vllm_plugin.parallel.stage import HIDDEN, Stage, take_inputs
from dbo_runtime.vllm_plugin.verify.results import TOLERANCE, compute_relative_error, run_ops


class StageVerification(NamedTuple):
    """The programs of a first and a second stage, of about half of the layers each."""

    first: Program
    second: Program

    def compare(
        self, program: Program, whole: dict[Value, Any], x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[Op, float] | None:
        """Return the first op whose results are not those that the whole model's *program* gave."""
        wanted = {op.label: [whole[value] for value in op.writes] for op in program.ops}
        before = run_ops(self.first, self.first.order_inputs({X: x.clone(), POSITIONS: positions}))
        results = (before[value].clone() for value in self.first.outputs)
        handed = IntermediateTensors(dict(zip((HIDDEN, *self.first.named), results, strict=True)))
        given = {**take_inputs(self.second, handed), POSITIONS: positions}
        after = run_ops(self.second, self.second.order_inputs(given))
        for stage, found in ((self.first, before), (self.second, after)):
            for op in stage.ops:
                apart = _measure(wanted.get(op.label), [found[value] for value in op.writes])
                if apart > TOLERANCE:
                    return op, apart
        apart = _measure([whole[program.outputs[0]]], [after[self.second.outputs[0]]])
        return (self.second.ops[-1], apart) if apart > TOLERANCE else None


def record_stages(
    adapter: ModelAdapter, model: Any, collectives: Any, has_side: bool = False
) -> StageVerification | None:
    """Return the programs of two stages; None if the adapter takes none, or the model is not made of layers.

    Raises:
        ProgramError: if the adapter takes stages, but not what they hand over.
    """
    decoder = next((part for part in model.modules() if hasattr(part, "start_layer")), None)
    if not (isinstance(adapter, StageAdapter) and adapter.takes_stages) or decoder is None or len(decoder.layers) < 2:
        return None
    count = len(decoder.layers)
    weight = next(model.parameters())
    empty = model.make_empty_intermediate_tensors(batch_size=1, dtype=weight.dtype, device=weight.device)
    programs = []
    for number, layers in enumerate((range((count + 1) // 2), range((count + 1) // 2, count))):
        with _as_stage(decoder, layers):
            programs.append(record_program(adapter, model, collectives, has_side))
        mismatch = Stage(number, 2, layers, tuple(empty.tensors)).check_program(programs[-1])
        if mismatch is not None:
            raise ProgramError(f"{name_adapter(adapter)}: {mismatch}")
    return StageVerification(*programs)


@contextmanager
def _as_stage(decoder: Any, layers: range) -> Iterator[None]:
    """Let a whole decoder look like a stage meanwhile."""
    kept = decoder.start_layer, decoder.end_layer
    decoder.start_layer, decoder.end_layer = layers.start, layers.stop
    try:
        yield
    finally:
        decoder.start_layer, decoder.end_layer = kept


def _measure(wanted: list[Any] | None, found: list[Any]) -> float:
    """Return by how much an op's results differ; 0 where they are no tensors, or the whole model has no such op."""
    pairs = zip(wanted or (), found, strict=False)
    tensors = [pair for pair in pairs if all(isinstance(item, torch.Tensor) for item in pair)]
    return max((compute_relative_error(one, other) for other, one in tensors), default=0.0)
