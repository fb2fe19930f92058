"""Do matrix multiplications starve what communicates, and does a stream of higher priority help?

On a busy chip a small kernel waits for multiprocessors that a large one has taken. NCCL's kernels are such; copies by a
copy engine are not. A priority is looked at when blocks are placed: running ones stay.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from dbo_runtime.ir.policies import alternate, sequential

from .core import milliseconds
from .decoder import SIZES, Decoder
from .findings import Findings, run_part

PRIORITIES = (0, -1)  # the default, and the higher one
SIDE, PRODUCTS = 8192, 20
BYTES = 16 << 20
ROUNDS = 9
CUDA: Any = torch.cuda


def run(findings: Findings, device: str, _: list[str]) -> None:
    """Measure alone, concurrent with products, and in a schedule."""
    assert device == "cuda"
    findings.attempt("a kernel concurrent with products", lambda: compare_priorities(make_kernel()))
    findings.attempt("a copy to the host concurrent with products", lambda: compare_priorities(make_copy()))
    findings.attempt("a schedule", measure_schedules)


def compare_priorities(send: Callable[[], Any]) -> dict[str, Any]:
    """Return the times of *send* on a stream of each priority, alone and concurrent with products, and of these."""
    a = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)
    busy = CUDA.Stream()

    def multiply() -> None:
        with torch.cuda.stream(busy):
            for _ in range(PRODUCTS):
                a @ a

    found: dict[str, Any] = {"ms of the products": milliseconds(measure(multiply))}
    for priority in PRIORITIES:
        stream = CUDA.Stream(priority=priority)
        alone = measure_on(stream, send, lambda: None)
        concurrent = measure_on(stream, send, multiply)
        found[f"priority {priority}"] = {
            "ms alone": milliseconds(alone),
            "ms concurrent with products": milliseconds(concurrent),
            "times as long": round(concurrent / alone, 2),
        }
    one, other = (found[f"priority {priority}"]["ms concurrent with products"] for priority in PRIORITIES)
    return {**found, "ratio of both priorities": round(one / other, 3)}


def make_kernel() -> Callable[[], Any]:
    """Return a reduce of two tensors, which takes multiprocessors as one of NCCL's does."""
    x, y = (torch.ones(BYTES // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: x.add_(y)


def make_copy() -> Callable[[], Any]:
    """Return a copy to the host, which takes a copy engine."""
    x, host = torch.ones(BYTES, device="cuda", dtype=torch.uint8), torch.empty(BYTES, dtype=torch.uint8).pin_memory()
    return lambda: host.copy_(x, non_blocking=True)


def measure_on(stream: torch.cuda.Stream, send: Callable[[], Any], multiply: Callable[[], Any]) -> float:
    """Return the median seconds of *send* on a stream, between events, once *multiply* is issued."""
    seconds = []
    for _ in range(ROUNDS + 2):
        start, end = (CUDA.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        multiply()
        with torch.cuda.stream(stream):
            start.record(stream)
            send()
            end.record(stream)
        torch.cuda.synchronize()
        seconds.append(float(start.elapsed_time(end)) / 1e3)
    return median(seconds[2:])


def measure(run: Callable[[], Any]) -> float:
    """Return the median seconds until *run* is done."""
    seconds = []
    for _ in range(ROUNDS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def measure_schedules() -> dict[str, Any]:
    """Return what overlap gains in a schedule whose lanes have streams of each priority, its first lane excepted."""
    found = {}
    for priority in PRIORITIES:
        decoder = Decoder("cuda", SIZES["chip"])
        decoder.elements = decoder.all_elements
        make_stream = functools.partial(CUDA.Stream, priority=priority)
        decoder.device.draw_stream = lambda _, make_stream=make_stream: make_stream()
        one, both = decoder.prepare(sequential), decoder.prepare(alternate)
        serial, _ = decoder.measure(functools.partial(one.run, decoder.inputs), ROUNDS)
        overlapped, _ = decoder.measure(functools.partial(both.run, decoder.inputs), ROUNDS)
        found[f"priority {priority}"] = {
            "ms one after the other": milliseconds(serial),
            "ms overlapped": milliseconds(overlapped),
            "gain": round(serial / overlapped, 3),
        }
    return found


if __name__ == "__main__":
    run_part(run)
