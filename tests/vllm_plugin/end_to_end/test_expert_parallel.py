"""Experts on other ranks: split and unsplit agree, ranks always agree, and nothing ever hangs. Real vLLM, two ranks."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.lab.calibrate.measurement import Measurements
from dbo_runtime.planner.online import correction
from tests.support.vllm.costs import calibrate_few, forget_costs, measure_few
from tests.support.vllm.engine import Answer, Engine, find_difference, make_prompt
from tests.support.vllm.engines import Engines
from tests.support.vllm.equivalence import BOUNDARIES, CLOSE, MIXED, PROMPTS, assert_close, get_unsplit, run_cut
from tests.support.vllm.expert_parallel import (
    ARRIVALS,
    BATCHES,
    EDGES,
    FEW,
    LONG,
    assert_answers_are_close,
    assert_split_is_close,
    count_since,
    generate,
    run_prompts,
)
from tests.support.vllm.measurements import assert_complete
from tests.support.vllm.ranks import Ranks

# What does not depend on how tokens are dispatched is tested with one way.
one_dispatch = pytest.mark.parametrize("data_parallel", ["all_gather"], indirect=True)


@pytest.mark.parametrize("cuts", [(edge,) for edge in BOUNDARIES] + [(17,), (263,), (100, 300), (96, 160, 320)])
def test_tensor_and_expert_parallel_prefill_is_close(expert_ranks: Engine, cuts: tuple[int, ...]) -> None:
    assert_close(get_unsplit(expert_ranks, PROMPTS), run_cut(expert_ranks, cuts, PROMPTS))


@pytest.mark.parametrize("cuts", [(1,), (2, 4), (40,), (2, 162)])
def test_tensor_and_expert_parallel_decode_and_mixed_steps_are_close(
    expert_ranks: Engine, cuts: tuple[int, ...]
) -> None:
    assert_close(get_unsplit(expert_ranks, PROMPTS, 6, MIXED), run_cut(expert_ranks, cuts, PROMPTS, 6, MIXED))


@pytest.mark.parametrize("edge", range(4))
def test_data_parallel_prefill_cut_at_every_request_boundary_is_close(data_parallel: Ranks, edge: int) -> None:
    assert_split_is_close(data_parallel, [[EDGES[0][edge]], [EDGES[1][edge]]])
    assert_split_is_close(data_parallel, [[EDGES[0][edge]], [EDGES[1][-1 - edge]]])


@pytest.mark.parametrize(
    "cuts",
    [
        None,
        [[263], [232]],
        [[17], [449]],
        [[1], [463]],
        [[97], [31]],  # a piece of one token: a prefill's, and one that looks like a decode
        [[100, 300], [20, 40]],
        [[96, 160, 320], [150, 151, 152]],
    ],
    ids=str,
)
def test_data_parallel_prefill_cut_inside_requests_is_close(data_parallel: Ranks, cuts: Any) -> None:
    assert_split_is_close(data_parallel, cuts)


@pytest.mark.parametrize("cuts", [None, [[1], [2]], [[2, 4], [1, 3]], [[40], [20]], [[3, 100], [2, 20]]], ids=str)
def test_data_parallel_decode_and_mixed_steps_are_close(data_parallel: Ranks, cuts: Any) -> None:
    assert_split_is_close(data_parallel, cuts, 6, ARRIVALS)


@one_dispatch
@pytest.mark.parametrize("policy", ["sequential", "staggered:1", "staggered:2"])
def test_data_parallel_prefill_is_close_with_every_policy(data_parallel: Ranks, policy: str) -> None:
    data_parallel.run(configure, {"DBO_POLICY": policy})
    unsplit = data_parallel.run(generate, "off", None, 2, ())
    data_parallel.run(configure, {"DBO_POLICY": policy, "DBO_MICRO_BATCHES": "3"})
    split = data_parallel.run(generate_as_configured, 2)
    data_parallel.run(configure, {})
    for (expected, _, _), answers in zip(unsplit, split, strict=True):
        assert_close(expected, answers)


def configure(engine: Engine, rank: int, settings: dict[str, str]) -> None:
    engine.configure(**settings)


def generate_as_configured(engine: Engine, rank: int, tokens: int) -> list[Answer]:
    before = engine.count_split()
    answers = run_prompts(engine, BATCHES[rank], tokens)
    assert engine.count_split() > before
    return answers


@pytest.mark.parametrize("check", ["1", "races"])
def test_the_check_of_every_step_passes(data_parallel: Ranks, check: str) -> None:
    data_parallel.run(configure, {"DBO_CHECK": check})
    try:
        data_parallel.run(generate_as_configured, 3)
    finally:
        data_parallel.run(configure, {})


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("few", FEW)
def test_a_rank_with_few_tokens_takes_part_with_padding(data_parallel: Ranks, few: str, parts: int) -> None:
    """A long prefill elsewhere is split in as many parts as the settings say, and all ranks answer as unsplit."""
    batches = [LONG, FEW[few]]
    unsplit = data_parallel.run_once(generate, "off", None, 4, (), batches)
    split = data_parallel.run(generate_with, {"DBO_MICRO_BATCHES": str(parts)}, batches)
    data_parallel.run(configure, {})
    for (expected, _, _), (answers, _) in zip(unsplit, split, strict=True):
        assert_answers_are_close(expected, answers)
    # After the prefill each rank has as many tokens as requests: where that is one on both, there is nowhere to cut.
    decodes = 3 if len(FEW[few]) > 1 else 0
    declined = {"nowhere to cut": 3} if not decodes else {}
    expected_counts = {"split": 1 + decodes, "micro_batches": parts + 2 * decodes, "declined": declined}
    assert [counts for _, counts in split] == [expected_counts] * 2


def generate_with(
    engine: Engine, rank: int, settings: dict[str, str], batches: Any
) -> tuple[list[Answer], dict[str, Any]]:
    """Run this rank's prompts by these settings; return answers and counts."""
    engine.configure(**settings)
    before = engine.statistics()[0]
    answers = run_prompts(engine, batches[rank], 4)
    after = engine.statistics()[0]
    counts = {name: after[name] - before[name] for name in ("split", "micro_batches")}
    return answers, {**counts, "declined": count_since(before["declined"], after["declined"])}


