"""An extra for callers that drive a runtime themselves: runs of a schedule captured into graphs of the device.

One call of the host then replaces the issue of all instructions. Serving does not use it: vLLM captures graphs itself.
A caller plans with a `MicroBatchRuntime` and runs `graphs.run(plan.executor, inputs)` instead of `runtime.run`.
Nothing here imports torch: only methods of tensors are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from structlog.typing import FilteringBoundLogger

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.buffers import Buffers, Counts, Form, Rows, are_near, is_tensor
from dbo_runtime.decline import Decline
from dbo_runtime.devices import Device, Graph
from dbo_runtime.errors import ConfigError, ScheduleError, get_context
from dbo_runtime.executor import Enter, Executor, Inputs, Outputs, stay
from dbo_runtime.observe.instrument import Instrument
from dbo_runtime.observe.ranges import OpenRange, open_replay
from dbo_runtime.render import digest
from dbo_runtime.validate import validate

MAX_SHAPES = 64  # that are tried by default


class _Key(NamedTuple):
    """What a graph is captured for."""

    executor: Executor
    forms: tuple[Form, ...]


class _Captured(NamedTuple):
    """A graph, the buffers it reads, and the results that each replay writes."""

    graph: Graph
    buffers: Buffers
    results: Outputs

    def replay(self, device: Device, inputs: Inputs, counts: Counts) -> Outputs:
        """Return copies of the results for these inputs. A replay is a run of the device, in order with its others."""
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
    """Replays schedules from graphs; runs eagerly what cannot be replayed, counts it, and logs each reason once.

    There is a graph for each executor (a runtime has one for each digest) and shape: the bucket of each micro-batch,
    and the dtypes and other dimensions of its inputs. The first step of a shape runs eagerly and returns the results of
    that run; then the schedule is captured, and the first replay is compared with that run. For this, ops run three
    more times on the inputs of the same step, so any other state that they change must allow it, as a KV cache that is
    written in the same place does.

    A micro-batch's tokens are the first dimension of its first input that has one. Each input of as many rows is padded
    with zeros to the next bucket; each result of as many rows as the bucket is cut to the tokens. So ops must be
    token-wise, or recognize rows of padding by themselves, and write nothing for them where others read.

    A replay copies the inputs into memory of the graph, and the results into new memory: no later replay changes what
    it returned. An input that an op overwrites is overwritten in the graph's memory, not in the caller's.

    Args:
        device: where the executors run. Nothing else may be issued onto it while `run` is in progress.
        log: takes one line for each graph and for each reason.
        buckets: token counts of a micro-batch, ascending.
        tolerance: how far padded results may be from unpadded ones, relative to the largest value. By default they must
            be equal; kernels that sum in another order for another number of rows need more, such as 1e-3.
        max_shapes: how many shapes are tried. Each graph keeps its inputs and results; all share the memory between.

    Attributes:
        captured: number of graphs made.
        replayed: number of steps replayed.
        declined: number of steps that were neither replayed nor the first of a shape, by reason.

    Raises:
        ConfigError: if the buckets are not ascending counts.
    """

    def __init__(
        self,
        device: Device,
        log: FilteringBoundLogger,
        buckets: Sequence[int],
        tolerance: float = 0.0,
        max_shapes: int = MAX_SHAPES,
    ) -> None:
        self.buckets = tuple(buckets)
        if not self.buckets or self.buckets[0] < 1 or self.buckets != tuple(sorted({*self.buckets})):
            raise ConfigError(f"buckets {self.buckets} are no ascending token counts: give some from 1 up, each once.")
        self.captured = self.replayed = 0
        self.declined: Counter[str] = Counter()
        self._device = device
        self._log = log
        self._tolerance = tolerance
        self._max_shapes = max_shapes
        self._uncapturable: BoundedDict[Executor, Decline | None] = BoundedDict(max_shapes)
        self._known: dict[_Key, _Captured | Decline] = {}
        self._newest: Graph | None = None

    def run(
        self,
        executor: Executor,
        inputs: Inputs,
        enter: Enter = stay,
        instrument: Instrument | None = None,
        open_range: OpenRange | None = None,
    ) -> Outputs:
        """Do what `Executor.run` does, by a replay where possible, which is one range.

        *enter* is called in eager runs and while a graph is captured, but not for a replay. What ops reach by it must
        be tensors that stay in their place, which the caller writes to before each step.

        Raises:
            What `Executor.run` raises, run eagerly.
        """
        outputs = self._run_or_decline(executor, inputs, enter, instrument, open_range)
        if not isinstance(outputs, Decline):
            return outputs
        self._report(outputs)
        return executor.run(inputs, enter, instrument, open_range)

    def close(self) -> None:
        """Release the memory of all graphs. Steps that still come are captured anew."""
        self._device.synchronize()
        for known in self._known.values():
            if isinstance(known, _Captured):
                known.graph.reset()
        self._known.clear()
        self._uncapturable.clear()
        self._newest = None

    def _run_or_decline(
        self,
        executor: Executor,
        inputs: Inputs,
        enter: Enter,
        instrument: Instrument | None,
        open_range: OpenRange | None,
    ) -> Outputs | Decline:
        """Return the results of a replay, or of a new shape's eager run; or why the step is neither."""
        declined = self._check_run(executor, instrument)
        if declined is not None:
            return declined
        counts, forms = list[int | None](), list[Form]()
        for micro_batch, given in enumerate(inputs):
            measured = self._measure(micro_batch, given)
            if isinstance(measured, Decline):
                return measured
            counts.append(measured[0])
            forms.append(measured[1])
        key = _Key(executor, tuple(forms))
        known = self._known.get(key)
        if isinstance(known, Decline):
            return known
        if known is not None:
            with open_replay(open_range):
                return self._replay(known, key, inputs, counts)
        if len(self._known) >= self._max_shapes:
            return Decline("too many shapes", f"{self._max_shapes} were tried")
        return self._run_first(key, inputs, counts, enter, open_range)

    def _check_run(self, executor: Executor, instrument: Instrument | None) -> Decline | None:
        """Return why this run cannot be a replay whatever its inputs, or None."""
        if not self._device.can_capture:
            return Decline("the device captures no graphs", self._device.name)
        if instrument is not None:
            return Decline("the step is recorded", "a graph does not report when its ops ran")
        if self._device.is_capturing:
            return Decline("a capture goes on", "the step becomes part of it")
        if executor not in self._uncapturable:
            self._uncapturable[executor] = _check_capture(executor)
        return self._uncapturable[executor]

    def _measure(self, micro_batch: int, given: Sequence[object]) -> tuple[int | None, Form] | Decline:
        """Return how many tokens a micro-batch has, if any input has a dimension, and the form of its inputs."""
        count = bucket = None
        tensors: list[Rows | None] = []
        for number, value in enumerate(given):
            if value is None:
                tensors.append(None)
                continue
            if not is_tensor(value) or value.device.type != self._device.name:
                kind = f"on {value.device}" if is_tensor(value) else f"a {type(value).__name__}"
                return Decline("an input is no tensor of the device", f"{number} of micro-batch {micro_batch}, {kind}")
            if count is None and value.shape:
                count = value.shape[0]
                bucket = next((size for size in self.buckets if size >= count), None)
                if bucket is None:
                    return Decline("no bucket holds so many tokens", f"the largest is of {self.buckets[-1]}")
            is_padded = value.shape[:1] == (count,)
            shape = (bucket, *value.shape[1:]) if is_padded else tuple(value.shape)
            tensors.append(Rows(shape, value.dtype, is_padded))
        return count, Form(bucket, tuple(tensors))

    def _replay(self, known: _Captured, key: _Key, inputs: Inputs, counts: Counts) -> Outputs | Decline:
        try:
            outputs = known.replay(self._device, inputs, counts)
        except Exception as error:  # noqa: BLE001 - whatever the device raises, the step can still run eagerly
            self._known[key] = decline = Decline("a replay failed", _describe(error))
            self._drop(known.graph)
            return decline
        self.replayed += 1
        return outputs

    def _run_first(
        self, key: _Key, inputs: Inputs, counts: Counts, enter: Enter, open_range: OpenRange | None
    ) -> Outputs:
        """Run the first step of a shape eagerly, then capture it; return the results of the eager run."""
        kept = [[None if value is None else value.clone() for value in given] for given in inputs]
        outputs = key.executor.run(inputs, enter, None, open_range)
        self._known[key] = captured = self._capture(key, kept, counts, outputs, enter)
        if isinstance(captured, Decline):
            self._report(captured)
        return outputs

    def _capture(self, key: _Key, given: Inputs, counts: Counts, outputs: Outputs, enter: Enter) -> _Captured | Decline:
        """Return the graph of a step whose results are known, if its replay returns the same."""
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
            decline = self._compare(replayed, padded, outputs, name)
        except Exception as error:  # noqa: BLE001 - whatever ops, device or allocator raise, the step has been run
            decline = Decline("the capture failed", _describe(error))
        if decline is not None:
            self._newest = None  # releases of torch before 2.13 cannot share its memory now: see `Device.capture`
            if graph is not None:
                self._drop(graph)
            return decline
        self._newest = graph
        self.captured += 1
        self._log.info("graph captured", digest=name, buckets=[form.bucket for form in key.forms])
        return captured

    def _compare(self, replayed: Outputs, padded: Outputs, outputs: Outputs, name: str) -> Decline | None:
        """Return why the results of a replay are not those of the eager runs with and without padding, or None."""
        if not are_near(replayed, padded, 0.0):
            return Decline("a replay gives other results", f"than the same run eagerly; schedule {name}")
        if not are_near(replayed, outputs, self._tolerance):
            return Decline("padding changes results", f"schedule {name}")
        return None

    def _drop(self, graph: Graph) -> None:
        self._device.synchronize()
        graph.reset()
        if graph is self._newest:
            self._newest = None

    def _report(self, decline: Decline) -> None:
        """Count a step that is not replayed; log the first of each reason."""
        if not self.declined[decline.reason]:
            self._log.info("step not replayed, runs eagerly", reason=decline.reason, detail=decline.detail)
        self.declined[decline.reason] += 1


def _check_capture(executor: Executor) -> Decline | None:
    """Return why a schedule cannot be captured: the rule that it breaks."""
    try:
        validate(executor.schedule, capture=True)
    except ScheduleError as error:
        return Decline("the schedule cannot be captured", str(error).partition("\n")[0])
    return None


def _describe(error: BaseException) -> str:
    """Return one line. If the end of a capture failed because of an op, describe that op's own error."""
    cause: BaseException | None = error
    while cause is not None and not get_context(cause):
        cause = cause.__context__
    cause = cause or error
    words = [f"{type(cause).__name__}: {str(cause).partition(chr(10))[0]}", get_context(cause)]
    return ", ".join(word for word in words if word)
