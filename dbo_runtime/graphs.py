"""Schedules captured whole into graphs of their device, and replayed: one call of the host in place of all their steps.

Nothing here imports torch: tensors are met by their own methods only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from dbo_runtime.buffers import Buffers, Counts, Form, Rows, are_near, is_tensor
from dbo_runtime.devices import Device, Graph
from dbo_runtime.errors import ConfigError, ScheduleError, get_context
from dbo_runtime.executor import Enter, Executor, Inputs, Outputs, stay
from dbo_runtime.observe.instrument import Instrument
from dbo_runtime.render import digest
from dbo_runtime.validate import validate

MOST = 64  # graphs, if nothing else is said


class _Key(NamedTuple):
    """What a graph is for."""

    executor: Executor
    forms: tuple[Form, ...]


class _Captured(NamedTuple):
    """A graph with what it reads, and what each replay writes."""

    graph: Graph
    buffers: Buffers
    results: Outputs

    def replay(self, device: Device, inputs: Inputs, counts: Counts) -> Outputs:
        """Return copies of the results for these inputs: a run of the device, ordered with its others."""
        device.begin()
        try:
            self.buffers.fill(inputs, counts)
            self.graph.replay()
            outputs = self.buffers.read(self.results, counts)
            device.finish()
        except BaseException:
            device.abort()
            raise
        return outputs


class Graphs:
    """Runs schedules by replaying them; what cannot be replayed runs eagerly, counted, each reason logged once.

    There is a graph for each executor (a runtime has one for each digest) and shape: the bucket of each micro-batch,
    and what its inputs are like otherwise. A step of a shape that is new runs eagerly, and its results are those of
    that run. Then it is captured, and the first replay compared; for that, ops run three times more on the inputs of
    the same step. What they change beside their values must bear that, as a cache does that is written in one place.

    A micro-batch's tokens are the first dimension of its first input that has one. Each input of as many rows is padded
    with zeros to the next bucket; each result of as many rows as the bucket is cut to the tokens. So ops must be
    token-wise, or know by themselves which rows are padding, and write nothing for those where others read.

    A replay copies the inputs into memory of the graph, and the results into new memory: what a caller was given, no
    later replay changes. An input that an op overwrites is overwritten in the graph's memory, not in the caller's.

    Args:
        device: where the executors run. Nothing else may be issued onto it while `run` is in progress.
        log: a structlog logger.
        buckets: token counts of a micro-batch, ascending.
        tolerance: how far results may be from those without padding, as a share of the largest. By default they must
            be equal; kernels that add up in another way for another number of rows need more, such as 1e-3.
        most: how many shapes may be tried. Each graph keeps its inputs and results; all share the memory between.

    Attributes:
        captured: how many graphs were made.
        replayed: how many steps were replays.
        declined: how many steps were neither that nor the first of a shape, by reason.

    Raises:
        ConfigError: if the buckets are not ascending counts.
    """

    def __init__(
        self, device: Device, log: Any, buckets: Sequence[int], tolerance: float = 0.0, most: int = MOST
    ) -> None:
        self.buckets = tuple(buckets)
        if not self.buckets or self.buckets[0] < 1 or self.buckets != tuple(sorted({*self.buckets})):
            raise ConfigError(f"buckets {self.buckets} are no ascending token counts: give some from 1 up, each once.")
        self.captured = self.replayed = 0
        self.declined: Counter[str] = Counter()
        self._device = device
        self._log = log
        self._tolerance = tolerance
        self._most = most
        self._faults: dict[Executor, str] = {}  # why a schedule cannot be captured; empty if it can
        self._known: dict[_Key, _Captured | tuple[str, str]] = {}  # a graph, or the reason and detail of a decline
        self._newest: Graph | None = None
        self._told: set[tuple[str, str]] = set()

    def run(
        self, executor: Executor, inputs: Inputs, enter: Enter = stay, instrument: Instrument | None = None
    ) -> Outputs:
        """Do what `Executor.run` does, by a replay where that can be had.

        *enter* is called where ops are: in eager runs and while a graph is captured, not for a replay. What ops find by
        it must be tensors that stay in their place, and that whoever prepares a step writes to.

        Raises:
            What `Executor.run` raises, run eagerly.
        """
        try:
            self._check_step(executor, instrument)
            measured = [self._measure(micro_batch, given) for micro_batch, given in enumerate(inputs)]
            counts = [count for count, _ in measured]
            key = _Key(executor, tuple(form for _, form in measured))
            known = self._find(key)
            if known is not None:
                return self._replay(known, key, inputs, counts)
        except _Decline as decline:
            self._report(decline)
            return executor.run(inputs, enter, instrument)
        kept = [[None if value is None else value.clone() for value in given] for given in inputs]
        outputs = executor.run(inputs, enter)
        try:
            self._known[key] = self._capture(key, kept, counts, outputs, enter)
        except _Decline as decline:
            self._known[key] = decline.reason, decline.detail  # not the error itself, whose traceback holds tensors
            self._report(decline)
        return outputs

    def close(self) -> None:
        """Give back the memory of all graphs. Steps that still come are captured anew."""
        self._device.synchronize()
        for known in self._known.values():
            if isinstance(known, _Captured):
                known.graph.reset()
        self._known.clear()
        self._faults.clear()
        self._newest = None

    def _check_step(self, executor: Executor, instrument: Instrument | None) -> None:
        if not self._device.can_capture:
            raise _Decline("the device captures no graphs", self._device.name)
        if instrument is not None:
            raise _Decline("the step is recorded", "a graph does not tell when its ops ran")
        if self._device.is_capturing:
            raise _Decline("a capture goes on", "the step becomes part of it")
        if executor not in self._faults:
            self._faults[executor] = _find_fault(executor)
        if self._faults[executor]:
            raise _Decline("the schedule cannot be captured", self._faults[executor])

    def _measure(self, micro_batch: int, given: Sequence[Any]) -> tuple[int | None, Form]:
        """Return how many tokens a micro-batch has, if any input has a dimension, and what its inputs are like."""
        count = bucket = None
        tensors: list[Rows | None] = []
        for number, value in enumerate(given):
            if value is None:
                tensors.append(None)
                continue
            if not is_tensor(value) or value.device.type != self._device.name:
                kind = f"on {value.device}" if is_tensor(value) else f"a {type(value).__name__}"
                raise _Decline("an input is no tensor of the device", f"{number} of micro-batch {micro_batch}, {kind}")
            if count is None and value.shape:
                count = value.shape[0]
                bucket = self._find_bucket(count)
            is_padded = value.shape[:1] == (count,)
            shape = (bucket, *value.shape[1:]) if is_padded else tuple(value.shape)
            tensors.append(Rows(shape, value.dtype, is_padded))
        return count, Form(bucket, tuple(tensors))

    def _find_bucket(self, count: int) -> int:
        for bucket in self.buckets:
            if bucket >= count:
                return bucket
        raise _Decline("no bucket holds so many tokens", f"the largest is of {self.buckets[-1]}")

    def _find(self, key: _Key) -> _Captured | None:
        known = self._known.get(key)
        if known is None and len(self._known) >= self._most:
            raise _Decline("too many shapes", f"{self._most} were tried")
        if known is None or isinstance(known, _Captured):
            return known
        raise _Decline(*known)

    def _replay(self, known: _Captured, key: _Key, inputs: Inputs, counts: Counts) -> Outputs:
        try:
            outputs = known.replay(self._device, inputs, counts)
        except Exception as error:  # whatever a device raises: the step can still be run
            self._known[key] = decline = "a replay failed", _describe(error)
            self._drop(known.graph)
            raise _Decline(*decline) from error
        self.replayed += 1
        return outputs

    def _capture(self, key: _Key, given: Inputs, counts: Counts, outputs: Outputs, enter: Enter) -> _Captured:
        """Return the graph of a step whose results are known, if its replay gives the same."""
        name = digest(key.executor.schedule)
        graph = None
        try:
            buffers = Buffers(key.forms, given)
            buffers.fill(given, counts)
            run = partial(key.executor.run, buffers.inputs, enter)
            padded = buffers.read(run(), counts)
            graph, results = self._device.capture(run, self._newest)
            captured = _Captured(graph, buffers, results)
            replayed = captured.replay(self._device, given, counts)
            if not are_near(replayed, padded, 0.0):
                raise _Decline("a replay gives other results", f"than the same run eagerly; schedule {name}")
            if not are_near(replayed, outputs, self._tolerance):
                raise _Decline("padding changes results", f"schedule {name}")
        except Exception as error:  # whatever ops, the device or its allocator raise: the step has been run
            self._newest = None  # older releases of torch cannot share its memory after that: see `Device.capture`
            if graph is not None:
                self._drop(graph)
            if isinstance(error, _Decline):
                raise
            raise _Decline("the capture failed", _describe(error)) from error
        self._newest = graph
        self.captured += 1
        self._log.info("graph captured", digest=name, buckets=[form.bucket for form in key.forms])
        return captured

    def _drop(self, graph: Graph) -> None:
        self._device.synchronize()
        graph.reset()
        if graph is self._newest:
            self._newest = None

    def _report(self, decline: _Decline) -> None:
        self.declined[decline.reason] += 1
        if (decline.reason, decline.detail) not in self._told:
            self._told.add((decline.reason, decline.detail))
            self._log.info("step not replayed, runs eagerly", reason=decline.reason, detail=decline.detail)


class _Decline(Exception):
    """Why a step is not replayed; the detail says what of it."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def _find_fault(executor: Executor) -> str:
    try:
        validate(executor.schedule, capture=True)
    except ScheduleError as error:
        return str(error).partition("\n")[0]
    return ""


def _describe(error: BaseException) -> str:
    """Return one line. Where the end of a capture has failed because of an op, that op's own error is told."""
    cause: BaseException | None = error
    while cause is not None and not get_context(cause):
        cause = cause.__context__
    cause = cause or error
    words = [f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}", get_context(cause)]
    return ", ".join(word for word in words if word)
