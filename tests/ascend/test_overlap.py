"""Computation of one micro-batch overlaps communication of the other: what ran when, by the stand-in's trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from tests.ascend.conftest import start
from tests.standin_cann.cann import Kernel, load
from tests.support.ascend.jobs import find_planner, make_prompts
from tests.support.vllm.engine import Engine

LAYERS = 3
REDUCE = "HcclAllReduce"
# Seconds, next to which it is noise what else they take, and that the host is late where processes share its cores.
SLOW = {REDUCE: 0.1, "FusedInferAttentionScore": 0.1, "GroupedMatmul": 0.05}
ON_HOST = -1  # the stream of copies that the host waits for


Op = tuple[int | None, int, str]
"""Layer, micro-batch and name of an op."""


class Instruction(NamedTuple):
    """What one rank did in a step: ops of each lane in issue order, and what ran."""

    compute: list[Op]
    comm: list[Op]
    kernels: list[Kernel]

    def list_collectives(self) -> list[Kernel]:
        """Return what ran of the comm lane; vLLM's own all-reduces, such as the embedding's, are on other streams."""
        reduces = [kernel for kernel in self.kernels if kernel.name == REDUCE]
        streams = Counter(kernel.stream for kernel in reduces)
        return [kernel for kernel in reduces if kernel.stream == streams.most_common(1)[0][0]]


@pytest.fixture(scope="module")
def steps() -> Iterator[list[Instruction]]:
    """Return what both ranks of a tensor parallel pair that shares out its experts did in one prefill."""
    for npus in start(1, tensor_parallel_size=2, enable_expert_parallel=True):
        (found,) = npus.run(trace_prefill)
        yield found


def trace_prefill(
    engine: Engine, rank: int, delays: Mapping[str, float] = SLOW, lengths: tuple[int, int] = (64, 60)
) -> list[Instruction]:
    """Prefill two prompts in one step, cut between them; *delays* are seconds that kernels take."""
    engine.configure(DBO_MODE="always")
    engine.cut_at(lengths[0])
    engine.generate(make_prompts(*lengths))  # plans
    engine.llm.collective_rpc(_start_trace, args=(dict(delays),))
    engine.generate(make_prompts(*lengths))
    found: list[Instruction] = engine.llm.collective_rpc(_end_trace)
    return found


def _start_trace(worker: Any, delays: Mapping[str, float]) -> None:
    import torch

    standin = load()
    assert standin is not None
    for kernel, seconds in delays.items():
        standin.delay(kernel, seconds)
    torch.npu.synchronize()
    worker.traced = standin.trace()
    worker.kernels = worker.traced.__enter__()


def _end_trace(worker: Any) -> Instruction:
    import torch

    torch.npu.synchronize()
    worker.traced.__exit__(None, None, None)
    standin = load()
    assert standin is not None
    standin.calm()
    (executor,) = find_planner(worker)._runtime._executors._executors.values()
    lanes: dict[str, list[Op]] = {"compute": [], "comm": []}
    for step in executor.schedule.instructions:
        lanes[step.op.lane].append((step.op.layer, step.issue.micro_batch, step.op.name))
    return Instruction(lanes["compute"], lanes["comm"], list(worker.kernels))


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
