"""A step like a declined one is declined before its batch is read, but not for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.vllm_plugin.context.batch_size import BatchSize
from dbo_runtime.vllm_plugin.step.decline_cache import MAX_REPEATS, MAX_SIZES, DeclineCache
from dbo_runtime.vllm_plugin.step.forward import SplitForward
from tests.support.vllm.forwards import BATCH, EXPECTED, Model, Splitter, make_forward, run

SIZE = BatchSize(tokens=8, requests=2, max_query_len=4)
DECLINE = Decline("a reason")
CONFIG = RuntimeConfig()


def make_declined(splitter: Splitter) -> SplitForward:
    """Return a forward that has declined one step of `SIZE`."""
    splitter.size = SIZE
    forward = make_forward(Model(), splitter)
    run(forward)
    assert splitter.reads == 1
    return forward


def make_cache(*sizes: BatchSize) -> DeclineCache:
    """Return a cache with `DECLINE` for each of these sizes."""
    cache = DeclineCache()
    for size in sizes:
        assert cache.find(size, CONFIG, None) is None
        cache.keep(DECLINE, size)
    return cache


def test_the_next_steps_of_the_size_are_declined_without_being_read() -> None:
    splitter = Splitter(DECLINE)
    forward = make_declined(splitter)
    for _ in range(MAX_REPEATS):
        assert run(forward).equal(EXPECTED)
    assert splitter.reads == 1
    assert forward.runtime.statistics.declined == {"a reason": 1 + MAX_REPEATS}


def test_after_so_many_steps_a_batch_is_read_again() -> None:
    splitter = Splitter(DECLINE)
    forward = make_declined(splitter)
    splitter.batch = BATCH  # which can be split
    for _ in range(MAX_REPEATS):
        run(forward)
    assert forward.runtime.statistics.split == 0
    run(forward)
    assert forward.runtime.statistics.split == 1


@pytest.mark.parametrize("changes", [{"tokens": 9}, {"requests": 3}, {"max_query_len": 5}], ids=str)
def test_a_batch_of_another_size_is_read(changes: dict[str, int]) -> None:
    splitter = Splitter(DECLINE)
    forward = make_declined(splitter)
    splitter.size, splitter.batch = SIZE._replace(**changes), BATCH
    run(forward)
    assert forward.runtime.statistics.split == 1


@pytest.mark.parametrize("tokens", [512, 575])
def test_batches_that_differ_by_less_than_an_eighth_are_of_the_same_size(tokens: int) -> None:
    splitter = Splitter(DECLINE)
    splitter.size = SIZE._replace(tokens=512)
    forward = make_forward(Model(), splitter)
    run(forward)
    splitter.size = SIZE._replace(tokens=tokens)
    run(forward)
    assert splitter.reads == 1


@given(st.tuples(*[st.integers(0, 100_000)] * 3), st.tuples(*[st.integers(0, 100_000)] * 3))
def test_sizes_taken_as_the_same_are_within_an_eighth(numbers: tuple[int, ...], others: tuple[int, ...]) -> None:
    first, second = BatchSize(*numbers), BatchSize(*others)
    cache = make_cache(first)
    assert cache.find(first, CONFIG, None) is DECLINE
    if cache.find(second, CONFIG, None) is not None:
        assert first.max_query_len == second.max_query_len
        assert all(8 * abs(one - other) < max(one, other, 1) for one, other in zip(first, second, strict=True))


def test_steps_of_another_size_in_between_change_nothing() -> None:
    splitter = Splitter(DECLINE)
    forward = make_declined(splitter)
    prefill = BatchSize(2048, 2, 2000)
    for size in (prefill, SIZE, prefill, SIZE):
        splitter.size = size
        run(forward)
    assert splitter.reads == 2


def test_a_decline_because_of_cached_blocks_is_not_repeated() -> None:
    """It is of those requests, and not of their number."""
    forward = make_declined(Splitter(contexts=DECLINE))
    assert forward.decider.declines.size_and_capacity[0] == 0


def test_a_step_that_is_unsplit_for_comparison_declines_no_later_ones() -> None:
    """`AbTrials` has single steps run unsplit of a class that splits, and counts all of them."""
    splitter = Splitter(Decline("on probation", expected=1.0, trial_class="a class"))
    forward = make_declined(splitter)
    splitter.batch = BATCH
    run(forward)
    assert forward.runtime.statistics.split == 1


def test_sizes_are_forgotten_when_there_are_too_many() -> None:
    sizes = [SIZE._replace(max_query_len=number) for number in range(MAX_SIZES + 1)]
    cache = make_cache(*sizes)
    assert cache.size_and_capacity == (MAX_SIZES, MAX_SIZES)
    assert cache.find(sizes[0], CONFIG, None) is None
    assert cache.find(sizes[-1], CONFIG, None) is DECLINE


def test_with_other_settings_a_batch_is_read() -> None:
    splitter = Splitter(DECLINE)
    forward = make_declined(splitter)
    forward.runtime.config = replace(forward.runtime.config, margin=0.5)
    run(forward)
    assert splitter.reads == 2


def test_declines_are_forgotten_with_the_costs_they_come_from() -> None:
    cache, planner = DeclineCache(), Planner.__new__(Planner)
    assert cache.find(SIZE, CONFIG, planner) is None
    cache.keep(DECLINE, SIZE)
    assert cache.find(SIZE, CONFIG, planner) is DECLINE
    assert cache.find(SIZE, CONFIG, None) is None
    assert cache.size_and_capacity == (0, MAX_SIZES)


def test_chosen_cuts_are_not_declined_by_earlier_steps() -> None:
    splitter = Splitter(DECLINE)
    forward = make_declined(splitter)
    forward.decider.choose_cuts, splitter.batch = lambda batch: [4], BATCH
    run(forward)
    assert forward.runtime.statistics.split == 1


def test_chosen_cuts_that_are_declined_decline_no_later_steps() -> None:
    splitter = Splitter(DECLINE)
    forward = make_declined(splitter)
    splitter.size, forward.decider.choose_cuts = SIZE._replace(requests=1), lambda batch: [4]
    run(forward)
    forward.decider.choose_cuts, splitter.batch = None, BATCH
    run(forward)
    assert forward.runtime.statistics.split == 1


def test_what_a_forward_was_called_with_does_not_decline_later_steps() -> None:
    splitter = Splitter()
    splitter.size = SIZE
    forward = make_forward(Model(), splitter)
    run(forward, spec_step_idx=1)
    assert forward.runtime.statistics.split == 0
    run(forward)
    assert forward.runtime.statistics.split == 1


@pytest.mark.parametrize(("longest", "reads"), [(1, 0), (2, 1)])
def test_decodes_are_declined_before_they_are_read(longest: int, reads: int) -> None:
    splitter = Splitter(Batch((1, longest), 0))
    splitter.size = SIZE._replace(max_query_len=longest)
    forward = make_forward(Model(), splitter, mode="auto")
    forward.runtime.config = replace(forward.runtime.config, min_prefill_tokens=4)
    run(forward)
    assert list(forward.runtime.statistics.declined) == ["fewer prefill tokens than DBO_MIN_PREFILL_TOKENS"]
    assert splitter.reads == reads
