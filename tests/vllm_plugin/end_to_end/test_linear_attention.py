"""Models most of whose layers have linear attention: one state a request, which the pieces of a cut request share.

vLLM's kernels for CPU take bfloat16 only. A step that is cut between requests is equal to the unsplit one to the bit; a
request that is cut inside, to one that vLLM prefills in two steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.api.kv_caches import list_caches
from dbo_runtime.vllm_plugin.context import splitter
from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps
from tests.support.ascend.jobs import cut_at_boundaries
from tests.support.vllm.engine import Answer, Engine, make_prompt
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.equivalence import MIXED, assert_close_up_to_ties, run_cut, run_in_nano_batches, run_unsplit
from tests.support.vllm.expert_parallel import ARRIVALS, BATCHES, EDGES, generate
from tests.support.vllm.families import LINEAR_ATTENTION, make_family
from tests.support.vllm.picture_requests import KINDS, ask, count_encoder
from tests.support.vllm.picture_requests import OPTIONS as PICTURES
from tests.support.vllm.ranks import Ranks
from tests.support.vllm.vision_families import QWEN35, QWEN35_MOE, make_requests, make_vision_family

pytestmark = pytest.mark.vllm

LENGTHS = (96, 64, 160, 128, 80)
PROMPTS = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
BOUNDARIES = list(accumulate(LENGTHS))[:-1]
LONG_PROMPT = make_prompt(300, 7)
OPTIONS = {"dtype": "bfloat16", "attention_backend": "CPU_ATTN"}
LONG = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "hf_overrides": {"max_position_embeddings": 4096}}
BLOCK = 1152  # tokens, at whose multiples vLLM keeps states of the tiny model for its prefix cache


@pytest.fixture(scope="module")
def engine(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return an engine of one rank, with prefix caching: states are kept at ends of blocks."""
    model = make_family("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("qwen3.5"))
    return engines.get(1, "nobind", model, **OPTIONS, **LONG, enable_prefix_caching=True)


@pytest.fixture(scope="module")
def uncached(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Return an engine of one rank without prefix caching: each request has one state, which each step moves on."""
    model = make_family("Qwen3_5ForCausalLM", tmp_path_factory.mktemp("qwen3.5-uncached"))
    return engines.get(1, "nobind", model, **OPTIONS, **LONG, enable_prefix_caching=False)


def run_in_chunks(engine: Engine, prompt: list[int], chunk: int) -> list[Answer]:
    """Return what vLLM answers unsplit, in steps of at most *chunk* tokens."""
    engine.configure(DBO_MODE="off")
    try:
        return engine.generate_in_chunks([prompt], chunk)
    finally:
        engine.configure(DBO_MODE="always")


def forget_prefixes(engine: Engine) -> None:
    assert engine.llm.reset_prefix_cache()


@pytest.mark.parametrize("cuts", [*((edge,) for edge in BOUNDARIES), BOUNDARIES[:2], BOUNDARIES], ids=str)
def test_steps_cut_between_requests_are_equal_to_the_bit(engine: Engine, cuts: Sequence[int]) -> None:
    unsplit = run_unsplit(engine, PROMPTS)
    forget_prefixes(engine)
    assert run_cut(engine, cuts, PROMPTS) == unsplit


@pytest.mark.parametrize(("length", "chunk"), [(400, 128), (400, 100), (300, 279), (303, 150)])
def test_a_request_cut_inside_is_equal_to_one_prefilled_in_chunks(engine: Engine, length: int, chunk: int) -> None:
    prompt = make_prompt(length, length + chunk)
    chunked = run_in_chunks(engine, prompt, chunk)
    forget_prefixes(engine)
    assert run_cut(engine, range(chunk, length - 1, chunk), [prompt]) == chunked


@pytest.mark.parametrize("cuts", [(1,), (2, 4), (40,), (2, 162)], ids=str)
def test_steps_of_decodes_and_prefills_are_close(engine: Engine, cuts: Sequence[int]) -> None:
    unsplit = run_unsplit(engine, PROMPTS, 6, MIXED)
    forget_prefixes(engine)
    assert_close_up_to_ties(unsplit, run_cut(engine, cuts, PROMPTS, 6, MIXED))


@pytest.mark.parametrize(("count", "check"), [("2", "0"), ("5", "0"), ("3", "races")])
def test_nano_batches_keep_the_states_of_the_step(engine: Engine, count: str, check: str) -> None:
    """The core of linear attention is one joint op, so that nothing has to be known of its states."""
    ops = engine.runner.get_model().forward.runtime.program.ops
    names = {part.name for op in ops if op.divided is not None for part in op.divided.ops}
    assert {"linear_qkv", "linear_attention_core", "linear_attn_out"} <= names, "its projections are cut"
    unsplit = run_unsplit(engine, PROMPTS, 6, MIXED)
    forget_prefixes(engine)
    settings = {"DBO_MICRO_BATCHES": count, "DBO_CHECK": check}
    assert_close_up_to_ties(unsplit, run_in_nano_batches(engine, PROMPTS, 6, MIXED, **settings))


@pytest.mark.parametrize("cuts", [(1024,), (768, 1536)], ids=str)
def test_pieces_of_a_request_keep_its_state_in_the_block_that_the_step_ends_in(
    engine: Engine, cuts: Sequence[int]
) -> None:
    """Where the next request with this prefix finds it; without that, its tail would go on from no state."""
    prompt = make_prompt(2 * BLOCK, sum(cuts))
    follower = [prompt + make_prompt(70, 9)]
    unsplit = [run_unsplit(engine, [prompt]), run_unsplit(engine, follower)]
    forget_prefixes(engine)
    assert [run_cut(engine, cuts, [prompt]), run_unsplit(engine, follower)] == unsplit
    forget_prefixes(engine)
    with patch.object(splitter, "keep_places", lambda common, slices, parts, size: parts):
        assert run_cut(engine, cuts, [prompt]) != unsplit[0]


@pytest.mark.parametrize("check", ["1", "races", "first steps"])
def test_steps_that_run_twice_move_states_on_once(uncached: Engine, check: str) -> None:
    """Prefills, second chunks and decodes: what the comparison has run is nothing that requests go on from."""
    unsplit = run_unsplit(uncached, PROMPTS, 6, MIXED)
    decider = uncached.runner.get_model().forward.decider
    if check == "first steps":
        decider.first_steps = FirstSteps(open_log(quiet=True))
    try:
        uncached.configure(DBO_MODE="always", DBO_CHECK="0" if check == "first steps" else check)
        split = uncached.generate(PROMPTS, 6, MIXED)
        assert decider.first_steps is None or decider.first_steps.failure is None
    finally:
        decider.first_steps = None
        uncached.configure(DBO_CHECK="0")
    assert_close_up_to_ties(unsplit, split)


def test_calibration_changes_nothing_that_requests_are_served_from(engine: Engine) -> None:
    """Its dummy batches would move on states in the blocks of cached prefixes."""
    run_unsplit(engine, PROMPTS)
    layers = engine.runner.compilation_config.static_forward_context
    caches = list_caches(layers, layers)
    before = [cache.clone() for cache in caches]
    try:
        (report,) = engine.llm.collective_rpc("dbo_calibrate", kwargs={"budget": 3.0})
    finally:
        engine.runner.get_model().forward.runtime.planner = None
    assert report is not None
    assert all(torch.equal(*map(_as_bytes, pair)) for pair in zip(caches, before, strict=True))


def _as_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.contiguous().view(torch.uint8)  # memory that nothing was written to may hold NaN


def test_a_prompt_of_one_token_is_not_taken_for_a_decode(engine: Engine) -> None:
    """Alone in a micro-batch it would go on from the state that the last request left in its place."""
    prompts = [make_prompt(100, 1), make_prompt(1, 2)]
    unsplit = run_unsplit(engine, prompts)
    engine.configure(DBO_MODE="always")
    engine.cut_at(100)
    before = engine.statistics()[0]["declined"]
    try:
        split = engine.generate(prompts)
    finally:
        engine.cut_by_settings()
    after = engine.statistics()[0]["declined"]
    reason = "a prompt starts with as few tokens as a decode, in a model with linear attention"
    assert after[reason] == before.get(reason, 0) + 1
    assert split == unsplit


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in LINEAR_ATTENTION), ("Qwen3_5ForCausalLM", 1)])
def test_ranks_and_stages_answer_split_as_unsplit(name: str, ranks: int, tmp_path: Path, engines: Engines) -> None:
    """Two tensor parallel ranks, or two stages of a pipeline. One engine serves all of a family."""
    options = {**OPTIONS, "enable_prefix_caching": False, "pipeline_parallel_size": 3 - ranks}
    options["enable_expert_parallel"] = name != "Qwen3_5ForCausalLM"
    with engines.start(ranks, share_cores(), make_family(name, tmp_path), **options) as engine:
        unsplit = run_unsplit(engine, PROMPTS)
        for edge in BOUNDARIES:
            assert run_cut(engine, (edge,), PROMPTS) == unsplit
        for cut in (279, 150):
            assert run_cut(engine, (cut,), [LONG_PROMPT]) == run_in_chunks(engine, LONG_PROMPT, cut)
        mixed = run_unsplit(engine, PROMPTS, 6, MIXED)
        before = engine.count_split()
        cut_at_boundaries(engine, 0)
        try:
            assert_close_up_to_ties(mixed, engine.generate(PROMPTS, 6, MIXED))
        finally:
            engine.cut_by_settings()
        assert engine.count_split() >= before + 5


@pytest.fixture(scope="module")
def expert_ranks(tmp_path_factory: pytest.TempPathFactory, engines: Engines) -> Iterator[Ranks]:
    """Return two data parallel ranks that share out the experts, without prefix caching.

    Every token uses all experts: of two, rounding would choose others where a cut inside a request rounds otherwise.
    """
    model = make_family("Qwen3_5MoeForCausalLM", tmp_path_factory.mktemp("qwen3.5-moe"), num_experts_per_tok=4)
    with engines.start_ranks(2, model, **OPTIONS, enable_prefix_caching=False, max_num_batched_tokens=2048) as ranks:
        yield ranks


@pytest.mark.slow
def test_a_reason_of_one_rank_is_put_to_the_vote(expert_ranks: Ranks) -> None:
    """A prompt of five tokens comes to three decodes, and its first token alone would be cut off with them.

    Only its rank sees that. Steps that are cut as this one would be were agreed on before.
    """
    batches = [[make_prompt(length, length) for length in (20, 30, 40, 5)], [make_prompt(25, 1), make_prompt(35, 2)]]
    arrive = ((0, 0, 0, 2), (0, 0))
    for order in (1, -1):  # the rank that sees it is the first one, and the second
        asked = 6, arrive[::order], batches[::order]
        unsplit = expert_ranks.run(generate, "off", None, *asked)
        split = expert_ranks.run(generate, "always", None, *asked)
        for (expected, _, _), (answers, count, reasons) in zip(unsplit, split, strict=True):
            assert count > 2
            assert "a prompt starts with as few tokens as a decode, in a model with linear attention" in reasons
            assert_close_up_to_ties(expected, answers)


@pytest.mark.slow
@pytest.mark.parametrize("decodes", range(3))
def test_a_rank_that_decodes_few_tokens_or_none_takes_part_with_padding(expert_ranks: Ranks, decodes: int) -> None:
    """Two prompts of the other rank are cut between them, so nothing is rounded otherwise."""
    batches = [[make_prompt(300, 7), make_prompt(300, 8)], [make_prompt(30 + i, i) for i in range(decodes)]]
    asked = 4, ((1, 1), (0,) * decodes), batches
    unsplit = expert_ranks.run(generate, "off", None, *asked)
    split = expert_ranks.run(generate, "always", None, *asked)
    for (expected, _, _), (answers, count, _) in zip(unsplit, split, strict=True):
        assert count >= 4
        assert_close_up_to_ties(expected, answers)


@pytest.mark.slow
def test_tokens_are_dispatched_to_experts_on_other_ranks(expert_ranks: Ranks) -> None:
    for cuts, tokens, arrive in (
        ([[EDGES[0][1]], [EDGES[1][2]]], 1, ()),
        ([[100, 300], [60, 200]], 1, ()),
        ([[2], [3]], 6, ARRIVALS),
    ):
        unsplit = expert_ranks.run_once(generate, "off", None, tokens, arrive, BATCHES)
        split = expert_ranks.run(generate, "always", cuts, tokens, arrive, BATCHES)
        for (expected, _, _), (answers, count, _) in zip(unsplit, split, strict=True):
            assert count > 0, "nothing was split, so nothing was compared"
            assert_close_up_to_ties(expected, answers)


@pytest.mark.slow
@pytest.mark.parametrize("name", [QWEN35, QWEN35_MOE])
def test_pictures_are_seen_split_as_unsplit(name: str, tmp_path: Path, engines: Engines) -> None:
    """Qwen3.5 with its encoder, whose positions have three axes."""
    options, requests = {**PICTURES, **OPTIONS}, make_requests(KINDS)
    with engines.start(2, share_cores(), make_vision_family(name, tmp_path / "model"), **options) as engine:
        unsplit = ask(engine, requests, DBO_MODE="off")
        for parts in ("2", "3"):
            before = engine.count_split(), count_encoder(engine)
            assert_close_up_to_ties(unsplit, ask(engine, requests, DBO_MODE="always", DBO_MICRO_BATCHES=parts))
            assert engine.count_split() > before[0]
            assert count_encoder(engine) > before[1]
