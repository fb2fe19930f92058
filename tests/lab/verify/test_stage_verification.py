"""Programs of two stages, verified on the whole model: right ones pass, and a wrong one is found. No engine needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.sequence import IntermediateTensors

from dbo_models.layers import LayerRecorder
from dbo_models.toy import ToyCollectives
from dbo_runtime.adapters.communication import Collectives
from dbo_runtime.adapters.contract import record_program
from dbo_runtime.decline import Decline
from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.values import Value
from dbo_runtime.lab.verify.stage_verification import record_stages
from dbo_runtime.lab.verify.watched_run import run_ops
from tests.support.decoders import LAYERS, make_decoder

X, POSITIONS = torch.arange(1.0, 9).reshape(4, 2), torch.arange(4.0)[:, None]


class Model:
    """A whole model around a decoder of plain arithmetic."""

    def __init__(self) -> None:
        self.decoder = make_decoder()

    def modules(self) -> list[Any]:
        return [self, self.decoder]

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter([X])

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: Any, device: Any) -> IntermediateTensors:
        return IntermediateTensors({name: torch.zeros(batch_size, 2) for name in ("hidden_states", "residual")})


class Adapter:
    """Takes stages, and makes a mistake of its own on the second if told to."""

    takes_stages = True

    def __init__(self, mistake: str = "") -> None:
        self.mistake = mistake

    def decline(self, model: Any) -> Decline | None:
        return None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        decoder = model.decoder
        first, own = decoder.start_layer, (decoder.start_layer, decoder.end_layer)
        if self.mistake == "forgets" and not first:
            p.output = lambda name, value: None  # type: ignore[method-assign]
        if self.mistake == "begins late" and first:
            decoder.start_layer += 1
        if self.mistake == "does not norm" and first:
            decoder.norm = lambda x, residual: (x, residual)
        try:
            return LayerRecorder(p, collectives, positions).record_decoder(decoder, x)
        finally:
            decoder.start_layer, decoder.end_layer = own


def try_stages(adapter: Any) -> tuple[Op, float] | None:
    model = Model()
    program = record_program(Adapter(), model, ToyCollectives())
    stages = record_stages(adapter, model, ToyCollectives())
    assert stages is not None
    assert (model.decoder.start_layer, model.decoder.end_layer) == (0, LAYERS), "it was not left as it was"
    return stages.compare(program, run_ops(program, (X, POSITIONS)), X, POSITIONS)


def test_stages_that_do_what_the_whole_model_does_pass() -> None:
    assert try_stages(Adapter()) is None


@pytest.mark.parametrize(("mistake", "op"), [("begins late", "L4.attn_norm"), ("does not norm", "final_norm")])
def test_the_first_op_that_differs_is_named(mistake: str, op: str) -> None:
    found = try_stages(Adapter(mistake))
    assert found is not None
    assert found[0].label == op
    assert found[1] > 1e-3


def test_an_adapter_that_forgets_what_it_hands_on_breaks_its_contract() -> None:
    with pytest.raises(
        ProgramError, match=r"Adapter: the program is not .* send hidden_states, residual; on stage 0 of 2"
    ):
        record_stages(Adapter("forgets"), Model(), ToyCollectives())


def test_there_is_nothing_to_try_without_stages_or_layers() -> None:
    without_stages, plain, small = Adapter(), Model(), Model()
    without_stages.takes_stages = False
    del plain.decoder.start_layer
    small.decoder = make_decoder()
    small.decoder.layers = small.decoder.layers[:1]
    for adapter, model in ((without_stages, Model()), (Adapter(), plain), (Adapter(), small)):
        assert record_stages(adapter, model, ToyCollectives()) is None
