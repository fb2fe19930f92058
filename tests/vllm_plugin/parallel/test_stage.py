"""Stages of a pipeline: what they take, hand on, and decline. No engine needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.sequence import IntermediateTensors

from dbo_models.dense import DenseAdapter
from dbo_models.toy import ToyAdapter
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.devices.virtual import VirtualDevice
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.errors import SplitError
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.vllm_plugin.api.groups import Groups
from dbo_runtime.vllm_plugin.install import model_setup, recorded_model
from dbo_runtime.vllm_plugin.install.config_checks import list_declines
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.parallel.rank_context import RankContext
from dbo_runtime.vllm_plugin.parallel.stage import WHOLE_MODEL, Stage, get_stage
from dbo_runtime.vllm_plugin.platforms.platform import Platform, StageBuffers
from dbo_runtime.vllm_plugin.platforms.registry import get_platform
from dbo_runtime.vllm_plugin.step.decision import StepDecider
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from tests.support.vllm.configs import make_config as make_vllm_config
from tests.support.vllm.forwards import IDS, ONE_RANK, POSITIONS, Lines, Splitter, run
from tests.support.vllm.split_forwards import assemble

HANDED = ("hidden_states", "residual")
FIRST, MIDDLE, LAST = (Stage(number, 3, range(2 * number, 2 * number + 2), HANDED) for number in range(3))
STAGES = pytest.mark.parametrize("stage", [FIRST, MIDDLE, LAST], ids=["first", "middle", "last"])


class Model:
    """Two layers of a model, or what is left of it on a stage: each adds to hidden states and to the residual."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.slip: dict[str, float] = {}
        self.forgets = ""

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.stage.is_first, "only the first stage has embeddings"
        return ids[:, None] * torch.ones(2)

    def compute(self, x: torch.Tensor, positions: torch.Tensor, residual: torch.Tensor) -> Any:
        """In place, as fused norms do."""
        return x.add_(positions[:, None]), residual.add_(x)

    def forward(self, ids: Any, positions: Any, handed: Any = None, embeds: Any = None) -> Any:
        x = handed["hidden_states"] if handed is not None else self.embed_input_ids(ids) if embeds is None else embeds
        residual = torch.zeros_like(x) if handed is None else handed["residual"]
        x = x + positions[:, None]
        results = {"hidden_states": x, "residual": residual + x}
        results = {name: tensor + self.slip.get(name, 0.0) for name, tensor in results.items() if name != self.forgets}
        return results["hidden_states"] if self.stage.is_last else IntermediateTensors(results)


def record(model: Model) -> Program:
    """Declare what the model does, residual first where it can be: names, not places, say what is what."""
    p, stage = ProgramBuilder(), model.stage
    x, positions = p.input("x"), p.input("positions", token_dim=-1)
    residual = p.compute("zero", torch.zeros_like, x) if stage.is_first else p.input("residual")
    x, residual = p.compute("compute", model.compute, x, positions, residual, overwrites=(x, residual), outputs=2)
    if not stage.is_last:
        p.output("residual", residual)
    return p.build(x)


def make_forward(model: Model, check: bool = False) -> SplitForward:
    config = RuntimeConfig(mode="always", check=check, min_tokens=1, min_prefill_tokens=0)
    runtime = MicroBatchRuntime(record(model), VirtualDevice(lambda step: 1.0), config, Lines())
    agreement = Agreement(ONE_RANK)
    decider = StepDecider(runtime, Splitter(), agreement, "network")
    return assemble(model, decider, agreement, stage=model.stage)


def make_handed(stage: Stage, tokens: int = 8) -> IntermediateTensors | None:
    if stage.is_first:
        return None
    numbers = torch.arange(2.0 * tokens).reshape(tokens, 2)
    return IntermediateTensors({"residual": numbers * 100, "hidden_states": numbers})


def name(result: Any) -> dict[str, torch.Tensor]:
    return {"hidden_states": result} if isinstance(result, torch.Tensor) else result.tensors


@STAGES
@pytest.mark.parametrize("check", [False, True])
def test_a_stage_gives_split_what_it_gives_unsplit(stage: Stage, check: bool) -> None:
    """Its ops overwrite what they are given, which the check must give to the unsplit run as it was."""
    model = Model(stage)
    wanted = name(model.forward(IDS, POSITIONS, make_handed(stage)))
    forward = make_forward(model, check)
    found = run(forward, intermediate_tensors=make_handed(stage))
    assert isinstance(found, torch.Tensor if stage.is_last else IntermediateTensors)
    assert name(found).keys() == wanted.keys()
    assert all(torch.equal(name(found)[key], wanted[key]) for key in wanted)
    assert forward.runtime.statistics.as_dict() == {
        "split": 1,
        "nano": 0,
        "concurrent": 0,
        "micro_batches": 2,
        "declined": {},
    }


def test_embeddings_that_are_given_to_the_first_stage_are_taken() -> None:
    embeds = torch.arange(16.0).reshape(8, 2)
    model = Model(FIRST)
    wanted = model.forward(None, POSITIONS, embeds=embeds)
    assert run(make_forward(model), input_ids=None, inputs_embeds=embeds.clone()) == wanted


