"""Computation of one micro-batch overlaps communication of the other: what ran when, by the stand-in's trace."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.support.ascend.engines import start
from tests.support.ascend.traced_prefills import Instruction, Op, trace_prefill

LAYERS = 3
ON_HOST = -1  # the stream of copies that the host waits for


@pytest.fixture(scope="module")
def steps() -> Iterator[list[Instruction]]:
    """Return what both ranks of a tensor parallel pair that shares out its experts did in one prefill."""
    for npus in start(1, tensor_parallel_size=2, enable_expert_parallel=True):
        (found,) = npus.run(trace_prefill)
        yield found


def test_collectives_of_one_micro_batch_overlap_attention_or_experts_of_the_other(steps: list[Instruction]) -> None:
    """At least two such pairs a layer, on each rank."""
    for step in steps:
        pairs = find_pairs(step)
        for layer in range(LAYERS):
            found = {pair for pair in pairs if layer in (pair[0][0], pair[1][0])}
            assert len(found) >= 2, f"layer {layer}: {found}"


def test_all_collectives_are_on_one_stream_in_the_order_of_the_schedule(steps: list[Instruction]) -> None:
    for step in steps:
        collectives = step.list_collectives()
        assert len(collectives) == len(step.comm)
        assert all(one.end <= other.start for one, other in pairwise(collectives))
    assert len({tuple(step.comm) for step in steps}) == 1


def test_the_host_waits_for_nothing_while_a_step_runs(steps: list[Instruction]) -> None:
    for step in steps:
        attention = [kernel for kernel in step.kernels if kernel.name == "FusedInferAttentionScore"]
        waits = [kernel for kernel in step.kernels if kernel.stream == ON_HOST]
        during = [kernel for kernel in waits if attention[0].queued < kernel.start < attention[-1].queued]
        assert during == [], "the host copied between the first and the last attention"


def find_pairs(step: Instruction) -> set[tuple[Op, Op]]:
    """Return (collective, op) of different micro-batches that ran at the same time."""
    attention = [kernel for kernel in step.kernels if kernel.name == "FusedInferAttentionScore"]
    products = [kernel for kernel in step.kernels if kernel.name == "GroupedMatmul"]
    work = list(zip([op for op in step.compute if op[2] == "attention"], attention, strict=True))
    experts = [op for op in step.compute if op[2] == "moe"]
    work += zip([op for op in experts for _ in range(2)], products, strict=True)  # two products each
    return {
        (collective, op)
        for collective, moved in zip(step.comm, step.list_collectives(), strict=True)
        for op, computed in work
        if collective[1] != op[1] and moved.start < computed.end and computed.start < moved.end
    }
