"""Profiles by hand: what torch's profiler writes on a device with streams, in few words."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MAIN, FIRST, SECOND = 100, 101, 102  # threads
PROCESS = 100
STREAM, OTHER_STREAM, THIRD_STREAM = 7, 20, 21


class Maker:
    """Makes events of one process; times are microseconds, the first is far from 0 as in real files."""

    def __init__(self, rank: int | None = 0) -> None:
        self.events: list[dict[str, Any]] = []
        self._rank = rank
        self._correlation = 0

    def add(self, category: str, name: str, start: float, end: float, thread: Any = MAIN, **more: Any) -> None:
        """Add an event of the host."""
        event = {"ph": "X", "cat": category, "name": name, "pid": PROCESS, "tid": thread}
        self.events.append({**event, "ts": 4755168154000 + start, "dur": end - start, "args": {}, **more})

    def annotate(self, name: str, start: float, end: float, thread: Any = MAIN) -> None:
        """Add a range."""
        self.add("user_annotation", name, start, end, thread)

    def launch(
        self, name: str, launched: float, start: float, end: float, stream: int = STREAM, thread: int = MAIN,
        category: str = "kernel",
    ) -> None:  # fmt: skip
        """Add a kernel and the call that launched it."""
        self._correlation += 1
        known = {"correlation": self._correlation, "External id": 1}
        self.add("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, thread, args=known)
        more = {**known, "device": 0, "stream": stream}
        self.add(category, name, start, end, stream, pid=0, args=more)

    def make(self) -> dict[str, Any]:
        """Return the profile."""
        known = {} if self._rank is None else {"distributedInfo": {"backend": "nccl", "rank": self._rank}}
        named = {"ph": "M", "name": "process_name", "pid": PROCESS, "tid": 0, "ts": 1, "args": {"name": "python"}}
        return {"schemaVersion": 1, **known, "traceEvents": [named, *self.events]}

    def save(self, path: Path) -> Path:
        """Write the profile; packed if the path says so."""
        content = json.dumps(self.make()).encode()
        path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
        return path


def make_split_step() -> Maker:
    """Return one split step on two streams: communication of 0 runs while 1 computes."""
    maker = Maker()
    maker.annotate("dbo: step of 8+8 tokens, schedule ab12", 0, 100)
    for number, (op, mb, lane, after) in enumerate(
        [
            ("mlp", 0, "compute", ""),
            ("mlp_reduce", 0, "comm", " after #0"),
            ("mlp", 1, "compute", ""),
            ("mlp_reduce", 1, "comm", " after #2"),
        ]
    ):
        start = 10 + 20 * number
        maker.annotate(f"dbo: layer 3 {op} mb {mb} on {lane} #{number}{after}", start, start + 10)
    maker.launch("gemm", 12, 100, 150)
    maker.launch("silu", 14, 150, 160)
    maker.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 32, 165, 225, OTHER_STREAM)
    maker.launch("gemm", 52, 160, 220)
    maker.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 72, 230, 260, OTHER_STREAM)
    return maker


def make_ubatched_step() -> Maker:
    """Return one step as vLLM's own DBO issues it: a thread for each micro-batch, and one stream for communication."""
    maker = Maker(rank=3)
    maker.annotate("execute_context_2(16)_generation_0(0)", 0, 200)
    maker.launch("embedding", 5, 20, 30)
    maker.launch("gemm", 40, 50, 100, thread=FIRST)
    maker.launch("void deep_ep::intranode::dispatch<8>(int)", 45, 105, 165, OTHER_STREAM, FIRST)
    maker.launch("gemm", 60, 100, 170, thread=SECOND)
    maker.launch("void deep_ep::intranode::combine<8>(int)", 75, 175, 215, OTHER_STREAM, SECOND)
    maker.launch("Memcpy HtoD (Pageable -> Device)", 3, 10, 15, category="gpu_memcpy")
    return maker