@pytest.mark.parametrize(("stage", "slips"), [(FIRST, "residual"), (MIDDLE, "hidden_states"), (LAST, "hidden_states")])
def test_the_check_finds_a_difference_in_anything_that_a_stage_hands_on(stage: Stage, slips: str) -> None:
    model = Model(stage)
    model.slip[slips] = 5.0
    what = "hidden states" if stage.is_last else slips
    with pytest.raises(
        SplitError, match=rf"split and unsplit {what} differ by \S+ of the largest value .* cuts at \[4\]"
    ):
        run(make_forward(model, check=True), intermediate_tensors=make_handed(stage))


def test_the_check_finds_what_a_stage_does_not_hand_on() -> None:
    model = Model(MIDDLE)
    model.forgets = "residual"
    with pytest.raises(
        SplitError, match=r"gave \['hidden_states', 'residual'\], one that ran unsplit \['hidden_states'\]"
    ):
        run(make_forward(model, check=True), intermediate_tensors=make_handed(MIDDLE))


NUMBERS = torch.zeros(8, 2)


@pytest.mark.parametrize(
    ("stage", "handed", "decline"),
    [
        (WHOLE_MODEL, {"hidden_states": NUMBERS}, Decline("unknown intermediate tensors", "hidden_states")),
        (FIRST, {"hidden_states": NUMBERS}, Decline("unknown intermediate tensors", "hidden_states")),
        (MIDDLE, None, Decline("unknown intermediate tensors", "none")),
        (LAST, {"hidden_states": NUMBERS}, Decline("unknown intermediate tensors", "hidden_states")),
        (
            LAST,
            {"residual": NUMBERS, "hidden_states": NUMBERS, "aux_hidden_states_0": NUMBERS},
            Decline("unknown intermediate tensors", "aux_hidden_states_0, hidden_states, residual"),
        ),
        (
            MIDDLE,
            {"hidden_states": NUMBERS, "residual": NUMBERS[:4]},
            Decline("intermediate tensors of other tokens", "{'hidden_states': 8, 'residual': 4}, 8 tokens"),
        ),
    ],
    ids=["no stage", "first", "nothing", "too little", "too much", "scattered"],
)
def test_a_step_that_is_given_what_its_program_does_not_take_runs_unsplit(
    stage: Stage, handed: dict[str, torch.Tensor] | None, decline: Decline
) -> None:
    given = None if handed is None else IntermediateTensors(handed)
    assert stage.check_inputs(given, tokens=8) == decline
    forward, seen = make_forward(Model(LAST)), []
    forward.runner._ends._stage = stage
    forward._forward = lambda *arguments: seen.append(arguments) or "unsplit"
    assert run(forward, intermediate_tensors=given) == "unsplit"
    assert seen == [(IDS, POSITIONS, given, None)]
    assert forward.runtime.statistics.declined == {decline.reason: 1}


@STAGES
def test_a_stage_that_is_given_what_it_takes_has_nothing_against_a_split(stage: Stage) -> None:
    assert stage.check_inputs(make_handed(stage), tokens=8) is None


PROGRAMS = {stage.number: record(Model(stage)) for stage in (FIRST, MIDDLE, LAST)} | {3: record(Model(Stage()))}


@pytest.mark.parametrize("stage", [FIRST, MIDDLE, LAST, WHOLE_MODEL], ids=["first", "middle", "last", "whole"])
def test_a_program_must_take_and_hand_on_what_the_stage_does(stage: Stage) -> None:
    own = 3 if stage is WHOLE_MODEL else stage.number
    assert [number for number, program in PROGRAMS.items() if stage.check_program(program) is None] == [own]


def test_a_program_that_is_not_the_stages_is_described() -> None:
    assert Stage(1, 3, range(2, 4), ("hidden_states",)).check_program(PROGRAMS[0]) == Decline(
        "the program is not one of this pipeline",
        "stages send hidden_states; "
        "on stage 1 of 3 its adapter takes hidden_states and returns hidden_states, residual",
    )


@pytest.mark.parametrize(
    ("adapter", "stages", "declines"),
    [
        (ToyAdapter(), 1, []),
        (ToyAdapter(), 3, [Decline("the adapter takes no stages of a pipeline", "dbo_models.toy.ToyAdapter")]),
        (DenseAdapter(), 3, []),
    ],
)
def test_an_adapter_that_takes_no_stages_is_declined_in_pipelines(
    adapter: Any, stages: int, declines: list[Decline]
) -> None:
    vllm_config: Any = make_vllm_config(pipeline_parallel_size=stages)
    vllm_config.model_config.architecture = "LlamaForCausalLM"
    assert list(list_declines(vllm_config, RuntimeConfig(enabled=True), adapter)) == declines


