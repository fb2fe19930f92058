"""The layer hooks of a KV connector in a split step: for any order of calls, those of an unsplit step or an error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm import forward_context
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group, kv_transfer_state
from vllm.distributed.kv_transfer.kv_transfer_state import is_v1_kv_transfer_group

from dbo_runtime.decline import Decline
from dbo_runtime.errors import TransferError
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.policies import alternate, layered
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.schedule import Instruction, Issue, Schedule
from dbo_runtime.vllm_plugin.api.kv_agent import replace_agent
from dbo_runtime.vllm_plugin.context.layer_transfers import check_turns, transfer_once

LAYERS = ("model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn")


class Agent:
    """A connector that keeps its calls."""

    role = "worker"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def has_connector_metadata(self) -> bool:
        return True

    def wait_for_layer_load(self, layer: str) -> None:
        self.calls.append(("wait", layer))

    def save_kv_layer(self, layer: str, cache: Any, metadata: Any, **kwargs: Any) -> None:
        self.calls.append(("save", layer, cache, metadata, kwargs))


class AscendAgent(Agent):
    """One with the hook of vllm-ascend."""

    def on_kv_cache_written(self, layer: str) -> None:
        self.calls.append(("written", layer))


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    own, context = kv_transfer_state._KV_CONNECTOR_AGENT, forward_context._forward_context
    yield
    kv_transfer_state._KV_CONNECTOR_AGENT, forward_context._forward_context = own, context


class Step:
    """A split step whose layers call the hooks as vLLM's or vllm-ascend's attention does."""

    def __init__(self, agent: Agent, micro_batches: int, padding: int = 0) -> None:
        kv_transfer_state._KV_CONNECTOR_AGENT = agent
        self.whole = SimpleNamespace(attn_metadata={layer: f"whole {layer}" for layer in LAYERS})
        self.contexts = [
            SimpleNamespace(attn_metadata={layer: f"{layer} of {number}" for layer in LAYERS})
            for number in range(micro_batches)
        ] + [SimpleNamespace(attn_metadata=None) for _ in range(padding)]

    def attend(self, layer: str, number: int, ascend: bool = False, waits: bool = True) -> None:
        context = forward_context._forward_context = self.contexts[number]
        connector: Any = get_kv_transfer_group()
        if waits:
            connector.wait_for_layer_load(layer)
        written = getattr(connector, "on_kv_cache_written", None)
        if ascend and written is not None:
            written(layer)
        metadata = context.attn_metadata
        assert metadata is not None
        connector.save_kv_layer(layer, f"cache {layer}", metadata if ascend else metadata[layer], extra=number)

    def run(self, order: Sequence[tuple[str, int]], **how: Any) -> None:
        with transfer_once(self.whole, self.contexts):  # type: ignore[arg-type]
            for layer, number in order:
                self.attend(layer, number, **how)


def in_turn(micro_batches: int) -> list[tuple[str, int]]:
    return [(layer, number) for layer in LAYERS for number in range(micro_batches)]


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("padding", [0, 2])
def test_each_layer_waits_once_first_and_is_saved_once_last_with_the_metadata_of_the_step(
    micro_batches: int, padding: int
) -> None:
    agent = Agent()
    Step(agent, micro_batches, padding).run(in_turn(micro_batches))
    last = {"extra": micro_batches - 1}
    assert agent.calls == [
        call for one in LAYERS for call in (("wait", one), ("save", one, f"cache {one}", f"whole {one}", last))
    ]


def test_the_hooks_of_vllm_ascend_are_called_alike_with_the_metadata_of_all_layers() -> None:
    agent = AscendAgent()
    step = Step(agent, 2)
    step.run(in_turn(2), ascend=True)
    assert [call[:2] for call in agent.calls] == [(hook, one) for one in LAYERS for hook in ("wait", "written", "save")]
    assert all(call[3] is step.whole.attn_metadata for call in agent.calls if call[0] == "save")


def test_micro_batches_of_decodes_alone_need_not_wait() -> None:
    agent = AscendAgent()
    step = Step(agent, 2)
    with transfer_once(step.whole, step.contexts):  # type: ignore[arg-type]
        for layer in LAYERS:
            step.attend(layer, 0, ascend=True, waits=False)  # as vllm-ascend's latent attention
            step.attend(layer, 1, ascend=True)
    assert [call[:2] for call in agent.calls] == [(hook, one) for one in LAYERS for hook in ("wait", "written", "save")]


def test_a_connector_without_the_hook_of_vllm_ascend_is_not_told() -> None:
    agent = Agent()
    Step(agent, 2).run(in_turn(2), ascend=True)
    assert {call[0] for call in agent.calls} == {"wait", "save"}


def test_vllm_takes_the_stand_in_for_a_connector_and_finds_the_rest_of_it() -> None:
    step = Step(agent := Agent(), 2)
    with transfer_once(step.whole, step.contexts):  # type: ignore[arg-type]
        stand_in: Any = get_kv_transfer_group()
        assert stand_in is not agent
        assert is_v1_kv_transfer_group()
        assert stand_in.has_connector_metadata()
        assert stand_in.role == "worker"
    assert get_kv_transfer_group() is agent


@given(st.data())
def test_any_order_of_attention_gives_the_calls_of_an_unsplit_step_or_an_error(data: st.DataObject) -> None:
    """The oracle: layers come one after the other, each once, and in each the micro-batches in their order."""
    micro_batches = data.draw(st.integers(1, 3))
    order = in_turn(micro_batches)
    for _ in range(data.draw(st.integers(0, 2))):  # few changes, so that many orders are in turn or nearly so
        kind = data.draw(st.sampled_from(["swap", "drop", "repeat"]))
        at, other = (data.draw(st.integers(0, len(order) - 1)) for _ in range(2))
        if kind == "swap":
            order[at], order[other] = order[other], order[at]
        elif kind == "repeat":
            order.insert(at, order[other])
        elif len(order) > 1:
            del order[at]
    turns = [(layer, [number for _, number in group]) for layer, group in groupby(order, key=lambda each: each[0])]
    layers = [layer for layer, _ in turns]
    complete = [numbers == [*range(micro_batches)] for _, numbers in turns]
    step = Step(agent := Agent(), micro_batches)
    if all(complete) and len(set(layers)) == len(layers):
        step.run(order)
        assert [call[:2] for call in agent.calls] == [(hook, one) for one in layers for hook in ("wait", "save")]
    else:
        with pytest.raises(TransferError, match="Agent: "):
            step.run(order)
        saved = [call[1] for call in agent.calls if call[0] == "save"]
        assert saved == layers[: len(saved)]
        for _, numbers in turns[: len(saved)]:  # saved when all had attended; an error may have come after that
            assert numbers[:micro_batches] == [*range(micro_batches)]
    assert kv_transfer_state._KV_CONNECTOR_AGENT is agent


def test_a_layer_that_the_step_does_not_have_is_refused_by_name() -> None:
    agent, layer = Agent(), "model.layers.9.attn"
    step = Step(agent, 2)
    for context in step.contexts:
        context.attn_metadata = {layer: "metadata"}
    with pytest.raises(TransferError, match=f"Agent: wait_for_layer_load of '{layer}', a layer that has no"):
        step.run([(layer, 0)])
    assert agent.calls == []


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([(0, 0), (0, 0)], "model.layers.0.attn by micro-batch 0, where 1 comes next"),
        ([(0, 1)], "model.layers.0.attn by micro-batch 1, where 0 comes next"),
        ([(0, 0), (1, 0)], "model.layers.1.attn before model.layers.0.attn was saved"),
        ([(0, 0), (0, 1), (0, 0)], "model.layers.0.attn, which is saved already"),
        ([(0, 0)], "the step ended before model.layers.0.attn was saved"),
    ],
)
def test_hooks_out_of_turn_are_refused_before_anything_is_saved(order: list[tuple[int, int]], message: str) -> None:
    agent = Agent()
    with pytest.raises(TransferError, match=f"Agent: .*{message}"):
        Step(agent, 2).run([(LAYERS[layer], number) for layer, number in order])
    assert sum(call[0] == "save" for call in agent.calls) == (len(order) > 2)


def test_a_hook_that_is_called_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(Agent(), 2)

    def wait_twice(layer: str, number: int) -> None:
        forward_context._forward_context = step.contexts[number]
        for _ in range(2):
            get_kv_transfer_group().wait_for_layer_load(layer)

    monkeypatch.setattr(step, "attend", wait_twice)
    with pytest.raises(TransferError, match=f"wait_for_layer_load of {LAYERS[0]} twice by micro-batch 0"):
        step.run(in_turn(2))


def test_an_error_in_between_keeps_its_type_and_the_connector_is_in_its_place_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = Agent()
    step = Step(agent, 2)
    attend = step.attend

    def fail(layer: str, number: int) -> None:
        if number == 1:
            raise MemoryError
        attend(layer, number)

    monkeypatch.setattr(step, "attend", fail)
    with pytest.raises(MemoryError):
        step.run(in_turn(2))
    assert get_kv_transfer_group() is agent
    assert agent.calls == [("wait", LAYERS[0])]


def test_without_a_connector_attention_calls_none() -> None:
    step = Step(agent := Agent(), 2)
    with replace_agent(None):
        assert not has_kv_transfer_group()
    assert get_kv_transfer_group() is agent
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    with transfer_once(step.whole, step.contexts):  # type: ignore[arg-type]
        assert not has_kv_transfer_group()


def record() -> Program:
    p = ProgramBuilder()
    x = p.input("x")
    for layer in range(3):
        with p.layer(layer):
            x = p.compute("attention", abs, x, ordered=True)
            x = p.comm("reduce", abs, x)
            x = p.compute("mlp", abs, x)
    return p.build(x)


@given(st.permutations([*range(3)] * 2))
def test_an_issue_order_is_declined_if_a_micro_batch_attends_too_early(ahead: list[int]) -> None:
    """*ahead* is which layer attends next; the first of each two is micro-batch 0's."""
    program = record()
    attention = [op for op in program.ops if op.name == "attention"]
    seen: list[int] = []
    instructions = []
    for layer in ahead:
        number = seen.count(layer)
        seen.append(layer)
        instructions.append(Instruction(Issue(number, program.ops.index(attention[layer])), attention[layer]))
    declined = check_turns(Schedule((program, program), tuple(instructions)))
    assert (declined is None) == (ahead == sorted(ahead))
    if declined is not None:
        assert declined == Decline("the KV connector takes one layer after the other", declined.detail)
        assert declined.detail == "DBO_POLICY=optimal and alternate issue them so"


def test_layers_that_do_not_communicate_are_issued_in_turn() -> None:
    """Dense layers, where experts are spread but nothing else is."""
    p = ProgramBuilder()
    x = p.input("x")
    for layer in range(3):
        with p.layer(layer):
            x = p.compute("attention", abs, x, ordered=True)
            x = p.compute("mlp", abs, x)
            x = p.comm("dispatch", abs, x) if layer == 2 else x
    two = [p.build(p.compute("norm", abs, x))] * 2
    assert check_turns(lower(two, alternate(two))) is not None
    assert check_turns(lower(two, layered(two))) is None
