"""Ways to take turns between two micro-batches on the host, other than ours: threads, tasks, generators.

What they issue is what the executor issues, and at each overlap point they record and wait for events as vLLM does. Ops
are functions of the micro-batch; lanes, streams and events cost nothing. A mode is a function that runs one step.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, zip_longest
from types import SimpleNamespace
from typing import Any

from dbo_runtime.devices.torch_streams import StreamDevice
from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.ir.program import Program
from tests.benchmarks.bench_core import FreeLane

Op = Callable[[int], None]
Way = Callable[[Op], None]


def find_leaves(program: Program) -> list[bool]:
    """Return of each op whether it leaves the compute lane, which is where the other micro-batch has its turn."""
    return [op.lane != COMPUTE for op in program.ops]


def forward(leaves: Sequence[bool], micro_batch: int, op: Op) -> Iterator[None]:
    """Issue a micro-batch's ops, and yield where the other one is to go on."""
    compute, comm, computed, sent = FreeLane("compute"), FreeLane("comm"), object(), object()
    for leaving in leaves:
        if leaving:
            compute.record(computed)
            yield
            comm.wait(computed)
            op(micro_batch)
            comm.record(sent)
            compute.wait(sent)
        else:
            op(micro_batch)


def run_threads(run: Callable[[int], None], start: Callable[[], object]) -> None:
    """Run both micro-batches on threads made for this step, as vLLM does."""
    threads = [threading.Thread(target=run, args=(micro_batch,)) for micro_batch in range(2)]
    for thread in threads:
        thread.start()
    start()
    for thread in threads:
        thread.join()


def make_baton(leaves: Sequence[bool]) -> Way:
    """Two threads, each of which sleeps on a semaphore of its own until the other releases it."""

    def run_both(op: Op) -> None:
        batons = [threading.Semaphore(0) for _ in range(2)]

        def run(micro_batch: int) -> None:
            mine, other = batons[micro_batch], batons[1 - micro_batch]
            mine.acquire()
            for _ in forward(leaves, micro_batch, op):
                other.release()
                mine.acquire()
            other.release()

        run_threads(run, batons[0].release)

    return run_both


def make_tasks(leaves: Sequence[bool], loop: asyncio.AbstractEventLoop) -> Way:
    """Two tasks of an event loop, which goes on with the other one whenever one sleeps for no time."""

    async def run(micro_batch: int, op: Op) -> None:
        for _ in forward(leaves, micro_batch, op):
            await asyncio.sleep(0)

    async def run_both(op: Op) -> None:
        await asyncio.gather(run(0, op), run(1, op))

    return lambda op: loop.run_until_complete(run_both(op))


def make_generators(leaves: Sequence[bool]) -> Way:
    """Two generators, resumed in turn."""

    def run_both(op: Op) -> None:
        for _ in zip_longest(forward(leaves, 0, op), forward(leaves, 1, op)):
            pass

    return run_both


def make_coroutines(leaves: Sequence[bool], greenlet: Any) -> Way:
    """Two greenlets, resumed in turn, as DBO_GENERIC's coroutines are."""

    def run(micro_batch: int, op: Op) -> None:
        for _ in forward(leaves, micro_batch, op):
            greenlet.getcurrent().parent.switch()

    def run_both(op: Op) -> None:
        coroutines = [greenlet.greenlet(run) for _ in range(2)]
        for micro_batch, coroutine in enumerate(coroutines):
            coroutine.switch(micro_batch, op)
        while not all(coroutine.dead for coroutine in coroutines):
            for coroutine in coroutines:
                if not coroutine.dead:
                    coroutine.switch()

    return run_both


class _Stages:
    """One micro-batch's operations as SGLang's `operations.py` runs them: in stages, with a region around each.

    Written after `_StageExecutor` there: an operation takes the state and what the one before returned, by name, and
    returns a dictionary or None. Its data parallel buffers are left out.
    """

    def __init__(self, operations: Sequence[Callable[..., Any] | None]) -> None:
        self._stages: list[list[tuple[str, Callable[..., Any]]]] = [[]]
        for operation in operations:
            if operation is None:
                self._stages.append([])
            else:
                self._stages[-1].append((getattr(operation, "__name__", "unknown").replace("op_", ""), operation))
        self._next = 0
        self._state: dict[str, Any] = {}
        self._output: dict[str, Any] | None = {}

    def __len__(self) -> int:
        return len(self._stages)

    def run_next(self) -> None:
        with _open_region(f"stage {self._next}"):
            for name, operation in self._stages[self._next]:
                with _open_region(name):
                    self._output = operation(state=self._state, **({} if self._output is None else self._output))
        self._next += 1