@one_dispatch
def test_a_padded_rank_passes_the_check_of_every_step(data_parallel: Ranks) -> None:
    for check in ("1", "races"):
        settings = {"DBO_CHECK": check, "DBO_MICRO_BATCHES": "3"}
        split = data_parallel.run(generate_with, settings, [LONG, FEW["one token"]])
        assert [counts["split"] for _, counts in split] == [1, 1]
    data_parallel.run(configure, {})


def test_very_unequal_ranks_split(data_parallel: Ranks) -> None:
    """2,000 tokens on one rank, in sizes that differ by 50 and by 1,000 times."""
    long = [make_prompt(1000, 1), make_prompt(1000, 2)]
    for few in (40, 1):
        assert_split_is_close(data_parallel, None, 1, (), [long, [make_prompt(few, 3)]])


def test_a_dummy_batch_takes_the_same_path(data_parallel: Ranks) -> None:
    """vLLM's dummy batches have one token on CPU; with more, an idle rank takes part in what the others split."""
    alone = data_parallel.run(step_while_other_rank_idles, "off")
    together = data_parallel.run(step_while_other_rank_idles, "always")
    assert [split for _, split in together] == [1, 1]
    assert find_difference(alone[1][0], together[1][0]) <= CLOSE


def step_while_other_rank_idles(engine: Engine, rank: int, mode: str) -> tuple[list[Answer], int]:
    engine.configure(DBO_MODE=mode)
    before = engine.count_split()
    answers: list[Answer] = []
    if rank == 0:
        engine.runner._dummy_run(64)
    else:
        answers = engine.step_once(make_prompt(50, 5))
    engine.configure()
    return answers, engine.count_split() - before


@one_dispatch
def test_one_ranks_own_reason_stops_all_of_them(data_parallel: Ranks) -> None:
    """A rank may have a reason in its own batch. Ranks vote on each step, and none waits forever."""
    found = data_parallel.run(generate_with_a_private_reason, 1)
    for _, split, declined in found:
        assert split > 0
        assert declined == {"a reason that only rank 1 knows": 2}
    unsplit = data_parallel.run(generate, "off", None, 6, ())
    for (expected, _, _), (answers, _, _) in zip(unsplit, found, strict=True):
        assert_close(expected, answers)


