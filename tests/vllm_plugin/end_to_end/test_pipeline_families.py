"""Pipelines of every form of adapter and of other layouts, end to end: the real vLLM, split and unsplit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.adapters.contract import StageAdapter
from dbo_runtime.adapters.registry import get_backbone_adapter
from dbo_runtime.observe.timeline import Timeline
from tests.support.vllm.costs import calibrate_few, forget_costs
from tests.support.vllm.engine import Engine
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.equivalence import MIXED, assert_close, run_cut, run_unsplit
from tests.support.vllm.expert_parallel import ARRIVALS, EDGES, FEW, LONG, assert_split_is_close
from tests.support.vllm.families import find_backend, make_family
from tests.support.vllm.family_checks import (
    FORMS,
    MIXED_CUTS,
    PROMPTS,
    assert_cuts_answer_as_unsplit,
    assert_split_answers_as_unsplit,
)
from tests.support.vllm.picture_requests import OPTIONS, ask
from tests.support.vllm.vision_families import QWEN3, QWEN25, make_requests, make_vision_family

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CHUNK = 200  # tokens of a step, fewer than there are in the prompts: their prefills are chunked
CHUNK_CUTS = [(96,), (17,), (150,), (50, 100, 150)]


def start_family(
    engines: Engines, name: str, folder: Path, stages: int = 2, ranks: int = 1, **options: Any
) -> AbstractContextManager[Engine]:
    """Start an engine for a family of random weights."""
    cores = share_cores() if stages * ranks == 2 else "nobind"
    defaults = {"enable_prefix_caching": False, "attention_backend": find_backend(name)}
    model = make_family(name, folder)
    return engines.start(ranks, cores, model, pipeline_parallel_size=stages, **defaults, **options)


def takes_stages(name: str) -> bool:
    """Return whether the family's adapter declares stages; a pipeline of the others is declined by name."""
    adapter = get_backbone_adapter(name)
    return isinstance(adapter, StageAdapter) and adapter.takes_stages


@pytest.fixture(scope="module", params=[name for name in FORMS if takes_stages(name)])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engines: Engines
) -> Iterator[Engine]:
    with start_family(engines, request.param, tmp_path_factory.mktemp(request.param)) as engine:
        yield engine


def test_two_stages_of_every_family_answer_split_as_unsplit(family: Engine) -> None:
    """Prefill, decode and mixed steps. One test a family, so that one engine serves all of it."""
    assert_split_answers_as_unsplit(family)
    assert len(family.statistics()) == 2


def assert_chunks_are_close(engine: Engine) -> None:
    unsplit = run_unsplit(engine, PROMPTS, 4, MIXED)
    for cuts in CHUNK_CUTS:
        assert_close(unsplit, run_cut(engine, cuts, PROMPTS, 4, MIXED))


@pytest.mark.parametrize(
    ("name", "stages"), [("LlamaForCausalLM", 2), ("LlamaForCausalLM", 3), ("Qwen3MoeForCausalLM", 2)]
)
def test_chunked_prefills_are_close_on_two_stages_and_with_one_in_the_middle(
    name: str, stages: int, tmp_path: Path, engines: Engines
) -> None:
    options = {"max_num_batched_tokens": CHUNK, "enable_chunked_prefill": True}
    with start_family(engines, name, tmp_path, stages, **options) as engine:
        assert_chunks_are_close(engine)
        assert len(engine.statistics()) == stages


def test_unsplit_steps_may_be_compiled(tmp_path: Path, engines: Engines) -> None:
    with start_family(engines, "LlamaForCausalLM", tmp_path, enforce_eager=False) as engine:
        unsplit = run_unsplit(engine, PROMPTS, 4, MIXED)
        for cuts in MIXED_CUTS:
            assert_close(unsplit, run_cut(engine, cuts, PROMPTS, 4, MIXED))


def test_embeddings_may_be_tied_to_the_last_stage(tmp_path: Path, engines: Engines) -> None:
    model = make_family("LlamaForCausalLM", tmp_path, tie_word_embeddings=True)
    options = {"attention_backend": "CPU_ATTN", "pipeline_parallel_size": 2}
    with engines.start(1, share_cores(), model, **options) as engine:  # with prefix caching
        unsplit = run_unsplit(engine, PROMPTS, 4, MIXED)
        for cuts in MIXED_CUTS:
            assert_close(unsplit, run_cut(engine, cuts, PROMPTS, 4, MIXED))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "DeepseekV3ForCausalLM"])
