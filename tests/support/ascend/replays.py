"""Traces of what graphs run inside vllm-ascend, on the stand-in for CANN."""

from __future__ import annotations

from collections.abc import Sequence

from tests.standin.cann.cann import ORDERING, Kernel, load
from tests.support.vllm.engine import Engine

IN_GRAPH = 1000000  # ids of streams from here on are lanes of graphs; see `Kernel`


def trace_replays(engine: Engine, prompts: Sequence[Sequence[int]], **delays: float) -> list[Kernel]:
    """Return the kernels of two replays of decodes; those named in *delays* take so many seconds longer."""
    import torch

    standin = load()
    assert standin is not None
    for name, seconds in delays.items():
        standin.delay(name, seconds)
    try:
        with standin.trace() as traced:
            engine.generate(prompts, 3)  # the first token is a prefill's
            torch.npu.synchronize()
    finally:
        standin.calm()
    return [kernel for kernel in traced if kernel.stream >= IN_GRAPH and kernel.name not in ORDERING]
