"""A second compute lane inside vllm-ascend: keys beside queries, shared experts beside gate, dispatch and experts.

The stand-in computes each row by itself, so equal means equal to the last bit; see test_equivalence.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.support.ascend.engines import start
from tests.support.ascend.jobs import make_prompts
from tests.support.ascend.options import GRAPHS
from tests.support.ascend.replays import IN_GRAPH, trace_replays
from tests.support.vllm.engine import Answer, Engine, find_difference
from tests.support.vllm.ranks import Ranks

SIDE = {"DBO_SIDE": "on", "DBO_MODE": "auto"}
PROMPTS = [make_prompts(40, 30, 25, 5), make_prompts(40, 7)]
AT_ONCE: list[tuple[int, ...]] = [(), ()]
ARRIVE = [(0, 0, 1, 3), (0, 3)]  # decodes, prefills, and steps with both; the last at once, as all ranks ask for more
TOKENS = (9, 3)  # the second rank runs dummy batches in the end
COPY, KEYS, SHARED_EXPERTS = "InplaceCopy", "KvRmsNormRopeCache", ("Matmul", "SwiGlu", "Matmul")
ON_SIDE = [KEYS, *[KEYS, *SHARED_EXPERTS] * 2]  # of a dense layer and two with experts, without copies
FUSED_ATTENTION = "attention stays one op"

Found = tuple[list[Answer], dict[str, int]]
"""A rank's answers, and how far its counts have gone meanwhile."""


@pytest.fixture(scope="module")
def side_ranks() -> Iterator[Ranks]:
    """Return two data parallel engines that share out the experts."""
    yield from start(2, environment=SIDE)


def answer(
    engine: Engine,
    rank: int,
    settings: dict[str, str],
    arrive: Sequence[Sequence[int]] = ARRIVE,
    tokens: Sequence[int] = TOKENS,
    cuts: Sequence[Any] = (),
) -> Found:
    """Answer this rank's prompts; with *cuts* every step is cut there that can be."""
    engine.configure(**settings)
    if cuts:
        engine.cut_at(*cuts)
    else:
        engine.cut_by_settings()
    (before,) = engine.statistics()
    found = engine.generate(PROMPTS[rank], tokens[rank], arrive[rank])
    (after,) = engine.statistics()
    return found, {name: after[name] - before[name] for name in ("split", "concurrent")}


def test_steps_that_are_not_cut_give_the_same_bits(side_ranks: Ranks) -> None:
    """Prefills, decodes, both in one step, and a rank without requests while the other has some."""
    unsplit_by_rank = side_ranks.run(answer, {"DBO_MODE": "off"})
    found = side_ranks.run(answer, {"DBO_MODE": "auto"})
    assert_equal(unsplit_by_rank, found)
    counts = [counts for _, counts in found]
    assert counts[0] == counts[1]
    assert counts[0]["split"] == 0
    assert counts[0]["concurrent"] >= 10


@pytest.mark.parametrize("cut", [40, 70, 95])
def test_split_steps_give_the_same_bits(side_ranks: Ranks, cut: int) -> None:
    """Cut between requests, in the padding of the shorter batch, and into padding alone."""
    unsplit_by_rank = side_ranks.run(answer, {"DBO_MODE": "off"}, AT_ONCE, (1, 1))
    found = side_ranks.run(answer, {"DBO_MODE": "always"}, AT_ONCE, (1, 1), [[cut], [cut]])
    assert_equal(unsplit_by_rank, found)
    assert [counts for _, counts in found] == [{"split": 1, "concurrent": 0}] * 2


def test_steps_that_are_split_and_steps_that_cannot_be_choose_the_same_tokens(side_ranks: Ranks) -> None:
    """A single decode is not cut, and has concurrent shared experts; where settings cut inside, rounding is another."""
    unsplit_by_rank = side_ranks.run(answer, {"DBO_MODE": "off"})
    found = side_ranks.run(answer, {"DBO_MODE": "always"})
    for (unsplit, _), (answers, _) in zip(unsplit_by_rank, found, strict=True):
        assert [answer.tokens[0] for answer in answers] == [answer.tokens[0] for answer in unsplit]
    counts = [counts for _, counts in found]
    assert counts[0] == counts[1]
    assert min(counts[0].values()) > 0


def test_decodes_replayed_from_graphs_with_concurrent_keys_and_shared_experts_give_the_same_bits(
    side_ranks: Ranks, capfd: pytest.CaptureFixture[str]
) -> None:
    """Against eager steps that are neither cut nor ours, with as many tokens on both ranks and with more on one."""
    for replaying in start(2, environment=SIDE, **GRAPHS):
        assert FUSED_ATTENTION not in capfd.readouterr().err
        for arrive, tokens in ((AT_ONCE, (17, 17)), (ARRIVE, TOKENS)):
            unsplit_by_rank = side_ranks.run(answer, {"DBO_MODE": "off"}, arrive, tokens)
            assert_equal(unsplit_by_rank, replaying.run(answer, {"DBO_MODE": "auto"}, arrive, tokens))
        for replays in replaying.run(list_replayed):
            without_copies = {lane: [name for name in names if name != COPY] for lane, names in replays.items()}
            lanes = [lane for lane, names in without_copies.items() if names == ON_SIDE * 2]
            assert len(lanes) == 1, replays
            assert lanes[0] % IN_GRAPH > 0, "not on the stream that the capture began on"


def assert_equal(unsplit_by_rank: list[Found], found: list[Found]) -> None:
    for (unsplit, _), (answers, _) in zip(unsplit_by_rank, found, strict=True):
        assert find_difference(unsplit, answers) == 0.0


def list_replayed(engine: Engine, rank: int) -> dict[int, list[str]]:
    """Return the names of what two replays ran, by stream."""
    found: dict[int, list[str]] = defaultdict(list)
    for kernel in trace_replays(engine, PROMPTS[rank][:2]):
        found[kernel.stream].append(kernel.name)
    return dict(found)
