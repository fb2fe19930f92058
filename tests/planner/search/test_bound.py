"""The time that no issue order can beat."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from dbo_runtime.ir.op import COMM, COMPUTE
from dbo_runtime.planner.search.bound import compute_bound
from dbo_runtime.planner.search.jobs import Job, Operation, make_jobs
from tests.support.planner.shop import Shop, chain_shops, find_least_end, share_chain, shops
from tests.support.profiles import scale


def calculate_bound(shop: Shop) -> float:
    """Return the bound of chains on two lanes, as `docs/theory.md` writes it."""
    chains = [
        [(op.lane, time) for op, time in zip(program.ops, times, strict=True)]
        for program, times in zip(shop.programs, shop.times, strict=True)
    ]
    bounds = [sum(time for _, time in chain) for chain in chains]
    for lane in (COMPUTE, COMM):
        users = [chain for chain in chains if any(own == lane for own, _ in chain)]
        if users:
            work = sum(time for chain in users for own, time in chain if own == lane)
            heads, tails = map(find_head, users, [lane] * len(users)), (find_head(c[::-1], lane) for c in users)
            bounds.append(work + min(heads) + min(tails))
    return max(bounds)


def find_head(chain: list[tuple[str, float]], lane: str) -> float:
    """Return the work before the first op on *lane*."""
    first = next(position for position, (own, _) in enumerate(chain) if own == lane)
    return sum(time for _, time in chain[:first])


@settings(max_examples=scale(500))
@given(chain_shops(micro_batches=3))
def test_the_bound_of_chains_is_that_of_the_formula(shop: Shop) -> None:
    assert compute_bound(make_jobs(shop.programs, shop.times)) == calculate_bound(shop)


@settings(max_examples=scale(300))
@given(shops(max_ops=4))
def test_no_order_of_two_micro_batches_beats_the_bound(shop: Shop) -> None:
    assert compute_bound(make_jobs(shop.programs, shop.times)) <= find_least_end(shop)


@settings(max_examples=scale(100))
@given(shops(micro_batches=3, max_ops=3))
def test_no_order_of_three_micro_batches_beats_the_bound(shop: Shop) -> None:
    assert compute_bound(make_jobs(shop.programs, shop.times)) <= find_least_end(shop)


@pytest.mark.parametrize(
    ("layer", "bound"),
    [
        ([("A", 4)], 4),  # work of the lane
        ([("C", 2), ("A", 8), ("C", 2)], 10),  # one of the two dispatches first, and one combines last
        ([("A", 2), ("C", 2), ("A", 2), ("C", 2)], 5),  # work of 4, and half a phase to fill
        ([("A", 1), ("C", 2), ("A", 1)], 3),  # either lane leaves it at 2 + 1/2 + 1/2
    ],
)
def test_the_bound_of_two_equal_halves_is_as_worked_out_by_hand(layer: list[tuple[str, float]], bound: float) -> None:
    shop = share_chain(layer, 1, 2)
    assert compute_bound(make_jobs(shop.programs, shop.times)) == bound


def test_one_micro_batch_takes_its_longest_path() -> None:
    shop = share_chain([("A", 1), ("C", 2), ("A", 3)], 2, 1)
    assert compute_bound(make_jobs(shop.programs, shop.times)) == 12


def test_nothing_takes_no_time() -> None:
    assert compute_bound([]) == compute_bound([Job((), 2)]) == 0.0


def test_lanes_that_nobody_uses_do_not_count() -> None:
    assert compute_bound([Job([Operation(1, 3.0)], 3), Job((), 3)]) == 3.0
