"""A second compute lane, end to end: latent attention's keys concurrent with its queries, in split steps and in others.

On a CPU that lane is the thread of the first: what is proven here is what is declared, and how steps come to it.
Streams run at the same time in tests/standin/cann/test_side_lane.py and tests/ascend/test_side.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dbo_runtime.observe.timeline import Timeline
from tests.support.vllm.costs import calibrate_few, forget_costs
from tests.support.vllm.engine import Answer, Engine, find_difference, make_prompt
from tests.support.vllm.engines import Engines, share_cores
from tests.support.vllm.equivalence import BOUNDARIES, MIXED, PROMPTS, assert_close, get_unsplit, run_cut
from tests.support.vllm.expert_parallel import ARRIVALS, BATCHES, run_prompts
from tests.support.vllm.ranks import Ranks
from tests.support.vllm.transport import set_transport

SIDE = {"DBO_SIDE": "on"}
SETTINGS = [{"DBO_MODE": "auto", "DBO_SIDE": "on"}, {"DBO_SIDE": "on"}, {"DBO_SIDE": "off"}]  # the first does not cut
BATCH_SIZES = (1, 7, 32, 64)
GENERATED = 2000

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="session", params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["one rank", "two ranks"])
def side_engine(request: pytest.FixtureRequest, engines: Engines) -> Engine:
    """Return an engine with a side lane, whose latent attention is decomposed."""
    if request.param == 1:
        return engines.get(1, "nobind", settings=SIDE, max_model_len=2048)
    engine = engines.get(2, share_cores(), settings=SIDE, max_model_len=2048)
    # Where vLLM's kernels reduce otherwise, `auto` would cut: these tests are of steps that it does not.
    engine.llm.collective_rpc(set_transport, args=("shared memory",))
    return engine


@pytest.fixture(scope="module", params=[pytest.param("all_gather", marks=pytest.mark.slow), "all_to_all"])
def experts_with_side(request: pytest.FixtureRequest, engines: Engines) -> Iterator[Ranks]:
    """Return two data parallel ranks that share out the experts, with either way to reach them."""
    with engines.start_ranks(2, settings={"DBO_DISPATCH": request.param, **SIDE}, max_num_batched_tokens=2048) as ranks:
        yield ranks


@pytest.mark.parametrize("cuts", [(BOUNDARIES[0],), (17,), (100, 300), (132, 264, 396)])
def test_prefill_is_close_at_boundaries_and_inside_requests(side_engine: Engine, cuts: tuple[int, ...]) -> None:
    unsplit = get_unsplit(side_engine, PROMPTS)
    side_engine.configure(**SIDE)
    assert_close(unsplit, run_cut(side_engine, cuts, PROMPTS))


@pytest.mark.parametrize("cuts", [(1,), (2, 4), (40,), (2, 162)])
def test_decode_and_mixed_steps_are_close(side_engine: Engine, cuts: tuple[int, ...]) -> None:
    unsplit = get_unsplit(side_engine, PROMPTS, 6, MIXED)
    side_engine.configure(**SIDE)
    assert_close(unsplit, run_cut(side_engine, cuts, PROMPTS, 6, MIXED))


def test_a_step_that_is_not_cut_has_keys_concurrent_with_queries_and_gives_the_same_bits(side_engine: Engine) -> None:
    unsplit = generate(side_engine, PROMPTS, 6, {"DBO_MODE": "off"})
    before = side_engine.statistics()
    found = generate(side_engine, PROMPTS, 6, {"DBO_MODE": "auto", **SIDE})
    for then, now in zip(before, side_engine.statistics(), strict=True):
        assert now["split"] == then["split"]
        assert now["concurrent"] - then["concurrent"] == 6
        assert sum(now["declined"].values()) - sum(then["declined"].values()) == 6  # with the reasons not to cut
    assert find_difference(unsplit, found) == 0.0


def test_keys_are_on_the_side_lane_in_every_layer(side_engine: Engine) -> None:
    side_engine.llm.collective_rpc("dbo_request_timeline")
    generate(side_engine, PROMPTS, 1, {"DBO_MODE": "auto", **SIDE})
    for found in side_engine.llm.collective_rpc("dbo_timeline"):
        spans = Timeline.from_dict(found).spans
        assert [span.op for span in spans if span.lane == "side"] == [f"L{layer}.keys" for layer in range(3)]
        assert {span.micro_batch for span in spans} == {0}


def test_the_check_of_every_step_passes_cut_and_not(side_engine: Engine) -> None:
    for mode in ("always", "auto"):
        generate(side_engine, PROMPTS, 4, {"DBO_MODE": mode, "DBO_CHECK": "1", **SIDE})


@pytest.mark.slow
def test_calibration_measures_the_parts_of_attention(side_engine: Engine) -> None:
    try:
        for report, _ in side_engine.llm.collective_rpc(calibrate_few):
            assert {"slots", "latent", "keys", "queries", "attention", "attn_out"} <= report["op_errors"].keys()
            assert "side" not in report["contention"]  # on a CPU computing ops do not run concurrently
        generate(side_engine, PROMPTS, 3, {"DBO_MODE": "auto", "DBO_SIDE": "auto"})
        generate(side_engine, PROMPTS, 3, {"DBO_MODE": "always", "DBO_SIDE": "auto", "DBO_CHECK": "1"})
    finally:
        side_engine.llm.collective_rpc(forget_costs)


@pytest.mark.slow
@pytest.mark.parametrize("size", BATCH_SIZES)
def test_two_thousand_decoded_tokens_are_the_same_on_every_lane(side_engine: Engine, size: int) -> None:
    """Log-probabilities of a few prompts would not show a race that strikes once in a thousand steps."""
    prompts = [make_prompt(5 + seed % 40, seed) for seed in range(size)]
    tokens = -(-GENERATED // size)
    unsplit = decode(side_engine, prompts, tokens, {"DBO_MODE": "off"})
    for settings in SETTINGS if size > 1 else SETTINGS[:1]:  # one request is never cut when it decodes
        assert decode(side_engine, prompts, tokens, {"DBO_MODE": "always", **settings}) == unsplit


def generate(engine: Engine, prompts: Any, tokens: int, settings: dict[str, str]) -> list[Answer]:
    engine.configure(**settings)
    try:
        return engine.generate(prompts, tokens)
    finally:
        engine.configure()


def decode(engine: Engine, prompts: list[list[int]], tokens: int, settings: dict[str, str]) -> list[list[int]]:
    """Return the tokens generated greedily, without log-probabilities, which would take most of the time."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
    engine.configure(**settings)
    try:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.llm.generate(given, sampling, use_tqdm=False)
    finally:
        engine.configure()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
