"""Steps whose token-wise ops are cut into nano-batches answer as steps that are not, on the real vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from dbo_runtime.batch import Batch
from dbo_runtime.decline import Decline
from dbo_runtime.engine.nano_schedules import NanoSchedules
from dbo_runtime.vllm_plugin.context.splitter import ContextSplitter
from dbo_runtime.vllm_plugin.step.tensor_rows import TENSOR_ROWS
from tests.support.vllm.costs import forget_costs, make_up_costs
from tests.support.vllm.engine import Engine, make_prompt
from tests.support.vllm.engines import find_transport
from tests.support.vllm.equivalence import LENGTHS, MIXED, NANO, PROMPTS, assert_close, get_unsplit, run_in_nano_batches
from tests.support.vllm.expert_parallel import ARRIVALS, BATCHES, LONG, generate, generate_in_nano_batches
from tests.support.vllm.ranks import Ranks
from tests.support.vllm.transport import set_transport


@pytest.mark.parametrize("count", ["2", "3", "7"])
def test_a_prefill_is_close(one_rank: Engine, count: str) -> None:
    answers = run_in_nano_batches(one_rank, PROMPTS, DBO_MICRO_BATCHES=count)
    assert_close(get_unsplit(one_rank, PROMPTS), answers)


def test_projections_of_attention_are_cut(one_rank: Engine) -> None:
    """Without this, attention that stays one op would go unnoticed: its answers are the same."""
    program = one_rank.runner.get_model().forward.runtime.program
    (joint,) = {op.name for op in program.ops if op.ordered}
    schedule = NanoSchedules(program, TENSOR_ROWS).get(2, ("alternate", 0))
    labels = [each.op.label for each in schedule.instructions]
    for name in ("qkv#0", "qkv#1", "attention_core", "attn_out#0", "attn_out#1"):
        assert labels.count(f"L0.{name}") == 1
    assert f"L0.{joint}" not in labels


@pytest.mark.parametrize("policy", ["sequential", "alternate", "staggered:2"])
def test_two_ranks_prefill_is_close_in_every_order(two_ranks: Engine, policy: str) -> None:
    answers = run_in_nano_batches(two_ranks, PROMPTS, DBO_MICRO_BATCHES="3", DBO_POLICY=policy)
    assert_close(get_unsplit(two_ranks, PROMPTS), answers)


@pytest.mark.parametrize("count", ["2", "4"])
def test_decodes_and_steps_that_mix_them_with_prefills_are_close(two_ranks: Engine, count: str) -> None:
    answers = run_in_nano_batches(two_ranks, PROMPTS, 6, MIXED, least=5, DBO_MICRO_BATCHES=count)
    assert_close(get_unsplit(two_ranks, PROMPTS, 6, MIXED), answers)


def test_a_lone_prompt_of_few_tokens_is_close(two_ranks: Engine) -> None:
    prompt = [make_prompt(5, 3)]
    assert_close(get_unsplit(two_ranks, prompt), run_in_nano_batches(two_ranks, prompt, DBO_MICRO_BATCHES="5"))


def test_fewer_tokens_than_nano_batches_are_declined(two_ranks: Engine) -> None:
    before = two_ranks.statistics()[0]
    two_ranks.configure(**NANO, DBO_MICRO_BATCHES="5")
    try:
        two_ranks.generate([make_prompt(4, 3)])
    finally:
        two_ranks.configure(DBO_MODE="always")
    after = two_ranks.statistics()[0]
    reason = "fewer tokens than nano-batches"
    assert after["nano"] == before["nano"]
    assert after["declined"].get(reason, 0) == before["declined"].get(reason, 0) + 1


def test_auto_has_nano_batches_where_a_step_has_no_micro_batches(
    one_rank: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsplit = get_unsplit(one_rank, PROMPTS)
    before = one_rank.statistics()[0]
    one_rank.configure(DBO_MODE="always", DBO_SPLIT="auto")
    assert_close(unsplit, one_rank.generate(PROMPTS))
    both = one_rank.statistics()[0]
    monkeypatch.setattr(ContextSplitter, "read_batch", lambda *_: Decline("cascade attention"))
    assert_close(unsplit, one_rank.generate(PROMPTS))
    after = one_rank.statistics()[0]
    one_rank.configure(DBO_MODE="always")
    assert (both["split"] - before["split"], both["nano"] - before["nano"]) == (1, 0)
    assert (after["split"] - both["split"], after["nano"] - both["nano"]) == (0, 1)
    assert after["declined"] == before["declined"]


@pytest.mark.parametrize(("parts", "declined"), [("auto", 0), ("nano", 0), ("micro", 1)])
def test_a_model_without_micro_batches_has_nano_batches(
    one_rank: Engine, monkeypatch: pytest.MonkeyPatch, parts: str, declined: int
) -> None:
    unsplit = get_unsplit(one_rank, PROMPTS)
    before = one_rank.statistics()[0]
    monkeypatch.setattr(one_rank.runner.get_model().forward.decider, "no_micro", Decline("a drafter"))
    one_rank.configure(DBO_MODE="always", DBO_SPLIT=parts)
    assert_close(unsplit, one_rank.generate(PROMPTS))
    after = one_rank.statistics()[0]
    one_rank.configure(DBO_MODE="always")
    assert (after["split"] - before["split"], after["nano"] - before["nano"]) == (0, 1 - declined)
    assert after["declined"].get("a drafter", 0) - before["declined"].get("a drafter", 0) == declined


@pytest.mark.parametrize(("count", "expected"), [("auto", 8), ("3", 3)])
def test_with_costs_the_planner_chooses_how_many(two_ranks: Engine, count: str, expected: int) -> None:
    two_ranks.llm.collective_rpc(make_up_costs)
    two_ranks.llm.collective_rpc(set_transport, args=("network",))  # over shared memory, costs do not count
    settings = {"DBO_MODE": "auto", "DBO_SPLIT": "nano", "DBO_MICRO_BATCHES": count, "DBO_PROBATION": "0"}
    try:
        before = two_ranks.statistics()
        two_ranks.configure(**settings)
        answers = two_ranks.generate(PROMPTS)
        plans = two_ranks.llm.collective_rpc(get_last_order)
    finally:
        two_ranks.llm.collective_rpc(set_transport, args=(find_transport(),))
        two_ranks.llm.collective_rpc(forget_costs)
        two_ranks.configure(DBO_MODE="always")
    assert [after["nano"] - rank["nano"] for after, rank in zip(two_ranks.statistics(), before, strict=True)] == [1, 1]
    for name, ops in plans:
        assert name.rpartition("-")[2] == str(expected)
        assert {"qkv", "attention_core", "attn_out"} <= ops  # attention is divided: these ops have costs
        assert "attention" not in ops
    assert_close(get_unsplit(two_ranks, PROMPTS), answers)


def get_last_order(worker: Any) -> tuple[str, set[str]]:
    """Return the name, and the names of the ops, of the order that the planner would choose for all prompts at once."""
    runtime = worker.model_runner.get_model().forward.runtime
    choice = runtime.planner.choose(Batch(LENGTHS, sum(LENGTHS)), runtime.config)
    return str(choice.order.name), {op.name for op in choice.order.programs[0].ops}


@pytest.mark.parametrize("check", ["1", "races"])
def test_checks_pass(two_ranks: Engine, check: str) -> None:
    answers = run_in_nano_batches(two_ranks, PROMPTS, 3, DBO_MICRO_BATCHES="3", DBO_CHECK=check)
    assert_close(get_unsplit(two_ranks, PROMPTS, 3), answers)


@pytest.mark.parametrize("count", ["2", "5"])
@pytest.mark.parametrize("arrive", [(), ARRIVALS], ids=["prefill", "mixed"])
def test_tokens_are_dispatched_to_experts_on_other_ranks(data_parallel: Ranks, count: str, arrive: Any) -> None:
    """Ranks have batches of different sizes, and dispatch each nano-batch on its own."""
    unsplit = data_parallel.run_once(generate, "off", None, 4, arrive, BATCHES)
    answers = data_parallel.run(generate_in_nano_batches, 4, arrive, BATCHES, {**NANO, "DBO_MICRO_BATCHES": count})
    for (expected, _, _), (own, nano, _) in zip(unsplit, answers, strict=True):
        assert_close(expected, own)
        assert nano > 0
    assert len({nano for _, nano, _ in answers}) == 1


def test_a_rank_with_fewer_tokens_than_nano_batches_declines_for_all(data_parallel: Ranks) -> None:
    batches = [LONG, [make_prompt(1, 3)]]
    answers = data_parallel.run(generate_in_nano_batches, 1, (), batches, {**NANO, "DBO_MICRO_BATCHES": "2"})
    for _, nano, declined in answers:
        assert nano == 0
        assert declined["fewer tokens than nano-batches"] > 0
