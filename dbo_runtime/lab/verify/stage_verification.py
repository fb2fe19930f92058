"""Verify an adapter's programs for two pipeline stages, with a complete model on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.sequence import IntermediateTensors

from dbo_runtime.adapters.contract import POSITIONS, ModelAdapter, StageAdapter, X, name_adapter, record_program
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.values import Value
from dbo_runtime.lab.verify.results import TOLERANCE, compute_relative_error
from dbo_runtime.lab.verify.watched_run import run_ops
from dbo_runtime.vllm_plugin.parallel.collectives import ModelCollectives
from dbo_runtime.vllm_plugin.parallel.stage import HIDDEN, Stage, take_inputs

if TYPE_CHECKING:
    from vllm.model_executor.models.interfaces_base import VllmModel
    from vllm.model_executor.models.llama import LlamaModel


class StageVerification(NamedTuple):
    """The programs of a first and a second stage, each with about half of the layers."""

    first: Program
    second: Program

    def compare(
        self, program: Program, unsplit: dict[Value, Any], x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[Op, float] | None:
        """Return the first op whose results differ from those of the complete model's *program*, with the error."""
        expected = {op.label: [unsplit[value] for value in op.writes] for op in program.ops}
        before = run_ops(self.first, self.first.order_inputs({X: x.clone(), POSITIONS: positions}))
        results = (before[value].clone() for value in self.first.outputs)
        passed = IntermediateTensors(dict(zip((HIDDEN, *self.first.named), results, strict=True)))
        inputs = {**take_inputs(self.second, passed), POSITIONS: positions}
        after = run_ops(self.second, self.second.order_inputs(inputs))
        for stage, actual in ((self.first, before), (self.second, after)):
            for op in stage.ops:
                error = _compute_error([actual[value] for value in op.writes], expected.get(op.label))
                if error > TOLERANCE:
                    return op, error
        error = _compute_error([after[self.second.outputs[0]]], [unsplit[program.outputs[0]]])
        return (self.second.ops[-1], error) if error > TOLERANCE else None


def record_stages(
    adapter: ModelAdapter, model: VllmModel, collectives: ModelCollectives, has_side: bool = False
) -> StageVerification | None:
    """Return the programs of two stages; None if the adapter takes no stages, or the model has fewer than two layers.

    Raises:
        DeclineError: the adapter declines a stage.
        ProgramError: the adapter takes stages, but not the tensors that they send.
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
            program = record_program(adapter, model, collectives, has_side)
        if isinstance(program, Decline):
            raise DeclineError(program.reason, program.detail)
        decline = Stage(number, 2, layers, tuple(empty.tensors)).check_program(program)
        if decline is not None:
            raise ProgramError(f"{name_adapter(adapter)}: {decline}")
        programs.append(program)
    return StageVerification(*programs)


@contextmanager
def _as_stage(decoder: LlamaModel, layers: range) -> Iterator[None]:
    """In this context, a complete decoder (of any family with Llama's structure) looks like a stage."""
    kept = decoder.start_layer, decoder.end_layer
    decoder.start_layer, decoder.end_layer = layers.start, layers.stop
    try:
        yield
    finally:
        decoder.start_layer, decoder.end_layer = kept


def _compute_error(actual: list[Any], expected: list[Any] | None) -> float:
    """Return the largest relative error of an op's results; 0 if they are not tensors, or nothing is expected."""
    pairs = zip(actual, expected or (), strict=False)
    tensors = [pair for pair in pairs if all(isinstance(item, torch.Tensor) for item in pair)]
    return max((compute_relative_error(one, other) for one, other in tensors), default=0.0)