def test_shared_experts_concurrent_with_the_rest_of_a_layer_are_close(experts_with_side: Ranks) -> None:
    unsplit = experts_with_side.run(answer, {"DBO_MODE": "off"})
    for settings in SETTINGS:
        found = experts_with_side.run(answer, {"DBO_MODE": "always", "DBO_MIN_TOKENS": "1", **settings})
        for expected, answers in zip(unsplit, found, strict=True):
            assert_close(expected, answers)


@pytest.mark.slow
def test_ranks_that_do_not_split_have_concurrent_shared_experts_all_together(experts_with_side: Ranks) -> None:
    before = experts_with_side.run(count)
    experts_with_side.run(answer, {"DBO_MODE": "auto", **SIDE})
    after = experts_with_side.run(count)
    grown = {now["concurrent"] - then["concurrent"] for then, now in zip(before, after, strict=True)}
    assert len(grown) == 1
    assert grown.pop() > 0


def answer(engine: Engine, rank: int, settings: dict[str, str]) -> list[Answer]:
    engine.configure(**settings)
    answers = run_prompts(engine, BATCHES[rank], 6, ARRIVALS[rank])
    engine.configure()
    return answers


def count(engine: Engine, rank: int) -> dict[str, Any]:
    return engine.statistics()[0]
