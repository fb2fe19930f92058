"""Measuring the served model's own ops: real vLLM, with vLLM's dummy batches."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.sequence import IntermediateTensors

from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import RankError
from dbo_runtime.ir.divided_ops import divide_ops
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.lab.calibrate import measurement
from dbo_runtime.lab.calibrate.measurement import merge_ranks, overlaps_itself
from dbo_runtime.lab.calibrate.samples import Sample
from dbo_runtime.lab.calibrate.shapes import MAX_REPEATS, Shape, choose_repeats, choose_shapes, expect_round
from dbo_runtime.planner.costs.batch_features import BatchFeatures, measure_features
from dbo_runtime.vllm_plugin.api.dummy_batches import Limits
from tests.support.vllm.costs import FEW_SHAPES, measure_few
from tests.support.vllm.engine import Engine, make_prompt
from tests.support.vllm.measurements import assert_complete

PROMPTS = [make_prompt(length, seed) for seed, length in enumerate((40, 23, 61))]

limits = st.builds(
    Limits,
    tokens=st.integers(1, 20000),
    length=st.integers(1, 20000),
    requests=st.integers(1, 2000),
    blocks=st.integers(1, 5000),
    block_size=st.sampled_from([1, 16, 128]),
)
shapes = st.builds(Shape, st.integers(1, 9), st.integers(1, 40), st.integers(0, 50)).filter(lambda s: s.total > 1)


def name_ops(program: Program) -> Counter[str]:
    return Counter(op.name for op in program.ops)


@given(limits)
def test_shapes_are_within_the_limits_and_grow_single_prefills_first(limit: Limits) -> None:
    found = choose_shapes(limit)
    for shape in found:
        assert 1 < shape.total <= limit.tokens
        assert shape.tokens + shape.context <= limit.length
        assert shape.requests <= limit.requests
        assert shape.requests * -(-(shape.tokens + shape.context) // limit.block_size) <= limit.blocks
    single = [shape for shape in found if shape.is_single_prefill]
    assert found[: len(single)] == single
    for alike in (single, found[len(single) :]):
        totals = [shape.total for shape in alike]
        assert totals == sorted(totals)
    assert len(set(found)) == len(found)


def test_shapes_tell_fixed_costs_from_those_of_tokens_and_of_pairs() -> None:
    found = choose_shapes(Limits(tokens=8192, length=4096, requests=256, blocks=4000, block_size=16))
    assert Shape(2, 1, 16) in found  # one token a part
    assert Shape(1, 4096) in found  # as long a prefill as there can be
    for tokens in (8, 32):  # as many tokens, and few or many pairs
        assert len({count_pairs(shape.measure_features()) for shape in found if shape.total == tokens}) >= 3
    assert len({shape.total for shape in found if shape.context == 0}) >= 6
    assert {shape.tokens for shape in found if shape.context == 2048} == {32, 512}
    assert max(shape.total for shape in found) == 4096
    assert len(found) <= 24


@given(shapes)
def test_parts_of_a_shape_are_its_tokens_and_pairs(shape: Shape) -> None:
    unsplit = shape.measure_features()
    for cut in shape.cuts:
        parts = shape.measure_parts(cut)
        assert all(part.tokens > 0 for part in parts)
        assert sum(part.tokens for part in parts) == unsplit.tokens == shape.total
        assert sum(map(count_pairs, parts)) == count_pairs(unsplit)


def test_a_shape_is_cut_in_the_middle_and_near_its_end() -> None:
    assert Shape(1, 100).cuts == (50, 98)
    assert Shape(1, 8).cuts == (4, 6)
    assert Shape(6, 10).cuts == (30, 50)
    assert Shape(2, 1, 16).cuts == (1,)


@given(shapes)
def test_a_shape_is_cut_between_requests_or_inside_the_only_one(shape: Shape) -> None:
    if shape.requests > 1:
        assert all(cut % shape.tokens == 0 for cut in shape.cuts)
    elif shape.tokens > 3:
        assert all(1 < cut < shape.tokens - 1 for cut in shape.cuts)  # no part is as short as a decode


def count_pairs(load: BatchFeatures) -> float:
    return load.pairs + load.context_pairs + load.decode_pairs


def test_the_tail_of_a_request_that_is_cut_inside_has_its_head_as_context() -> None:
    assert Shape(1, 8).measure_parts(4) == (measure_features([4], [0]), measure_features([4], [4]))
    assert Shape(1, 8, 100).measure_parts(6) == (measure_features([6], [100]), measure_features([2], [106]))
    assert Shape(3, 2, 10).measure_parts(2) == (measure_features([2], [10]), measure_features([2, 2], [10, 10]))


def test_a_shape_is_repeated_in_half_of_the_time_that_is_left() -> None:
    assert choose_repeats(left=100.0, round_seconds=0.1) == MAX_REPEATS
    assert choose_repeats(left=100.0, round_seconds=10.0) == 2  # the two cuts
    assert choose_repeats(left=4.0, round_seconds=1.0) == 2
    assert choose_repeats(left=3.9, round_seconds=1.0) == 1
    assert choose_repeats(left=1.9, round_seconds=1.0) == 0
    assert choose_repeats(left=-1.0, round_seconds=1.0) == 0


def test_a_round_is_expected_to_take_what_the_first_did_and_more_with_more_tokens_of_as_many_requests() -> None:
    first, prompt, longer = (Shape(2, 1, 16), 1.0), (Shape(1, 8), 0.9), (Shape(1, 10), 3.0)
    assert expect_round([first], Shape(1, 100)) == 1.0
    assert expect_round([first, prompt], Shape(1, 100)) == 1.0
    assert expect_round([first, prompt, longer], Shape(1, 40)) == 1.0 + 2.0 * 4
    assert expect_round([first, longer], Shape(8, 5)) == 1.0  # eight short prompts are none of a long one's concern


def test_of_ranks_the_mean_computation_and_the_shortest_communication_count() -> None:
    load = BatchFeatures(4, 10)
    compute = [Sample("mlp", "compute", load, seconds, concurrent) for seconds, concurrent in ((3.0, 1.0), (5.0, 0.0))]
    comm = [Sample("reduce", "comm", load, seconds, concurrent) for seconds, concurrent in ((3.0, 1.0), (2.0, 0.5))]
    assert merge_ranks(compute) == Sample("mlp", "compute", load, 4.0, 0.5)
    late = compute[0]._replace(was_queued=False)
    assert not merge_ranks([late, compute[1]]).was_queued  # the mean has that of a rank whose lane waited for its host
    assert merge_ranks(comm) == comm[1]


def test_a_program_overlaps_itself_if_an_op_does_not_need_the_communication_before_it() -> None:
    assert not overlaps_itself(record(shares_experts=False))
    assert overlaps_itself(record(shares_experts=True))


def record(shares_experts: bool) -> Program:
    p = ProgramBuilder()
    x = p.input("x")
    sent = p.comm("dispatch", lambda x: x, x)
    shared = [p.compute("shared_experts", lambda x: x, x)] if shares_experts else []
    return p.build(p.compute("experts", lambda *x: x[0], sent, *shared))


def test_a_stage_is_given_tokens_that_differ_and_the_same_ones_each_time() -> None:
    measurement._fill(None)
    filled = []
    for _ in range(2):
        handed = IntermediateTensors({name: torch.zeros(16, 4) for name in ("hidden_states", "residual")})
        measurement._fill(handed)
        filled.append(handed)
    assert filled[0] == filled[1]
    assert len(filled[0]["hidden_states"].unique(dim=0)) == 16


@pytest.mark.slow
def test_one_rank_measures_every_op_alone_at_every_load(one_rank: Engine) -> None:
    program = one_rank.runner.get_model().forward.runtime.program
    ops = name_ops(program)
    token_wise = name_ops(divide_ops(program)) - ops
    del token_wise["attention_core"]  # joint: it takes what the others leave of attention
    found, told = one_rank.llm.collective_rpc(measure_few)[0]
    assert set(token_wise) == {"qkv", "attn_out"}
    assert_complete(found, ops + token_wise)
    runs = 2 * len(FEW_SHAPES) * MAX_REPEATS  # two ways of each
    assert len(found.samples) == (ops.total() * 2 + token_wise.total()) * runs  # micro-batches
    shapes = [(number, len(FEW_SHAPES), str(shape)) for number, shape in enumerate(FEW_SHAPES)]
    assert told == [*shapes, (len(FEW_SHAPES), len(FEW_SHAPES), "done")]
    assert told[0] == (0, len(FEW_SHAPES), "2 x 1 tokens after 16")


def test_nothing_is_left_behind(one_rank: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    before = one_rank.generate(PROMPTS, tokens=4)
    seen = look_at(one_rank)
    caches = [cache.clone() for cache in one_rank.runner.kv_caches]
    capsys.readouterr()
    one_rank.llm.collective_rpc(measure_few)
    assert "dbo_runtime" not in capsys.readouterr().err
    assert look_at(one_rank) == seen
    assert all(torch.equal(*pair) for pair in zip(one_rank.runner.kv_caches, caches, strict=True))
    assert one_rank.generate(PROMPTS, tokens=4) == before


def look_at(engine: Engine) -> tuple[Any, ...]:
    """Return all that a measurement could leave changed."""
    runner = engine.runner
    forward = runner.get_model().forward
    decider, tables = forward.decider, runner.input_batch.block_table.block_tables
    return (
        id(forward),
        id(forward.runtime),
        forward.runtime.config,
        forward.observer.recording,
        forward.observer.recording.timeline,
        forward.observer.metrics,
        forward.phase,
        decider.choose_cuts,
        decider.choose_sizes,
        runner.uniform_decode_query_len,
        runner.scheduler_config.max_num_seqs,
        [(table.block_table.np.tolist(), table.num_blocks_per_row.tolist()) for table in tables],
        engine.statistics(),
    )


def test_a_failure_leaves_nothing_behind(one_rank: Engine) -> None:
    seen = look_at(one_rank)
    runner = one_rank.runner
    failing = patch.object(runner, "_build_attention_metadata", side_effect=MemoryError)
    with failing, pytest.raises(RankError, match="MemoryError") as raised:
        one_rank.llm.collective_rpc(measure_few)
    assert isinstance(raised.value.__cause__, MemoryError)
    assert look_at(one_rank) == seen


def test_a_model_that_cannot_be_split_is_told_why(one_rank: Engine) -> None:
    splitter = one_rank.runner.get_model().forward.decider.splitter
    refusal = patch.object(splitter, "read_batch", return_value=Decline("cascade attention"))
    with refusal, pytest.raises(DeclineError, match=r"cannot be split \(2 x 1 tokens after 16: cascade attention\)"):
        one_rank.llm.collective_rpc(measure_few)


def test_without_time_the_smallest_batch_is_run_once_and_no_other(one_rank: Engine) -> None:
    found, told = one_rank.llm.collective_rpc(measure_few, args=(0.0,))[0]
    smallest = FEW_SHAPES[0]
    assert [step.mode for step in found.steps] == ["unsplit", "sequential", "alternate"]
    assert {step.loads for step in found.steps[1:]} == {smallest.measure_parts(1)}
    assert told == [(0, len(FEW_SHAPES), str(smallest)), (len(FEW_SHAPES), len(FEW_SHAPES), "done")]


@pytest.mark.slow
def test_tensor_parallel_ranks_measure_the_same(two_ranks: Engine) -> None:
    before = two_ranks.generate(PROMPTS, tokens=4)
    counts = two_ranks.statistics()
    (found, _), (other, _) = two_ranks.llm.collective_rpc(measure_few)
    assert found == other
    assert {sample.op for sample in found.samples if sample.lane == "comm"} == {"attn_reduce", "mlp_reduce"}
    assert_complete(found, Counter(sample.op for sample in found.samples))
    assert two_ranks.statistics() == counts
    assert two_ranks.generate(PROMPTS, tokens=4) == before


@pytest.mark.slow
def test_ranks_stop_at_the_same_shape(two_ranks: Engine) -> None:
    (found, told), (other, said) = two_ranks.llm.collective_rpc(measure_few, args=(0.25,))
    assert found == other
    assert told == said
