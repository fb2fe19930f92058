"""Nano-batches inside vllm-ascend: attention keeps the step's metadata, and the other ops have contexts without any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ascend.engines import start
from tests.support.ascend.equivalence import PROMPTS, assert_data_parallel_nano_batches_are_equal
from tests.support.ascend.jobs import answer, answer_in_nano_batches
from tests.support.vllm.engine import Engine, find_difference
from tests.support.vllm.ranks import Ranks

PARTS = ("latent", "keys", "queries", "attention", "attn_out")


@pytest.mark.parametrize("count", [2, 5])
def test_tensor_parallel_steps_are_equal_to_the_bit(two_npus: Ranks, count: int) -> None:
    """The stand-in computes each row by itself, in prefills and in decodes."""
    ((unsplit, _),) = two_npus.run(answer, [PROMPTS], 4)
    ((nano, steps),) = two_npus.run(answer_in_nano_batches, [PROMPTS], 4, count)
    assert min(steps) >= (4 if count <= len(PROMPTS) else 1), steps
    assert find_difference(unsplit, nano) == 0.0


def test_tokens_are_dispatched_to_experts_on_other_ranks(expert_npus: Ranks) -> None:
    assert_data_parallel_nano_batches_are_equal(expert_npus)


def test_latent_attention_is_in_parts(expert_npus: Ranks) -> None:
    """As it is for concurrent ops: only keys, which the cache is written with, and attention itself are whole."""
    for names, divided in expert_npus.run(list_parts):
        assert names == {"latent": True, "keys": False, "queries": True, "attention": False, "attn_out": True}
        assert not divided


def test_latent_attention_is_in_parts_without_concurrent_ops(one_npu_without_side: Ranks) -> None:
    ((names, divided),) = one_npu_without_side.run(list_parts)
    assert names == {"attention": False}
    assert divided == {"qkv": True, "attention_core": False, "attn_out": True}
    ((unsplit, _),) = one_npu_without_side.run(answer, [PROMPTS], 4)
    ((nano, steps),) = one_npu_without_side.run(answer_in_nano_batches, [PROMPTS], 4, 3, "races")
    assert min(steps) >= 4, steps
    assert find_difference(unsplit, nano) == 0.0


@pytest.fixture(scope="module")
def one_npu_without_side() -> Iterator[Ranks]:
    """Return one engine whose programs have one compute lane."""
    yield from start(1, environment={"DBO_SIDE": "off"})


def list_parts(engine: Engine, rank: int) -> tuple[dict[str, bool], dict[str, bool]]:
    """Return which ops of attention are token-wise, and which that it is divided into."""
    ops = engine.runner.get_model().forward.runtime.program.ops
    own = {op.name: op.token_wise for op in ops if op.name in PARTS}
    return own, {part.name: part.token_wise for op in ops if op.divided for part in op.divided.ops}


@pytest.mark.parametrize("check", ["1", "races"])
def test_checks_find_nothing(two_npus: Ranks, check: str) -> None:
    ((_, steps),) = two_npus.run(answer_in_nano_batches, [PROMPTS], 3, 3, check)
    assert min(steps) > 0, steps
