"""What tests of encoders ask of an engine inside vllm-ascend, as functions that its process finds by name."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from tests.standin.cann.cann import StandIn
from tests.support.vllm.engine import Answer, Engine

TO_HOST = "MemcpyDeviceToHost"
NO_STREAM = -1  # where the stand-in's trace has copies that the host waits for


class Forward(NamedTuple):
    """One forward of an encoder on one worker: copies that the host waited for, kernels, embeddings [tokens, width]."""

    copies: int
    kernels: Counter[str]
    embeddings: torch.Tensor


class Seen(NamedTuple):
    """What requests with images gave: answers, forwards of each worker's encoder, and how many of those were split."""

    answers: list[Answer]
    forwards: list[list[Forward]]
    split: list[int]


def see(
    engine: Engine, rank: int, requests: Sequence[Any], tokens: int, arrive: Sequence[int], settings: dict[str, str]
) -> Seen:
    """Answer requests, all at once or each after so many steps, and record the encoder meanwhile."""
    engine.configure(**settings)
    before = engine.llm.collective_rpc(count_split)
    engine.llm.collective_rpc(record_encoder)
    answers = engine.generate(requests, tokens, arrive)
    forwards = engine.llm.collective_rpc(end_recording)
    after = engine.llm.collective_rpc(count_split)
    return Seen(answers, forwards, [new - old for new, old in zip(after, before, strict=True)])


def count_split(worker: Any) -> int:
    """Return how many forwards of the encoder were split so far; none without the plugin."""
    counts = worker.dbo_encoder_statistics()
    return 0 if counts is None else int(counts["split"])


def count_blocks(engine: Engine, rank: int) -> int:
    """Return how many blocks the encoder has."""
    (blocks,) = set(engine.llm.collective_rpc(_count_blocks))
    return int(blocks)


def record_encoder(worker: Any) -> None:
    """Trace each forward of a worker's encoder from now on."""
    encoder, standin, stack = (
        worker.model_runner.get_model().visual,
        StandIn(ctypes.CDLL("libascendcl.so")),
        ExitStack(),
    )
    worker.recorded, traces = [], []

    def begin(*_: Any) -> None:
        torch.npu.synchronize()
        traces.append(stack.enter_context(standin.trace()))

    def end(module: Any, given: Any, embeddings: torch.Tensor) -> None:
        torch.npu.synchronize()
        stack.close()
        kernels = traces.pop()
        copies = sum(kernel.name == TO_HOST and kernel.stream == NO_STREAM for kernel in kernels)
        worker.recorded.append(Forward(copies, Counter(kernel.name for kernel in kernels), embeddings.float().cpu()))

    worker.recorders = [encoder.register_forward_pre_hook(begin), encoder.register_forward_hook(end)]


def end_recording(worker: Any) -> list[Forward]:
    """End that, and return what was seen."""
    for recorder in worker.recorders:
        recorder.remove()
    recorded: list[Forward] = worker.recorded
    return recorded


def _count_blocks(worker: Any) -> int:
    return len(worker.model_runner.get_model().visual.blocks)
