"""What is cached while steps are served is bounded: of the live objects of a runtime, none grows without a bound."""

from __future__ import annotations

from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dbo_runtime.bounded import BoundedDict
from tests.reliability.growth import open_runtime, serve
from tests.support.reliability.live_objects import count_unbounded, list_growing, list_overfull
from tests.support.reliability.served_growth import serve_mixed

WARM, MORE = 1_500, 1_500


@pytest.mark.slow
def test_no_container_of_a_runtime_grows_without_a_bound() -> None:
    runtime = open_runtime()
    steps = serve(runtime, WARM + MORE)
    for _ in range(WARM):
        next(steps)
    before = count_unbounded(runtime)
    for _ in steps:
        pass
    assert list_overfull(runtime) == []
    assert list_growing(before, count_unbounded(runtime)) == []
    caches = runtime.describe_caches()
    assert {name for name, (entries, most) in caches.items() if entries > most} == set()
    assert all(caches[name][0] for name in ("decisions", "sizes", "trials", "split classes", "executors", "events"))


class Forgetful:
    """Stands for a new part of the planner that keeps something."""

    def __init__(self, kept: Any) -> None:
        self.parts = {"kept": (kept,)}


@pytest.mark.parametrize(
    ("kept", "add"), [({}, dict.update), (set(), set.update), ([], list.extend), (deque(), deque.extend)]
)
def test_a_container_that_grows_is_named(kept: Any, add: Any) -> None:
    owner = Forgetful(kept)
    before = count_unbounded(owner)
    assert list_growing(before, count_unbounded(owner)) == []
    add(kept, {"new": 1})
    (grown,) = list_growing(before, count_unbounded(owner))
    assert grown.startswith("Forgetful.parts['kept'][0]")
    assert grown.endswith("0 -> 1")


def test_what_has_a_bound_is_left_out_unless_it_is_exceeded() -> None:
    bounded: BoundedDict[int, int] = BoundedDict(2)
    owner = Forgetful(bounded)
    before = count_unbounded(owner)
    bounded.update({1: 1, 2: 2})
    assert list_growing(before, count_unbounded(owner)) == []
    assert list_overfull(owner) == []
    bounded.update({3: 3})  # `update` of a dictionary does not ask for the bound
    assert len(list_overfull(owner)) == 1
    assert list_overfull(Forgetful(cache(len))) == ["Forgetful.parts['kept'][0] is a cache without a bound"]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_under_mixed_load_holds_what_it_held(tmp_path: Path) -> None:
    """Two minutes; `make growth` serves for thirty."""
    growth = serve_mixed(2.0, tmp_path / "log", VLLM_ASCEND_ENABLE_DBO="1", DBO_MODE="always")
    assert growth.split > 0
    assert growth.requests > 10
    for name, most in (("threads", 4), ("descriptors", 30)):  # connections come and go
        first, last, _ = growth.measure(name)
        assert last <= first + most, name
    first, last, _ = growth.measure("memory")
    assert last <= first * 1.1
    assert {name for name, (entries, most) in growth.caches.items() if entries > most} == set()