@contextmanager
def _open_region(name: str) -> Iterator[None]:
    """Do nothing, as SGLang's regions without its profiler."""
    yield


def make_operations(leaves: Sequence[bool]) -> Way:
    """Two lists of operations with yields between, run a stage of either in turn, as SGLang does."""

    def list_operations(micro_batch: int, op: Op) -> list[Callable[..., Any] | None]:
        compute, comm, computed, sent = FreeLane("compute"), FreeLane("comm"), object(), object()

        def op_compute(state: dict[str, Any]) -> None:
            op(micro_batch)

        def op_leave(state: dict[str, Any]) -> None:
            compute.record(computed)

        def op_comm(state: dict[str, Any]) -> None:
            comm.wait(computed)
            op(micro_batch)
            comm.record(sent)
            compute.wait(sent)

        operations: list[Callable[..., Any] | None] = []
        for leaving in leaves:
            operations += [op_leave, None, op_comm] if leaving else [op_compute]
        return operations

    def run_both(op: Op) -> None:
        both = [_Stages(list_operations(micro_batch, op)) for micro_batch in range(2)]
        for _ in range(len(both[0])):
            for stages in both:
                stages.run_next()

    return run_both


class FreeStream:
    """A stream on which nothing runs."""

    def __init__(self, number: int) -> None:
        self.stream_id = number

    def wait_event(self, event: object) -> None:
        """Wait for nothing."""


class FreeStreams:
    """What `ubatching` uses of torch, at no cost: streams, events, and the current stream of each thread."""

    def __init__(self) -> None:
        self._current = threading.local()
        self.torch = SimpleNamespace(cuda=SimpleNamespace(set_stream=self.set_stream), Event=self.make_event)

    def set_stream(self, stream: object) -> None:
        """Make *stream* this thread's current one."""
        self._current.stream = stream

    def find_stream(self) -> object:
        """Return this thread's current stream."""
        return getattr(self._current, "stream", None)

    def make_event(self) -> SimpleNamespace:
        """Make an event that is never recorded."""
        return SimpleNamespace(record=lambda stream: None)

    def make_device(self) -> StreamDevice:
        """Make a device whose lanes are such streams."""
        current = FreeStream(0)
        made = count(1)
        backend = SimpleNamespace(
            Stream=lambda: FreeStream(next(made)),
            Event=self.make_event,
            current_stream=lambda: current,
            set_stream=lambda stream: None,
            is_current_stream_capturing=lambda: False,
            synchronize=lambda: None,
        )
        return StreamDevice("free", backend, object)

    def make_stream(self) -> SimpleNamespace:
        """Make a stream that waits for nothing."""
        return SimpleNamespace(wait_event=lambda event: None)


def make_ubatches(leaves: Sequence[bool], ubatching: Any, streams: FreeStreams) -> Way:
    """vLLM's own contexts and yields on its own kind of threads, driven as `UBatchWrapper._run_ubatches` does.

    Args:
        leaves: of each op, whether the other micro-batch has its turn there.
        ubatching: `vllm.v1.worker.ubatching`, which uses *streams* instead of torch's.
        streams: what it uses.
    """
    from vllm.forward_context import override_forward_context

    barrier, compute, comm = threading.Barrier(3), streams.make_stream(), streams.make_stream()

    def run_both(op: Op) -> None:
        contexts = ubatching.make_ubatch_contexts(2, compute, comm, [object(), object()], barrier)

        def run(micro_batch: int) -> None:
            with contexts[micro_batch]:
                for leaving in leaves:
                    if leaving:  # as around the dispatch in prepare_finalize/deepep_ht.py
                        ubatching.dbo_yield_and_switch_from_compute_to_comm()
                        op(micro_batch)
                        ubatching.dbo_switch_to_compute_sync()
                    else:
                        op(micro_batch)

        def start() -> None:
            barrier.wait()
            contexts[0].cpu_wait_event.set()

        with override_forward_context(None):
            run_threads(run, start)

    return run_both
