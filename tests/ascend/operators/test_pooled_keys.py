"""GLM-5.3-Flash's indexer over pools of keys, against plain loops; slots of rings; and the norm of its drafter."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from standin_ascend import pooled_keys
from standin_ascend.triton_kernels import TritonKernel

from tests.standin.cann.cann import StandIn
from tests.support.ascend.operators.blocks import get_slots
from tests.support.ascend.operators.checks import (
    ABSENT,
    ANY_FORMAT,
    HALF,
    SEEDS,
    assert_equal,
    assert_near,
    draw,
    make_generator,
    put,
)
from tests.support.profiles import scale

pytestmark = ANY_FORMAT

POOL, SIZE, HEADS, BLOCK, PAGES = 4, 6, 2, 3, 8
FLOAT = torch.float32


def join_pool(keys: torch.Tensor, scores: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the key of a pool [size], channel by channel."""
    shares = (scores + places).double().exp()
    return (shares * keys.double()).sum(0) / shares.sum(0)


@settings(max_examples=scale(20))
@given(seed=SEEDS, steps=st.lists(st.integers(1, 9), min_size=1, max_size=5), more=st.integers(0, 3))
def test_pools_do_not_depend_on_the_steps_in_which_tokens_come(
    standin: StandIn, seed: int, steps: list[int], more: int
) -> None:
    """Two requests take as many tokens, the second a step later; a ring has room for *more* tokens than a pool."""
    generator, total, capacity = make_generator(seed), sum(steps), POOL + more
    keys, scores = (draw(generator, 2, total, SIZE, dtype=FLOAT) for _ in range(2))
    places, blocks = draw(generator, POOL, SIZE, dtype=FLOAT), torch.randperm(2 * PAGES, generator=generator)
    table, of_rings = blocks.view(2, PAGES).tolist(), [5, 2]
    rings = torch.full((PAGES, 2, capacity, SIZE), ABSENT).npu()
    pools = torch.full((2 * PAGES, BLOCK, 1, SIZE), ABSENT, dtype=HALF).npu()
    done = [0, 0]
    for counts in zip([*steps, 0], [0, *steps], strict=True):
        rows = [(request, done[request] + row) for request in (0, 1) for row in range(counts[request])]
        done = [before + count for before, count in zip(done, counts, strict=True)]
        slots = []
        for request, at in rows:
            page, offset = divmod(at // POOL, BLOCK)
            slots.append(table[request][page] * BLOCK + offset if at % POOL == POOL - 1 else -1)
        tensors = (
            torch.stack([keys[request, at] for request, at in rows]),
            torch.stack([scores[request, at] for request, at in rows]),
            places,
            torch.tensor([at for _, at in rows]),
            torch.tensor(list(accumulate(counts))).int(),
            torch.tensor(done).int(),
            torch.tensor([of_rings[request] * capacity + at % capacity for request, at in rows]).int(),
            torch.tensor(of_rings).int()[:, None],
            torch.tensor(slots),
        )
        pooled_keys.keep_keys(rings, pools, *put(*tensors), POOL)
    for request in (0, 1):
        for pool in range(total // POOL):
            here = slice(pool * POOL, (pool + 1) * POOL)
            found = pools[table[request][pool // BLOCK], pool % BLOCK, 0]
            assert_near(found, join_pool(keys[request, here], scores[request, here], places))
        for at in range(max(0, total - capacity), total):
            kept = rings[of_rings[request], :, at % capacity]
            assert_equal(kept, torch.stack([keys[request, at], scores[request, at]]))


@settings(max_examples=scale(20))
@given(
    seed=SEEDS,
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=3),
    most=st.integers(1, 4),
    padding=st.integers(0, 2),
)
def test_each_token_has_the_best_pools_before_it_and_those_in_none(
    standin: StandIn, seed: int, requests: list[tuple[int, int]], most: int, padding: int
) -> None:
    generator, tokens = make_generator(seed), sum(count for count, _ in requests)
    query = draw(generator, tokens + padding, HEADS, SIZE)
    weights = draw(generator, tokens + padding, HEADS)
    cache = draw(generator, 4 * len(requests), BLOCK, 1, SIZE)
    table = torch.randperm(len(cache), generator=generator).view(len(requests), -1)
    positions = [before + row for count, before in requests for row in range(count)]
    pools = [(before + count) // POOL for count, before in requests]
    ends = torch.tensor(list(accumulate(count for count, _ in requests))).int()
    buffer = torch.full((tokens + padding, most * POOL + 9), 7).int().npu()
    device = put(query, cache, weights, ends, torch.tensor(pools).int(), table.int())
    found = pooled_keys.choose_pools(
        *device,
        torch.tensor([*positions, *[0] * padding]).npu(),
        index_topk=most * POOL,
        index_kpool=POOL,
        max_pool_seq_len=max([1, *pools]),
        output_buffer=buffer,
        pack_tail=True,
    )
    assert found.shape == (tokens + padding, 1, most * POOL + POOL - 1)
    owners = [request for request, (count, _) in enumerate(requests) for _ in range(count)]
    for row, (request, position) in enumerate(zip(owners, positions, strict=True)):
        full = (position + 1) // POOL
        scores = []
        for pool in range(full):
            key = cache[table[request, pool // BLOCK], pool % BLOCK, 0].double()
            scores.append(
                sum(float(w) * float(q.double() @ key) for w, q in zip(weights[row], query[row], strict=True))
            )
        best = sorted(range(full), key=lambda pool: -scores[pool])[:most]
        expected = [pool * POOL + place for pool in best for place in range(POOL)]
        expected += range(full * POOL, position + 1)
        own = found[row, 0].tolist()
        assert sorted(own[: len(expected)]) == sorted(expected)
        assert own[len(expected) :] == [-1] * (len(own) - len(expected))
    assert bool((buffer[tokens:] == -1).all())


def test_tails_elsewhere_are_refused(standin: StandIn) -> None:
    x = torch.empty(0, HEADS, SIZE)
    options = {"index_topk": POOL, "index_kpool": POOL, "max_pool_seq_len": 1}
    with pytest.raises(NotImplementedError, match="in no pool"):
        pooled_keys.choose_pools(x, x, x, x, x, x, x, **options)


def test_tokens_of_a_ring_have_slots_in_its_only_block(standin: StandIn) -> None:
    slots = torch.full((9,), 77).int().npu()
    table = torch.tensor([[3], [1]]).int()
    get_slots([(0, 7), (6, 1)], [0, 1, 2, 3, 4, 5, 6, 6], table, slots, 1, 5, IS_CIRCULAR=True)
    assert slots.tolist() == [15, 16, 17, 18, 19, 15, 16, 6, -1]


def test_embeddings_and_hidden_states_are_normed_side_by_side(standin: StandIn) -> None:
    generator = make_generator(0)
    embedded, hidden = draw(generator, 4, SIZE), draw(generator, 4, SIZE)
    weight, hidden_weight = draw(generator, SIZE), draw(generator, SIZE)
    positions, out = torch.tensor([0, 5, 0, 1]), torch.full((4, 2 * SIZE), ABSENT, dtype=HALF).npu()
    kernel = TritonKernel("join", pooled_keys.norm_and_join)[(4,)]
    device = put(positions, embedded, hidden, weight, hidden_weight)
    kernel(device[0], device[1], SIZE, device[2], SIZE, device[3], device[4], 1e-5, out, 2 * SIZE, SIZE, 8)
    embedded[[0, 2]] = 0
    pairs = (embedded, weight), (hidden, hidden_weight)
    assert_near(out, torch.cat([F.rms_norm(x.double(), (SIZE,), w.double(), 1e-5) for x, w in pairs], -1))
