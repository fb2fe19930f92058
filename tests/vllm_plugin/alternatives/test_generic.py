"""Models without an adapter: their own forward, stopped at each all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sequence import IntermediateTensors

from dbo_models.toy import ToyCollectives
from dbo_runtime.adapters.contract import StageAdapter, record_program
from dbo_runtime.engine.executor import run_sequential
from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.program import Program
from dbo_runtime.lab.verify.watched_run import run_watched
from dbo_runtime.observe.timeline import Timeline
from dbo_runtime.vllm_plugin.alternatives import generic
from dbo_runtime.vllm_plugin.alternatives.generic import Coroutine, GenericAdapter
from dbo_runtime.vllm_plugin.parallel.stage import Stage, name_results
from tests.support.vllm.engine import Engine
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.equivalence import run_cut
from tests.support.vllm.families import find_backend, make_family
from tests.support.vllm.family_checks import PREFILL_CUTS, PROMPTS, assert_cuts_answer_as_unsplit

LAYERS, RANKS = 3, 2
PARTS = (slice(0, 2), slice(2, 5))  # of five tokens


class Group:
    """Two ranks that hold the same, so that a sum is twice each part."""

    world_size = RANKS

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part * RANKS

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return part


class Model(torch.nn.Module):
    """Sums twice a layer, and keeps what it summed for later."""

    def __init__(self, group: Group, sums: int = 2) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(4))
        self.group, self.sums = group, sums

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]

    def forward(self, ids: Any, positions: torch.Tensor, intermediate: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in range(LAYERS):
            for number in range(self.sums):
                part = x @ self.weight + positions[:, None] * (layer + number)
                x = x + self.group.all_reduce(part) - part / 2
        return x


@pytest.fixture
def group() -> Group:
    return Group()


@pytest.fixture
def adapter(group: Group, monkeypatch: pytest.MonkeyPatch) -> GenericAdapter:
    monkeypatch.setattr(generic, "set_forward_context", lambda *args, **kwargs: nullcontext())
    model_config = SimpleNamespace(
        hf_text_config=SimpleNamespace(num_hidden_layers=LAYERS),
        get_hidden_size=lambda: 4,
        dtype=torch.float32,
        uses_mrope=False,
    )
    return GenericAdapter(group, SimpleNamespace(model_config=model_config))


def record(adapter: GenericAdapter, model: Model) -> Program:
    return record_program(adapter, model, ToyCollectives(RANKS))


def test_a_forward_becomes_parts_and_reduces(adapter: GenericAdapter, group: Group) -> None:
    program = record(adapter, Model(group))
    layer = [("part0", "compute"), ("reduce0", "comm"), ("part1", "compute"), ("reduce1", "comm")]
    expected = [(f"L{number}.{name}", lane) for number in range(LAYERS) for name, lane in layer]
    assert [(op.label, op.lane) for op in program.ops] == [*expected, ("tail", "compute")]
    assert all(op.ordered for op in program.ops if op.lane == "compute")


def test_micro_batches_in_turns_come_to_what_the_forward_does(adapter: GenericAdapter, group: Group) -> None:
    model = Model(group)
    program = record(adapter, model)
    inputs = [(torch.randn(tokens, 4), torch.arange(tokens)) for tokens in (3, 5)]
    wanted = [model.forward(None, positions, None, x) for x, positions in inputs]
    for (result,), unsplit in zip(run_sequential([program] * 2, inputs), wanted, strict=True):
        assert torch.allclose(result, unsplit)
    values: list[dict[Any, Any]] = [dict(zip(program.inputs, given, strict=True)) for given in inputs]
    for op in program.ops:  # op by op in turns, so that both are always on their way
        for own in values:
            result = op.fn(*(own[value] for value in op.reads))
            own.update(zip(op.writes, result if len(op.writes) > 1 else (result,), strict=True))
    for own, unsplit in zip(values, wanted, strict=True):
        assert torch.allclose(own[program.outputs[0]], unsplit)


class ScalingModel(Model):
    """Changes what it is given, and each sum, in place."""

    def forward(self, ids: Any, positions: torch.Tensor, intermediate: Any, x: torch.Tensor) -> torch.Tensor:
        x *= 2
        for _ in range(LAYERS * self.sums):
            x = self.group.all_reduce(x @ self.weight).mul_(0.5)
        return x


def test_a_forward_may_change_in_place_what_it_is_given(adapter: GenericAdapter, group: Group) -> None:
    program = record(adapter, ScalingModel(group))
    inputs = [(torch.randn(tokens, 4), torch.arange(tokens)) for tokens in (3, 5)]
    faults = run_watched([program] * 2, inputs).faults
    assert not [fault for fault in faults if fault.op.lane == "compute"]  # the toy's sums do compute


class StageModel(Model):
    """A stage of it, of which hidden states and what was embedded go to the next."""

    def __init__(self, group: Group, stage: Stage) -> None:
        super().__init__(group)
        self.stage = stage

    def forward(self, ids: Any, positions: torch.Tensor, handed: Any, x: Any) -> Any:
        assert (handed is None) == (x is not None) == self.stage.is_first
        embedded = x if handed is None else handed["embedded"]
        x = super().forward(ids, positions, None, embedded * 2 if handed is None else handed["hidden_states"])
        return x + embedded if self.stage.is_last else IntermediateTensors({"embedded": embedded, "hidden_states": x})


@pytest.mark.parametrize("number", range(3))
def test_a_stage_of_a_pipeline_takes_and_hands_on_by_name(adapter: GenericAdapter, group: Group, number: int) -> None:
    stage = Stage(number, 3, range(number * LAYERS, (number + 1) * LAYERS), ("embedded", "hidden_states"))
    model = StageModel(group, stage)
    adapter = GenericAdapter(group, adapter._vllm_config, stage)
    assert isinstance(adapter, StageAdapter)
    program = record(adapter, model)
    assert stage.check_program(program) is None
    assert {op.layer for op in program.ops} - {None} == set(stage.layers)
    x, positions, embedded = torch.randn(5, 4), torch.arange(5), torch.randn(5, 4)
    handed = None if stage.is_first else IntermediateTensors({"hidden_states": x, "embedded": embedded})
    unsplit = model.forward(None, positions, handed, x if stage.is_first else None)
    inputs = [(x[part], positions[part], *(() if stage.is_first else (embedded[part],))) for part in PARTS]
    split = stage.join(program, run_sequential([program] * 2, inputs))
    found, wanted = name_results(split), name_results(unsplit)
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name]) for name in wanted)


def test_the_group_is_as_it_was_between_parts(group: Group) -> None:
    coroutine = Coroutine(group, lambda x: group.all_reduce(x) + 1)
    assert coroutine.resume(torch.ones(1)) == 1
    assert "all_reduce" not in vars(group)
    assert not coroutine.has_ended
    assert coroutine.resume(torch.tensor([5.0])) == 6
    assert coroutine.has_ended


def test_what_a_forward_raises_comes_out_where_it_was_resumed(group: Group) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        group.all_reduce(x)
        raise ValueError("in the second part")

    coroutine = Coroutine(group, fail)
    coroutine.resume(torch.ones(1))
    with pytest.raises(ValueError, match="in the second part"):
        coroutine.resume(torch.ones(1))
    assert "all_reduce" not in vars(group)


@pytest.mark.parametrize(("sums", "words"), [(1, "fewer"), (3, "more")])
def test_a_forward_that_sums_another_number_of_times_is_refused(
    adapter: GenericAdapter, group: Group, sums: int, words: str
) -> None:
    model = Model(group)
    program = record(adapter, model)
    model.sums = sums
    with pytest.raises(ProgramError, match=f"{words} all-reduces than in the run in which they were counted"):
        run_sequential([program], [(torch.randn(2, 4), torch.arange(2))])


def test_a_forward_that_never_sums_or_communicates_otherwise_runs_unsplit(
    adapter: GenericAdapter, group: Group
) -> None:
    assert "sums nothing over ranks" in str(record(adapter, Model(group, sums=0)))
    model = Model(group)
    sum_only = model.forward
    model.forward = lambda *given: group.all_gather(sum_only(*given))  # type: ignore[method-assign]
    assert "a forward with other collectives (all_gather)" in str(record(adapter, model))


def test_a_forward_that_fails_with_a_few_tokens_runs_unsplit(adapter: GenericAdapter, group: Group) -> None:
    model = Model(group)
    model.forward = lambda *given: 1 / 0  # type: ignore[method-assign]
    assert "fails with a few tokens (2 tokens: ZeroDivisionError" in str(record(adapter, model))
    assert "all_reduce" not in vars(group)


def test_a_model_that_cannot_embed_outside_its_forward_runs_unsplit(adapter: GenericAdapter, group: Group) -> None:
    model = Model(group)
    model.embed_input_ids = lambda ids: model.lacking(ids)  # type: ignore[method-assign]
    said = str(record(adapter, model))
    assert "it does not embed tokens outside its forward" in said
    assert "has no attribute 'lacking'" in said
    assert "all_reduce" not in vars(group)


def test_without_greenlet_it_says_what_to_install(
    adapter: GenericAdapter, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generic, "find_spec", lambda name: None)
    assert "pip install 'dbo-runtime[generic]'" in str(adapter.decline(Model(group)))


def test_tokens_that_are_dispatched_and_a_single_rank_are_declined(adapter: GenericAdapter, group: Group) -> None:
    collectives = ToyCollectives(RANKS)
    collectives.reduces = False
    assert "tokens that are dispatched to experts" in str(record_program(adapter, Model(group), collectives))
    assert adapter.decline(Model(group)) is None
    group.world_size = 1
    assert "one rank sums nothing" in str(adapter.decline(Model(group)))


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> Iterator[Engine]:
    name = "GraniteForCausalLM"
    model = make_family(name, tmp_path_factory.mktemp(name))
    options = {"enable_prefix_caching": False, "attention_backend": find_backend(name)}
    with engines.start(2, share_cores(), model, {"DBO_GENERIC": "1"}, **options) as engine:
        yield engine


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_without_an_adapter_answers_split_as_unsplit(granite: Engine) -> None:
    assert_cuts_answer_as_unsplit(granite)
    granite.llm.collective_rpc("dbo_request_timeline")
    run_cut(granite, PREFILL_CUTS[0], PROMPTS)
    for found in granite.llm.collective_rpc("dbo_timeline"):  # recorded like any other
        spans = Timeline.from_dict(found).spans
        assert {("compute", "L0.part1", 1), ("comm", "L2.reduce0", 0)} <= {span[:3] for span in spans}


def test_a_forward_that_reads_token_ids_besides_embedded_tokens_says_so(adapter: GenericAdapter, group: Group) -> None:
    """BERT's does: it finds the types of tokens in them."""
    model = Model(group)
    model.forward = lambda ids, positions, received, x: ids & 1  # type: ignore[method-assign]
    found = str(record(adapter, model))
    assert "its forward reads token ids, not embedded tokens alone (2 tokens: TypeError" in found
    assert "all_reduce" not in vars(group)
