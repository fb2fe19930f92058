"""Issue a schedule onto a device, instruction by instruction. The sequential loop is the reference for its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from dbo_runtime.devices import Device, Event, Lane, Values
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.errors import DeviceError, add_context
from dbo_runtime.ir.codegen import number_slots
from dbo_runtime.ir.op import Op, unpack
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.render import digest
from dbo_runtime.ir.schedule import Instruction, Schedule, Slot
from dbo_runtime.ir.values import Value
from dbo_runtime.observe.instrument import Instrument
from dbo_runtime.observe.ranges import OpenRange, name_ops

Enter = Callable[[int], Any]
Inputs = Sequence[Sequence[Any]]
Outputs = list[tuple[Any, ...]]


def no_context(number: int) -> None:
    """Do nothing: there is no context to enter."""


def run_sequential(programs: Sequence[Program], inputs: Inputs, enter: Enter = no_context) -> Outputs:
    """Run one micro-batch after another, op by op, without a device. Every schedule must return the same outputs."""
    outputs = []
    for micro_batch, (program, given) in enumerate(zip(programs, inputs, strict=True)):
        enter(micro_batch)
        values: dict[Value, Any] = dict(zip(program.inputs, given, strict=True))
        for op in program.ops:
            result = op.fn(*(values[value] for value in op.reads))
            values.update(zip(op.writes, unpack(result, len(op.writes)), strict=True))
        outputs.append(tuple(values[value] for value in program.outputs))
    return outputs


class Executor:
    """Runs one schedule, any number of times.

    It resolves values to list indices, and ops to tasks, only once. So the loop does no look-ups by name.

    Attributes:
        is_serial: whether all ops run on one lane, one after another.
        check_context: called with the name of each attribute that is read from the forward context; None if reads are
            not checked.
    """

    is_serial = False
    check_context: Callable[[str], None] | None = None

    def __init__(self, schedule: Schedule, device: Device, events: EventTable) -> None:
        self.schedule = schedule
        self._device = device
        self._slots = number_slots(schedule)
        self._lanes = lanes = dict(zip(schedule.lanes, device.open_lanes(schedule.lanes), strict=True))
        by_issue = {instruction.issue: instruction for instruction in schedule.instructions}
        self._inputs = [
            [self._index(mb, value) for value in program.inputs] for mb, program in enumerate(schedule.programs)
        ]
        self._outputs = [
            [self._index(mb, value) for value in program.outputs] for mb, program in enumerate(schedule.programs)
        ]
        self._instructions: list[tuple[int, Lane, tuple[Event, ...], BoundOp, Event | None]] = [
            (
                context,
                lanes[instruction.op.lane],
                tuple(events.get(by_issue[issue]) for issue in instruction.waits),
                self._compile(instruction),
                events.get(instruction) if instruction.records else None,
            )
            for instruction, context in zip(schedule.instructions, schedule.list_contexts(), strict=True)
        ]
        self._first_lane = lanes[schedule.lanes[0]]
        self._start = device.make_event()
        self._forks = [lanes[lane] for lane in schedule.forks]
        self._joins = [events.get(by_issue[issue]) for issue in schedule.joins]
        self._blocking = next((instruction for instruction in schedule.instructions if instruction.op.host_sync), None)

    @cached_property
    def digest(self) -> str:
        """Hash of the schedule. Ranks compare it."""
        return digest(self.schedule)

    @cached_property
    def range_names(self) -> list[str]:
        """Name of each instruction's range in profilers, in issue order; made for the first run with ranges."""
        return name_ops(self.schedule)

    def run(
        self,
        inputs: Inputs,
        enter: Enter = no_context,
        instrument: Instrument | None = None,
        open_range: OpenRange | None = None,
    ) -> Outputs:
        """Issue all instructions and return each micro-batch's outputs.

        Args:
            inputs: inputs of each micro-batch's program, in order.
            enter: called with the number of a context (`Schedule.list_contexts`), on the issuing thread, before an op
                of another context than the last. Without nano-batches it is the number of the micro-batch. Only
                `compute` ops may rely on the context that it sets.
            instrument: receives the interval of each op.
            open_range: opens a range around each op, on the thread that runs or issues the op; see
                `Device.find_ranges`.

        Raises:
            DeviceError: if the device captures a graph and an op waits for the device.
            Exception: the error of an op, unchanged in type. A note says which op it was, of which micro-batch, and the
                line that declared it. No task runs any more by then, and the executor can be used again.
        """
        if self._blocking is not None and self._device.is_capturing:
            raise DeviceError(
                f"{describe(self._blocking)}, waits for the device (host_sync), which a graph cannot hold. Capture a "
                "program without it, such as dispatch by all_gather, or run without graphs."
            )
        values: Values = [None] * len(self._slots)
        for slots, given in zip(self._inputs, inputs, strict=True):
            for slot, value in zip(slots, given, strict=True):
                values[slot] = value
        self._device.begin()
        try:
            self._issue(values, enter, instrument, open_range)
            outputs = [tuple(values[slot] for slot in slots) for slots in self._outputs]
            self._device.release_to_caller(outputs)
            self._device.finish()
        except BaseException:
            self._device.abort()
            raise
        return outputs

    def _issue(self, values: Values, enter: Enter, instrument: Instrument | None, open_range: OpenRange | None) -> None:
        if self._forks:
            self._first_lane.record(self._start)
            for lane in self._forks:
                lane.wait(self._start)
        current: int | None = None
        for number, (context, lane, waits, task, event) in enumerate(self._instructions):
            if open_range is not None:
                task = RangedTask(task, open_range, self.range_names[number])
            for awaited in waits:
                lane.wait(awaited)
            if context != current:
                enter(context)
                current = context
            if instrument is None:
                lane.launch(task, values)
            else:
                lane.measure(task, values, partial(instrument.observe, task.instruction))
            if event is not None:
                lane.record(event)
        for awaited in self._joins:
            self._first_lane.wait(awaited)

    def _compile(self, instruction: Instruction) -> BoundOp:
        mb, op = instruction.issue.micro_batch, instruction.op
        frees = [self._index(*slot) for slot in instruction.frees]
        return BoundOp(
            instruction, [self._index(mb, v) for v in op.reads], [self._index(mb, v) for v in op.writes], frees
        )

    def _index(self, micro_batch: int, value: Value) -> int:
        return self._slots[Slot(micro_batch, value)]