def generate_with_a_private_reason(engine: Engine, rank: int, blind: int) -> tuple[list[Answer], int, dict[str, int]]:
    """Let rank *blind* refuse its second and fourth step."""
    forward = engine.runner.get_model().forward
    splitter = forward.decider.splitter
    calls = iter(range(100))

    def split(context: Any, slices: Any, sizes: Any = ()) -> Any:
        if next(calls) in (1, 3) and rank == blind:
            return Decline("a reason that only rank 1 knows")
        return type(splitter).split(splitter, context, slices, sizes)

    splitter.split = split
    before = engine.statistics()[0]
    try:
        answers = run_prompts(engine, BATCHES[rank], 6)
    finally:
        del splitter.split
    after = engine.statistics()[0]
    declined = count_since(before["declined"], after["declined"])
    return answers, after["split"] - before["split"], declined


def measure_on_rank(engine: Engine, rank: int) -> Measurements:
    found: Measurements = engine.llm.collective_rpc(measure_few)[0][0]
    return found


@pytest.mark.slow
@one_dispatch
def test_data_parallel_ranks_measure_dispatch_alone_too(data_parallel: Ranks) -> None:
    found, other = data_parallel.run(measure_on_rank)
    assert found == other
    ops = Counter(sample.op for sample in found.samples)
    assert {"dispatch", "combine", "shared_experts", "experts"} <= set(ops)
    assert_complete(found, ops)
    assert any(sample.concurrent for sample in found.samples if sample.op == "dispatch")


COUNTS = ((500, 400), (64, 2000), (3, 5), (1, 8))  # tokens of both ranks


@pytest.mark.slow
@one_dispatch
def test_data_parallel_ranks_that_calibrated_decide_alike_and_answer_as_unsplit(data_parallel: Ranks) -> None:
    """On one host, too, costs may say that it pays; DBO_CHECK compares in each step what ranks are about to do."""
    unsplit = data_parallel.run(generate, "off", None, 4, ARRIVALS)
    try:
        digests = data_parallel.run(calibrate_on_rank)
        decisions = data_parallel.run(decide_on_rank)
        always, auto = (data_parallel.run(generate_by_costs, mode) for mode in ("always", "auto"))
    finally:
        data_parallel.run(forget_costs_on_rank)
    assert digests[0] == digests[1]
    assert decisions[0] == decisions[1]
    # Of 64 tokens next to 2,000, and of one, none is cut; what pads them is one token in each further micro-batch.
    padding = [len(sizes) - 1 for sizes, _ in decisions[0]]
    assert [sum(map(sum, sizes)) for sizes, _ in decisions[0]] == [900, 2064 + padding[1], 8, 9 + padding[3]]
    for found in (always, auto):
        assert found[0][1] == found[1][1], "ranks decided differently"
        for (expected, _, _), (answers, _) in zip(unsplit, found, strict=True):
            assert_close(expected, answers)
        assert found[0][1]["factors"] != (1.0, 1.0), "nothing was learnt"
    assert always[0][1]["split"] > 0
    assert "no communication to hide" not in auto[0][1]["declined"]


def calibrate_on_rank(engine: Engine, rank: int) -> str:
    ((_, digest),) = engine.llm.collective_rpc(calibrate_few)
    return str(digest)


def decide_on_rank(engine: Engine, rank: int) -> list[tuple[Any, str]]:
    """Return how both ranks would split steps, and in which order; without those that cannot be split."""
    planner = engine.runner.get_model().forward.runtime.planner
    config = RuntimeConfig(mode="always", split="micro")
    choices = [planner.choose_data_parallel(tokens, config) for tokens in COUNTS]
    return [(choice.sizes, choice.order.name) for choice in choices if not isinstance(choice, Decline)]


def generate_by_costs(engine: Engine, rank: int, mode: str) -> tuple[list[Answer], dict[str, Any]]:
    """Run this rank's prompts; return answers, and what both ranks must have done, counted and learnt alike."""
    engine.configure(DBO_MODE=mode, DBO_CHECK="1")
    before = engine.statistics()[0]
    # Ranks learn from each other after every third step, and at once: small changes may undo each other exactly.
    with patch.multiple(correction, PERIOD_STEPS=3, MAX_LOG_CHANGE=correction.MAX_LOG):
        answers = run_prompts(engine, BATCHES[rank], 4, ARRIVALS[rank])
    engine.configure()
    after = engine.statistics()[0]
    learnt = engine.runner.get_model().forward.runtime.planner.memory.correction
    return answers, {
        "split": after["split"] - before["split"],
        "declined": count_since(before["declined"], after["declined"]),
        "counted": learnt._steps,
        "factors": (learnt.factor("unsplit"), learnt.factor("split")),
    }


def forget_costs_on_rank(engine: Engine, rank: int) -> None:
    engine.llm.collective_rpc(forget_costs)
    engine.configure()


