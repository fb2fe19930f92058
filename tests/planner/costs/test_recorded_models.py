"""What any registered adapter records can be planned by costs: it comes back from a cost file as it was."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from dbo_runtime.adapters.contract import ModelAdapter, record_program
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.op import COMM
from dbo_runtime.ir.policies import alternate
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.render import digest
from dbo_runtime.planner.costs.cost_file import format_costs, parse_costs
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost
from dbo_runtime.planner.costs.program_spec import build_program, describe_program
from dbo_runtime.planner.search.period import keep_few_layers
from tests.support.planner.machines import make_table
from tests.support.planner.recorded_models import (
    Collectives,
    Form,
    Part,
    list_adapters,
    list_encoders,
    make_encoder,
    record_forms,
)
from tests.support.planner.shop import do_nothing

ADAPTERS, ENCODERS = list_adapters(), list_encoders()


def strip(program: Program) -> Program:
    """Return a program as a file has it: without functions and names of outputs, and with layers from 0 on."""
    numbers: dict[int, int] = {}
    counted = count()
    for op in program.ops:
        if op.layer is not None and op.layer not in numbers:
            numbers[op.layer] = next(counted)
    ops = [
        replace(op, fn=do_nothing, declared_at="", layer=None if op.layer is None else numbers[op.layer])
        for op in program.ops
    ]
    return replace(program, ops=tuple(ops), named=())


def lower_two(program: Program) -> str:
    return digest(lower([program] * 2, alternate([program] * 2)))


def assert_comes_back(program: Program) -> None:
    """Write and read a cost file with the program."""
    costs: dict[str, Any] = {op.name: CommCost(0, 0, 1) if op.lane == COMM else ComputeCost() for op in program.ops}
    table = make_table(program, costs)
    again = parse_costs(format_costs(table))
    assert again == table
    assert again.digest == table.digest
    assert again.program == describe_program(program)
    found = build_program(again.program)
    assert strip(found) == strip(program)
    assert lower_two(found) == lower_two(strip(program))


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_programs_of_every_form_come_back_from_a_cost_file(name: str) -> None:
    forms, checked = [], set()
    for form, program in record_forms(ADAPTERS[name]):
        forms.append(form)
        text = repr(describe_program(program))  # half of the forms record what another one does
        if text not in checked:
            checked.add(text)
            assert_comes_back(program)
    assert {form.drafted for form in forms} == {form.side for form in forms} == {False, True}


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("experts", [None, {}], ids=["reduced", "alone"])
def test_programs_of_encoders_come_back_from_a_cost_file(name: str, experts: dict[str, bool] | None) -> None:
    form = Form(experts, chunks=False, side=False, drafted=False, stage="whole")
    program = record_program(ENCODERS[name], make_encoder(), Collectives(form))
    assert isinstance(program, Program)
    assert_comes_back(program)


def find_names(adapter: ModelAdapter) -> set[str]:
    return {op.name for _, program in record_forms(adapter) for op in program.ops}


@pytest.mark.slow
def test_the_forms_have_what_models_are_made_of() -> None:
    """So that these tests see each of it."""
    names = set[str]().union(*map(find_names, ADAPTERS.values()))
    assert names >= {"attention", "linear_attention", "keys", "slots", "chunk", "gather", "attn_gather", "attn_scatter"}
    assert names >= {"auxiliary", "auxiliary_gather", "add_features", "stage_gather", "stage_residual_gather"}
    assert names >= {"mlp", "moe", "gate", "sizes", "dispatch", "combine", "experts", "shared_experts", "merge"}
    assert names >= {"shared_scatter", "shared_gather", "mlp_scatter", "residual_gather", "streams", "chunk_ids"}


def test_a_drafted_program_is_planned_with_few_of_its_layers() -> None:
    """The layers after which hidden states are read stay."""
    form = Form(None, chunks=False, side=False, drafted=False, stage="whole")
    layers = [Part(self_attn=Part(), mlp=Part()) for _ in range(40)]
    decoder = Part(layers=layers, start_layer=0, end_layer=40, aux_hidden_state_layers=(2, 20, 37))
    program = record_program(ADAPTERS["dbo_models.dense:DenseAdapter"], Part(model=decoder), Collectives(form))
    assert isinstance(program, Program)
    few = keep_few_layers(program, 4)
    assert few is not None
    assert (few.kept, few.omitted) == (4, 13)
    assert sum(op.name == "auxiliary" for op in few.program.ops) == 3
    assert few.select([op.name == "auxiliary" for op in program.ops]) == [
        op.name == "auxiliary" for op in few.program.ops
    ]
