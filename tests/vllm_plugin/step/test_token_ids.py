"""A program that takes token ids, and leaves data for another model, besides its result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbo_runtime.adapters.contract import INPUT_IDS, KEPT, OutputAdapter
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices.virtual import VirtualDevice
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL, take_kept
from dbo_runtime.vllm_plugin.step.arguments import StepArguments
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from tests.support.vllm.forwards import IDS, ONE_RANK, POSITIONS, Lines, Splitter, run
from tests.support.vllm.split_forwards import assemble


class Model:
    """Adds token ids to embedded tokens, and leaves twice the embedded tokens in a buffer."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(len(IDS), 1)

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, None] * 0.5

    def forward(self, ids: Any, positions: Any, intermediate: Any = None, embeds: Any = None) -> Any:
        x = self.embed_input_ids(ids) if embeds is None else embeds
        return x if ids is None else x + ids[:, None]


class Adapter:
    """Declares that model."""

    def record(self, p: ProgramBuilder) -> Program:
        x, positions = p.input("x"), p.input("positions", token_dim=-1)
        ids = p.input(INPUT_IDS)
        kept = p.compute("double", lambda x, positions: x * 2, x, positions)
        x = p.compute("add", lambda x, ids: x + ids[:, None], x, ids)
        p.output(KEPT, kept)
        return p.build(p.comm("reduce", lambda x: x, x, overwrites=(x,)))

    def keep_output(self, model: Model, parts: Any) -> None:
        model.buffer.copy_(torch.cat(list(parts)))


def make_forward(model: Model, program: Program, adapter: Any = None) -> SplitForward:
    config = RuntimeConfig(mode="always", min_tokens=1, min_prefill_tokens=0)
    runtime = MicroBatchRuntime(program, VirtualDevice(lambda step: 1.0), config, Lines())
    agreement = Agreement(ONE_RANK)
    decider = StepDecider(runtime, Splitter(), agreement, "network")
    return assemble(model, decider, agreement, adapter)


def test_numbers_are_cut_with_their_tokens_and_what_is_kept_is_left_in_their_order() -> None:
    model, adapter = Model(), Adapter()
    program = adapter.record(ProgramBuilder())
    assert isinstance(adapter, OutputAdapter)
    assert WHOLE_MODEL.check_program(program) is None, "neither is what stages send each other"
    forward = make_forward(model, program, adapter)
    assert torch.equal(run(forward), model.forward(IDS, POSITIONS))
    assert forward.runtime.statistics.as_dict()["split"] == 1
    assert torch.equal(model.buffer, 2 * model.embed_input_ids(IDS))


@pytest.mark.parametrize(("ids", "detail"), [(None, "none"), (IDS[:3], "[3]")])
def test_a_step_without_the_numbers_of_its_tokens_runs_unsplit(ids: Any, detail: str) -> None:
    model = Model()
    forward = make_forward(model, Adapter().record(ProgramBuilder()))
    embeds = torch.ones(len(IDS), 1)
    if ids is None:
        assert torch.equal(run(forward, input_ids=None, inputs_embeds=embeds), embeds)
    decline = StepArguments(ids, POSITIONS, None, None, {}).check_input_ids()
    assert decline is not None
    assert (decline.reason, decline.detail) == (
        "layers choose experts by token ids, which are not given",
        detail,
    )


def test_outputs_without_the_kept_one_are_those_that_are_joined() -> None:
    program = Adapter().record(ProgramBuilder())
    outputs = [[torch.zeros(2), torch.ones(2)], [torch.zeros(3), torch.ones(3)]]
    joined, kept = take_kept(program, outputs)
    assert [len(each) for each in joined] == [1, 1]
    assert [part.tolist() for part in kept] == [[1, 1], [1, 1, 1]]
