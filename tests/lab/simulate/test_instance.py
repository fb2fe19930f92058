"""The simulation against queueing theory, and what no schedule may break."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo_runtime.lab.simulate.disturbance import Disturbances
from dbo_runtime.lab.simulate.instance import Layout, Outcome, serve
from dbo_runtime.lab.simulate.workload import Request, Workload, draw_requests
from tests.support.lab.pricers import Linear
from tests.support.profiles import scale

pytest.importorskip("simpy")
NONE = Disturbances()
TOLERANCE = 1e-9


def run(workload: Workload, rate: float, count: int, layout: Layout, pricer: Linear, seed: int = 0) -> Outcome:
    return serve(draw_requests(workload, rate, count, seed), layout, pricer, NONE, seed)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_prompt_a_step_waits_as_long_as_in_an_m_d_1_queue(load: float) -> None:
    """Pollaczek and Khinchine: the mean wait is load * service / (2 * (1 - load))."""
    layout = Layout(ranks=1, budget=100, sequences=100)
    outcome = run(Workload(100, 1, spread=0.0), load, 15_000, layout, Linear(1.0))
    waits = [served.ttft - 1.0 for served in outcome.served]
    assert min(waits) >= -TOLERANCE
    assert sum(waits) / len(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.05)
    assert outcome.busy / outcome.seconds == pytest.approx(load, rel=0.02)  # the utilisation law


@pytest.mark.parametrize("ranks", [1, 3])
def test_littles_law_holds(ranks: int) -> None:
    """The integral of the population over time is the sum of the times that requests are in the system."""
    outcome = run(Workload(300, 20), 0.2, 400, Layout(ranks, 512, 8), Linear(0.1, 0.001, 0.01))
    residence = sum(served.last - served.request.arrival for served in outcome.served)
    assert outcome.population_seconds == pytest.approx(residence)


requests = st.lists(
    st.builds(Request, st.floats(0, 50), st.integers(1, 700), st.integers(1, 40)), min_size=1, max_size=30
).map(lambda drawn: sorted(drawn))
layouts = st.builds(Layout, st.integers(1, 4), st.integers(1, 512), st.integers(1, 8))


@settings(max_examples=scale(100), deadline=None)
@given(requests, layouts, st.integers(0, 3))
def test_every_request_is_served_once_in_order_and_no_step_is_free(
    drawn: list[Request], layout: Layout, seed: int
) -> None:
    pricer = Linear(0.5, 0.001, 0.01, uneven=1.3)
    outcome = serve(drawn, layout, pricer, Disturbances(0.2, 2.0), seed)
    assert [served.request for served in outcome.served] == drawn
    for served in outcome.served:
        steps = -(-served.request.prompt // layout.budget) + served.request.output - 1
        assert served.left == 0
        assert served.request.arrival <= served.first <= served.last <= outcome.seconds
        assert served.last - served.request.arrival >= steps * pricer.start - TOLERANCE
    tokens = sum(request.prompt + request.output - 1 for request in drawn)
    assert outcome.steps <= tokens
    assert outcome.busy <= outcome.seconds + TOLERANCE


@settings(max_examples=scale(50), deadline=None)
@given(requests, layouts)
def test_the_same_seed_gives_the_same_and_slower_steps_never_serve_sooner(drawn: list[Request], layout: Layout) -> None:
    fast, again, slow = (
        serve(drawn, layout, Linear(start), Disturbances(0.3, 1.5), 1).seconds for start in (0.5, 0.5, 1.0)
    )
    assert fast == again
    assert slow >= fast


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    drawn = [Request(0.0, 10, 50), Request(1.5, 1000, 1)]
    first, second = serve(drawn, Layout(1, 101, 8), Linear(1.0), NONE, 0).served
    assert first.first == 1.0
    assert first.last == 50.0
    assert second.first == 12.0  # chunks of 100 tokens from the step that starts at 2 s on: a decode takes part in each


def test_no_more_requests_run_than_there_are_sequences() -> None:
    drawn = [Request(0.0, 1, 11) for _ in range(4)]
    outcome = serve(drawn, Layout(1, 100, 2), Linear(1.0), NONE, 0)
    assert [served.last for served in outcome.served] == [11.0, 11.0, 22.0, 22.0]


def test_all_ranks_wait_for_the_busiest() -> None:
    drawn = [Request(0.0, 100, 1), Request(0.0, 1, 1)]
    outcome = serve(drawn, Layout(2, 100, 2), Linear(0.0, 0.01), NONE, 0)
    assert [served.ttft for served in outcome.served] == [1.0, 1.0]


def test_steps_that_are_alike_are_accounted_like_others() -> None:
    """A late arrival joins at the next step, in the middle of many that are alike."""
    drawn = [Request(0.0, 1, 101), Request(50.5, 1, 1)]
    first, second = serve(drawn, Layout(1, 100, 8), Linear(1.0), NONE, 0).served
    assert (first.last, second.first) == (101.0, 52.0)