STEPS = 500


@pytest.mark.slow
@one_dispatch
def test_requests_that_arrive_at_random_never_hang_and_decide_alike(data_parallel: Ranks) -> None:
    """500 steps on either rank; what a rank does is a function of numbers that all hold, so all do the same."""
    split = data_parallel.run(serve_at_random, timeout=400)
    data_parallel.run(configure, {"DBO_MODE": "off"})
    unsplit = data_parallel.run(serve_at_random, timeout=400)
    data_parallel.run(configure, {})
    assert split[0][1] == split[1][1], "ranks decided differently"
    counts = split[0][1]
    assert counts["split"] > 100
    assert counts["split"] + sum(counts["declined"].values()) >= STEPS
    for (answers, _), (expected, _) in zip(split, unsplit, strict=True):
        assert answers.keys() == expected.keys()
        assert len(answers) > 50
        for name in answers:
            assert_close([expected[name]], [answers[name]])


def serve_at_random(engine: Engine, rank: int) -> tuple[dict[str, Answer], dict[str, Any]]:
    """Run STEPS steps or more with requests of random length at random moments, bursts and pauses among them."""
    dice = random.Random(1000 + rank)
    before = engine.statistics()[0]
    arrivals: dict[int, list[list[int]]] = {}
    for turn in range(STEPS + 30):
        busy = (turn // 40 + rank) % 3 > 0  # either rank pauses, at times of its own
        count = dice.choice((0, 0, 0, 0, 1, 1, 3)) if busy else 0
        arrivals[turn] = [make_prompt(dice.randint(1, 90), dice.randint(0, 50)) for _ in range(count)]
    runner = engine.runner
    with patch.object(runner, "_dummy_run", wraps=runner._dummy_run) as run_idle:
        answers = engine.serve(arrivals, STEPS + 80, tokens=5, log_probs=0)
    assert run_idle.call_count > 50, "this rank was hardly ever idle"
    after = engine.statistics()[0]
    declined = count_since(before["declined"], after["declined"])
    return answers, {"split": after["split"] - before["split"], "declined": declined}


LAYOUTS: dict[str, tuple[int, dict[str, str], dict[str, Any]]] = {
    "experts in shards, unsplit steps compiled": (2, {}, {"enable_expert_parallel": False, "enforce_eager": False}),
    "three ranks, uneven experts": (3, {"DBO_DISPATCH": "all_to_all"}, {}),
    "chunks of tensor parallel ranks": (1, {"DBO_DISPATCH": "all_to_all"}, {"tensor_parallel_size": 2}),
    "sequence-parallel MoE": (2, {"DBO_CHECK": "1"}, {"tensor_parallel_size": 2}),
    "sequence-parallel MoE by all-to-all": (
        2,
        {"DBO_CHECK": "1", "DBO_DISPATCH": "all_to_all"},
        {"tensor_parallel_size": 2},
    ),
}


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_of_ranks_are_close(layout: str, engines: Engines) -> None:
    size, settings, options = LAYOUTS[layout]
    with engines.start_ranks(size, settings=settings, **options) as ranks:
        batches = [BATCHES[rank % 2] for rank in range(size)]
        assert_split_is_close(ranks, None, 3, [ARRIVALS[rank % 2] for rank in range(size)], batches)
        # Under the check, sequence-parallel steps of one token are not split, so that nothing would be compared.
        if size > 1 and "DBO_CHECK" not in settings:
            assert_split_is_close(ranks, None, 2, (), [LONG, FEW["one token"], FEW["an idle rank"]][:size])


ONE_TOKEN = ([LONG, FEW["one token"]], ((0,), (0,)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_sequence_parallel_experts_answer_as_one_rank(dispatch: str, engines: Engines, one_rank: Engine) -> None:
    """Of steps with one token on a rank, vLLM's own are wrong (vLLM issue #50154), and split ones are not."""
    with engines.start_ranks(2, settings={"DBO_DISPATCH": dispatch}, tensor_parallel_size=2) as ranks:
        for batches, arrivals, tokens in ((BATCHES, ARRIVALS, 3), ONE_TOKEN):
            split = ranks.run(generate, "always", None, tokens, arrivals, batches)
            for rank, (answers, count, declined) in enumerate(split):
                assert count > 0
                assert not declined, "a step that is not split may have one token"
                assert_close(get_unsplit(one_rank, batches[rank], tokens, arrivals[rank]), answers)
