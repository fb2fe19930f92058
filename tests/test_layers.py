"""A decoder that adapters share, complete and in stages of a pipeline, on plain numbers."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_models.layers import LayerRecorder, check_parts, get_layers
from dbo_models.toy import ToyCollectives
from dbo_runtime.adapters.contract import name_auxiliary
from dbo_runtime.decline import Decline
from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor, run_sequential
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate, sequential
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Issue
from dbo_runtime.ir.validate import validate
from tests.support.decoders import LAYERS, Missing, Norm, make_decoder, make_layer

GIVEN = (3, 7)  # x and positions


def record(decoder: Any, features: int = 0) -> Program:
    p = ProgramBuilder()
    x, positions = p.input("x"), p.input("positions", token_dim=-1)
    added = [p.compute(f"feature{number}", lambda x, n=number: x * 0 + 11 + n, x) for number in range(features)]
    return p.build(LayerRecorder(p, ToyCollectives(), positions).record_decoder(decoder, x, added))


def run(program: Program, *given: int) -> dict[str, int]:
    """Run a program; return what it gives by the names by which stages hand it over."""
    (outputs,) = run_sequential([program], [given])
    return dict(zip(("hidden_states", *program.named), outputs, strict=True))


FULL_MODEL = run(record(make_decoder()), *GIVEN)


@pytest.mark.parametrize("bounds", [(1,), (3,), (LAYERS - 1,), (1, 3), (2, 3, 4), (1, 2, 3, 4)])
def test_stages_one_after_the_other_give_what_the_whole_model_does(bounds: tuple[int, ...]) -> None:
    edges = (0, *bounds, LAYERS)
    given: dict[str, int] = {"hidden_states": GIVEN[0]}
    for start, end in pairwise(edges):
        program = record(make_decoder(start, end))
        names = [value.name for value in program.inputs]
        assert names == ["x", "positions", *(["residual"] if start else [])]
        assert program.named == (("residual",) if end < LAYERS else ())
        assert {op.layer for op in program.ops} - {None} == set(range(start, end))
        given = run(program, given["hidden_states"], GIVEN[1], *(given[name] for name in names[2:]))
    assert given == FULL_MODEL


def test_what_is_added_to_the_first_layers_is_added_by_their_number() -> None:
    """A first stage has them all: vLLM ensures that."""
    assert run(record(make_decoder(), features=2), *GIVEN) != FULL_MODEL
    first = record(make_decoder(0, 3), features=2)
    assert [op.layer for op in first.ops if op.name == "add_features"] == [0, 1]


@pytest.mark.parametrize("layers", [(1,), (2, 4), (0, 3), (1, LAYERS), tuple(range(LAYERS + 1))], ids=str)
def test_hidden_states_between_layers_are_returned_for_a_drafter(layers: tuple[int, ...]) -> None:
    """Those after n layers are what a stage of n layers would hand on, with its residual."""
    decoder = make_decoder()
    decoder.aux_hidden_state_layers = layers
    found = run(record(decoder), *GIVEN)
    assert found.pop("hidden_states") == FULL_MODEL["hidden_states"]
    expected = {name_auxiliary(0): GIVEN[0]}
    for count in range(1, LAYERS + 1):
        decoder = make_decoder(0, count)
        decoder.layers.append(Missing(LAYERS))  # so that the last layer has no final norm
        expected[name_auxiliary(count)] = sum(run(record(decoder), *GIVEN).values())
    assert found == {name_auxiliary(count): expected[name_auxiliary(count)] for count in layers}


def test_a_decoder_without_stages_is_the_whole_model() -> None:
    layers = [make_layer(number) for number in range(LAYERS)]
    plain = SimpleNamespace(layers=layers, norm=Norm(7))
    assert get_layers(plain) == dict(enumerate(layers))
    assert run(record(plain), *GIVEN) == FULL_MODEL


def test_only_the_layers_that_are_here_have_to_be_known() -> None:
    decoder = make_decoder(2, 4)
    known = {type(part).__name__ for part in (decoder, decoder.layers[2].mlp)}
    assert check_parts(decoder, frozenset(known)) is None
    assert check_parts(decoder, frozenset()) == Decline("its parts are not known", "SimpleNamespace, function")


class LatentParts:
    """Latent attention on plain numbers, with a cache that attention reads back."""

    def __init__(self, has_latent: bool) -> None:
        self.has_latent = has_latent
        self.cache: list[int] = []

    def get_slots(self) -> int:
        return 1000

    def project(self, x: int) -> int:
        return x * 3

    def write_keys(self, latent: int, positions: int, slots: int) -> tuple[int, int]:
        self.cache.append(latent + slots)
        return latent * 2, latent + positions

    def make_queries(self, latent: int, positions: int) -> int:
        return latent * 5 + positions

    def attend(self, queries: int, keys: int, rotary: int) -> int:
        return queries + keys * rotary + sum(self.cache)

    def project_out(self, attended: int) -> int:
        return attended * 7

    def __call__(self, positions: int, x: int) -> int:
        """Attend in one go."""
        latent = self.project(x) if self.has_latent else x
        keys = self.write_keys(latent, positions, self.get_slots())
        return self.project_out(self.attend(self.make_queries(latent, positions), *keys))


class DecomposesLatent(ToyCollectives):
    def decompose_attention(self, attention: Any) -> Any:
        return attention if isinstance(attention, LatentParts) else None


def make_latent_decoder(has_latent: bool) -> SimpleNamespace:
    decoder = make_decoder()
    for layer in decoder.layers:
        layer.self_attn = LatentParts(has_latent)
    return decoder


def record_concurrent(decoder: Any, has_side: bool) -> Program:
    p = ProgramBuilder(has_side)
    x, positions = p.input("x"), p.input("positions", token_dim=-1)
    return p.build(LayerRecorder(p, DecomposesLatent(), positions).record_decoder(decoder, x))


@pytest.mark.parametrize("has_latent", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_latent_attention_with_concurrent_keys_gives_what_it_gives_as_one_op(has_latent: bool, count: int) -> None:
    """Any pieces of a batch see what the pieces before them wrote, whichever lane writes it."""
    inputs = [(3 + number, 7 + number) for number in range(count)]
    unsplit = record_concurrent(make_latent_decoder(has_latent), has_side=False)
    expected = run_sequential([unsplit] * count, inputs)
    device = CpuDevice()
    for policy in (sequential, alternate):
        program = record_concurrent(make_latent_decoder(has_latent), has_side=True)
        schedule = lower([program] * count, policy([program] * count))
        validate(schedule)
        assert Executor(schedule, device, EventTable(device)).run(inputs) == expected
    device.close()


def test_keys_are_concurrent_to_queries_and_attention_waits_for_them() -> None:
    program = record_concurrent(make_latent_decoder(has_latent=True), has_side=True)
    first = [op for op in program.ops if op.layer == 0]
    names = ["attn_norm", "slots", "latent", "keys", "queries", "attention", "attn_out", "attn_reduce"]
    assert [op.name for op in first][: len(names)] == names
    assert {op.name for op in first if op.lane == "side"} == {"keys"}
    assert {op.name for op in first if op.ordered} == {"attention"}
    steps = {step.label: step for step in lower([program], sequential([program])).instructions}
    assert steps["L0.keys/0"].waits == (Issue(0, names.index("latent")),)
    assert not steps["L0.queries/0"].waits
    assert steps["L0.attention/0"].waits == (Issue(0, names.index("keys")),)


def test_attention_of_another_kind_stays_one_op_where_there_is_a_side_lane() -> None:
    program = record_concurrent(make_decoder(), has_side=True)
    assert program.lanes == ("compute", "comm")
    assert [op.name for op in program.ops][:3] == ["attn_norm", "attention", "attn_reduce"]