def test_stages_of_two_ranks_each_reduce_during_computation(name: str, tmp_path: Path, engines: Engines) -> None:
    """Two ranks of a stage agree with each other, and not with those of the other stage."""
    with start_family(engines, name, tmp_path / "model", ranks=2) as engine:
        assert_split_answers_as_unsplit(engine)
        engine.llm.collective_rpc("dbo_request_timeline")
        engine.configure(DBO_CHECK="1")
        unsplit = run_unsplit(engine, PROMPTS, 4, MIXED)
        engine.configure(DBO_CHECK="1")
        assert_close(unsplit, run_cut(engine, (40,), PROMPTS, 4, MIXED))
        timelines = [Timeline.from_dict(found) for found in engine.llm.collective_rpc("dbo_timeline")]
        layers = [{span.op[:2] for span in line.spans if span.lane == "comm"} for line in timelines]
        assert layers == [{"L0", "L1"}] * 2 + [{"L2"}] * 2
        reports = engine.llm.collective_rpc(calibrate_few, args=(str(tmp_path / "costs.json"),))
        digests = [digest for _, digest in reports]
        assert digests[0] == digests[1] != digests[2] == digests[3]
        assert_close(unsplit, engine.generate(PROMPTS, 4, MIXED))
        engine.llm.collective_rpc(forget_costs)


def test_a_stage_that_is_declined_keeps_no_other_from_splitting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: Engines
) -> None:
    """Communicators take all ranks of vLLM's world to make, those of stages that run unsplit included.

    Without the barrier, torch would notice only at the next communicator between stages.
    """
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    extension = "tests.support.vllm.declining.Extension"
    with start_family(engines, "LlamaForCausalLM", tmp_path, ranks=2, worker_extension_cls=extension) as engine:
        unsplit = run_unsplit(engine, PROMPTS, 4, MIXED)
        assert_close(unsplit, engine.generate(PROMPTS, 4, MIXED))
        first, second, *others = engine.statistics()
        assert first == second
        assert first["split"] > 0
        assert others == [None, None]


def test_a_pipeline_without_an_adapter_answers_split_as_unsplit(tmp_path: Path, engines: Engines) -> None:
    name = "GraniteForCausalLM"
    options = {"attention_backend": find_backend(name), "enable_prefix_caching": False, "pipeline_parallel_size": 2}
    settings = {"DBO_GENERIC": "1"}
    with engines.start(2, "nobind", make_family(name, tmp_path), settings, **options) as engine:
        assert_cuts_answer_as_unsplit(engine)
        engine.llm.collective_rpc("dbo_request_timeline")
        run_cut(engine, (96,), PROMPTS)
        timelines = [Timeline.from_dict(found) for found in engine.llm.collective_rpc("dbo_timeline")]
        layers = [{span.op[:2] for span in line.spans if span.lane == "comm"} for line in timelines]
        assert layers == [{"L0", "L1"}] * 2 + [{"L2"}] * 2


def test_pipelines_whose_tokens_are_dispatched_between_data_parallel_ranks_are_close(engines: Engines) -> None:
    """Four processes: two pipelines of two stages, each of which has half of the experts of its layers."""
    options = {"max_num_batched_tokens": 2048, "pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engines.start_ranks(2, **options) as ranks:
        assert_split_is_close(ranks, [[EDGES[0][1]], [EDGES[1][2]]])
        assert_split_is_close(ranks, [[100, 300], [60, 200]])
        assert_split_is_close(ranks, None, 6, ARRIVALS)
        assert_split_is_close(ranks, None, 2, (), [LONG, FEW["one token"]])


@pytest.fixture(scope="module", params=[QWEN25, QWEN3])
def multimodal(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engines: Engines
) -> Iterator[Engine]:
    model = make_vision_family(request.param, tmp_path_factory.mktemp(request.param))
    with engines.start(1, share_cores(), model, pipeline_parallel_size=2, **OPTIONS) as engine:
        yield engine


def test_multimodal_models_are_cut_with_what_their_first_stage_adds(multimodal: Engine) -> None:
    """The encoder, and the features that Qwen3-VL's first layers add, are the first stage's alone."""
    requests = make_requests((1, 3, 0, 2, 1))
    unsplit = ask(multimodal, requests, DBO_MODE="off")
    before = multimodal.count_split()
    assert_close(unsplit, ask(multimodal, requests, DBO_MODE="always", DBO_MICRO_BATCHES="2"))
    assert_close(unsplit, ask(multimodal, requests, DBO_MODE="always", DBO_MICRO_BATCHES="3"))
    for cut in (20, 40, 60):
        multimodal.cut_at(cut)
        assert_close(unsplit, ask(multimodal, requests, DBO_MODE="always"))
    multimodal.cut_by_settings()
    assert_close(unsplit, ask(multimodal, requests, DBO_MODE="always", DBO_CHECK="1"))
    assert multimodal.count_split() > before
    first, second = multimodal.llm.collective_rpc("dbo_encoder_statistics")
    assert first["split"] > 0
    assert second is None