class BoundOp:
    """An op bound to the slots of a run's values: a task for a device.

    Attributes:
        instruction: instruction that issues the op.
        reads, writes, frees: numbers of the slots that the op reads, of those it writes, and of those to free before it
            runs.
    """

    __slots__ = ("_fn", "_single", "frees", "instruction", "reads", "writes")

    def __init__(self, instruction: Instruction, reads: list[int], writes: list[int], frees: list[int]) -> None:
        self.instruction = instruction
        self.reads = reads
        self.writes = writes
        self.frees = frees
        self._fn = instruction.op.fn
        self._single = writes[0] if len(writes) == 1 else None

    def __call__(self, values: Values) -> None:
        """Free the values in *frees*, which nothing reads any more, and run the op."""
        for slot in self.frees:
            values[slot] = None
        self.run(values)

    def run(self, values: Values) -> None:
        """Run the op on the values of one run [slots]."""
        try:
            result = self._fn(*[values[slot] for slot in self.reads])
            if self._single is not None:
                values[self._single] = result
            else:
                self._store(values, result)
        except BaseException as error:
            add_context(error, f"while running {describe(self.instruction)}")
            raise

    def _store(self, values: Values, result: Any) -> None:
        for slot, value in zip(self.writes, unpack(result, len(self.writes)), strict=True):
            values[slot] = value


class RangedTask(BoundOp):
    """An op that runs inside a range, which profilers show."""

    __slots__ = ("_name", "_open_range")

    def __init__(self, task: BoundOp, open_range: OpenRange, name: str) -> None:
        super().__init__(task.instruction, task.reads, task.writes, task.frees)
        self._open_range = open_range
        self._name = name

    def run(self, values: Values) -> None:
        """Run the op in its range."""
        with self._open_range(self._name):
            super().run(values)


def describe(instruction: Instruction) -> str:
    """Return the text by which an error names the op that raised it."""
    return describe_op(instruction.op, instruction.issue.micro_batch)


def describe_op(op: Op, micro_batch: int) -> str:
    """Return a text that says which op it is, of which micro-batch, and where it was declared."""
    layer = "outside any layer" if op.layer is None else f"layer {op.layer}"
    part = "" if op.nano_batch is None else f", nano-batch {op.nano_batch}"
    return f"op {op.name!r}, {layer}, micro-batch {micro_batch}{part}, lane {op.lane!r}, declared at {op.declared_at}"
