"""Prefills inside vllm-ascend of which the stand-in for CANN tells what ran when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.standin.cann.cann import Kernel, load
from tests.support.ascend.jobs import find_decider, make_prompts
from tests.support.vllm.engine import Engine

REDUCE = "HcclAllReduce"
# Seconds, next to which it is noise what else they take, and that the host is late where processes share its cores.
SLOW = {REDUCE: 0.1, "FusedInferAttentionScore": 0.1, "GroupedMatmul": 0.05}


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
    (executor,) = find_decider(worker).runtime._executors._executors.values()
    lanes: dict[str, list[Op]] = {"compute": [], "comm": []}
    for step in executor.schedule.instructions:
        lanes[step.op.lane].append((step.op.layer, step.issue.micro_batch, step.op.name))
    return Instruction(lanes["compute"], lanes["comm"], list(worker.kernels))
