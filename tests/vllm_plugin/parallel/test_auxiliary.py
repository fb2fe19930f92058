"""Auxiliary hidden states, which a drafter reads: returned split as unsplit, checked, and declined where missing."""

from __future__ import annotations

from functools import partial
from operator import mul
from typing import Any

import pytest
import torch

from dbo_runtime.adapters.contract import name_auxiliary
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices.virtual import VirtualDevice
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import SplitError
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.vllm_plugin.api.speculation import get_auxiliary_layers
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL, Stage
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from tests.support.vllm.forwards import IDS, ONE_RANK, POSITIONS, Lines, Splitter, run
from tests.support.vllm.split_forwards import assemble

LAYERS = (1, 3)
STAGE = Stage(auxiliary=tuple(map(name_auxiliary, LAYERS)))


class Model:
    """Returns its hidden states times the number of layers as well."""

    slip = 0.0

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids[:, None] * torch.ones(2)

    def forward(self, ids: Any, positions: Any, handed: Any = None, embeds: Any = None) -> Any:
        hidden = self.embed_input_ids(ids) + positions[:, None]
        return hidden, [hidden * layers + self.slip for layers in LAYERS]


def add_positions(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return x + positions[:, None]


def record(layers: tuple[int, ...] = LAYERS) -> Program:
    p = ProgramBuilder()
    hidden = p.compute("add", add_positions, p.input("x"), p.input("positions", token_dim=-1))
    for count in layers:
        p.output(name_auxiliary(count), p.compute(f"after_{count}", partial(mul, count), hidden))
    return p.build(hidden)


def make_forward(model: Model, check: bool) -> SplitForward:
    config = RuntimeConfig(mode="always", check=check, min_tokens=1, min_prefill_tokens=0)
    runtime = MicroBatchRuntime(record(), VirtualDevice(lambda step: 1.0), config, Lines())
    agreement = Agreement(ONE_RANK)
    decider = StepDecider(runtime, Splitter(), agreement, "network")
    return assemble(model, decider, agreement, stage=STAGE)


@pytest.mark.parametrize("check", [False, True])
def test_a_split_step_returns_what_vllm_expects(check: bool) -> None:
    expected, auxiliary = Model().forward(IDS, POSITIONS)
    forward = make_forward(Model(), check)
    hidden, found = run(forward)
    assert forward.runtime.statistics.split == 1
    assert isinstance(found, list)
    assert torch.equal(hidden, expected)
    assert all(torch.equal(one, other) for one, other in zip(found, auxiliary, strict=True))


def test_the_check_finds_a_difference_in_them() -> None:
    model = Model()
    model.slip = 500.0
    with pytest.raises(SplitError, match="split and unsplit auxiliary hidden states 0 differ"):
        run(make_forward(model, check=True))


@pytest.mark.parametrize(
    ("stage", "layers", "missing"),
    [(STAGE, LAYERS, None), (WHOLE_MODEL, (), None), (STAGE, (1,), [3]), (STAGE, (), LAYERS)],
)
def test_a_program_without_those_that_the_drafter_reads_is_declined(
    stage: Stage, layers: tuple[int, ...], missing: Any
) -> None:
    names = missing and ", ".join(map(name_auxiliary, missing))
    reason = "its adapter does not return the hidden states that the drafter reads"
    assert stage.check_program(record(layers)) == (missing and Decline(reason, names))


def test_a_model_says_after_which_layers_it_returns_them() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Sequential())
    assert get_auxiliary_layers(model) == ()
    model[1].aux_hidden_state_layers = (3, 1)
    assert get_auxiliary_layers(model) == (1, 3)