def test_a_stage_without_layers_is_declined() -> None:
    vllm_config = make_vllm_config()
    vllm_config.model_config.architecture = "LlamaForCausalLM"
    vllm_config.parallel_config.pipeline_parallel_size = 3
    model: Any = None
    rank = make_rank(Stage(1, 3, range(2, 2), HANDED), vllm_config, get_platform("cpu"))
    found = recorded_model.record_model(DenseAdapter(), model, rank, model)
    assert found == Decline("a stage of the pipeline has no layers", "stage 1 of 3")


def test_an_adapter_that_takes_no_stages_does_not_even_look_at_one() -> None:
    """It would meet placeholders where it expects layers."""

    class Blind:
        def decline(self, model: Any) -> Decline | None:
            raise AssertionError("it was asked")

        record = decline

    vllm_config = make_vllm_config()
    vllm_config.model_config.architecture = "SomeForCausalLM"
    vllm_config.parallel_config.pipeline_parallel_size = 2
    rank = make_rank(LAST, vllm_config, get_platform("cpu"))
    found = recorded_model.record_model(Blind(), None, rank, None)  # type: ignore[arg-type]
    assert isinstance(found, Decline)
    assert found.reason == "the adapter takes no stages of a pipeline"
    assert found.detail.endswith("Blind")


def test_a_model_with_an_unknown_kv_connector_is_declined_by_its_name() -> None:
    vllm_config = make_vllm_config(kv_transfer_config=SimpleNamespace(kv_connector="Novel"))
    vllm_config.model_config.architecture = "SomeForCausalLM"
    adapter: Any = object()
    model: Any = None
    found = recorded_model.record_model(adapter, model, make_rank(WHOLE_MODEL, vllm_config, get_platform("cpu")), model)
    assert isinstance(found, Decline)
    assert found.reason == "the KV connector is not known to dbo_runtime"
    assert found.detail.startswith("Novel; ")


def make_rank(stage: Stage, vllm_config: Any, platform: Platform, groups: Any = None) -> RankContext:
    rest: Any = 1, "network", "all_gather", (), Lines()
    return RankContext(vllm_config, RuntimeConfig(enabled=True), platform, groups, stage, *rest)


def make_config(layers: int = 7) -> SimpleNamespace:
    model = SimpleNamespace(dtype=torch.float32, get_total_num_hidden_layers=lambda: layers)
    return SimpleNamespace(model_config=model)


class Empty:
    """A model that says what its stages hand over."""

    def make_empty_intermediate_tensors(self, batch_size: int, dtype: Any, device: Any) -> IntermediateTensors:
        return IntermediateTensors({name: torch.zeros(batch_size, 4, dtype=dtype, device=device) for name in HANDED})


def test_the_stage_is_found_with_its_layers_and_the_tensors_that_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, layers in enumerate((range(2), range(2, 5), range(5, 7))):  # as vLLM shares out seven
        group = SimpleNamespace(world_size=3, rank_in_group=rank)
        monkeypatch.setattr(parallel_state, "get_pp_group", lambda group=group: group)
        stage = get_stage(Empty(), make_config())
        assert stage == Stage(rank, 3, layers, HANDED)
        assert (stage.name, stage.describe()) == (f"pp{rank}", {"pipeline": 3, "stage": rank})


def test_rows_of_a_buffer_are_handed_on_past_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(world_size=3, rank_in_group=1)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: group)
    buffer = torch.arange(8.0)[:, None]
    received, *others = HANDED  # as if the first came into a buffer
    stage = get_stage(Empty(), make_config(), StageBuffers({received: buffer}, {"keys": buffer}))
    assert stage.handed == tuple(others)
    given = IntermediateTensors({name: torch.zeros(3, 4) for name in HANDED})
    assert stage.check_inputs(given, 3) is None
    del given.tensors[received]
    missing = stage.check_inputs(given, 3)
    assert missing is not None
    assert missing.reason == "unknown intermediate tensors"
    program = SimpleNamespace(named=())
    joined = stage.join(program, [[torch.zeros(2, 4)], [torch.zeros(1, 4)]])  # type: ignore[arg-type] - all it reads
    assert isinstance(joined, IntermediateTensors)
    assert torch.equal(joined["keys"], buffer[:3])


def test_without_a_pipeline_the_stage_is_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0))
    assert get_stage(object(), None) is WHOLE_MODEL
    assert (WHOLE_MODEL.name, WHOLE_MODEL.describe(), WHOLE_MODEL.is_first, WHOLE_MODEL.is_last) == (
        None,
        {},
        True,
        True,
    )


@pytest.mark.parametrize(("rank", "stage", "counts"), [(0, FIRST, True), (1, FIRST, False), (0, LAST, False)])
def test_a_step_is_counted_once_on_however_many_stages(
    rank: int, stage: Stage, counts: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_setup, "get_folder", lambda: str(tmp_path))
    group = SimpleNamespace(world_size=2, rank_in_group=rank)
    config = SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="model"),
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )
    rank_context = make_rank(stage, config, get_platform("cpu"), Groups(group, None, group))
    metrics = model_setup._open_metrics(rank_context)
    assert (metrics is not None) == counts
    assert bool(list(tmp_path.iterdir())) == counts
