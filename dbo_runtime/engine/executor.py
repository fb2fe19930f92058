"""Issue a schedule onto a device, instruction by instruction; and the sequential loop, which is the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

from dbo_runtime.devices import Device, Event, Lane, Values
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.errors import DeviceError, ProgramError, add_context
from dbo_runtime.ir.codegen import number_slots
from dbo_runtime.ir.op import Op
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.render import digest
from dbo_runtime.ir.schedule import Instruction, Schedule, Slot
from dbo_runtime.ir.values import Value
from dbo_runtime.observe.instrument import Instrument
from dbo_runtime.observe.ranges import OpenRange, name_ops

Enter = Callable[[int], Any]
Inputs = Sequence[Sequence[Any]]
Outputs = list[tuple[Any, ...]]


def no_context(micro_batch: int) -> None:
    """Enter a micro-batch that has no context of its own."""


def run_sequential(programs: Sequence[Program], inputs: Inputs, enter: Enter = no_context) -> Outputs:
    """Run one micro-batch after the other, op after op, without a device: every schedule must return the same."""
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

    Values are resolved to list indices and ops to tasks once, so that the loop does no look-ups by name.

    Attributes:
        is_serial: whether all ops run on one lane, one after the other.
        check_context: called with the name of what is read from the forward context; None if nobody watches.
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
                instruction.issue.micro_batch,
                lanes[instruction.op.lane],
                tuple(events.get(by_issue[issue]) for issue in instruction.waits),
                self._compile(instruction),
                events.get(instruction) if instruction.records else None,
            )
            for instruction in schedule.instructions
        ]
        self._first_lane = lanes[schedule.lanes[0]]
        self._start = device.make_event()
        self._forks = [lanes[lane] for lane in schedule.forks]
        self._joins = [events.get(by_issue[issue]) for issue in schedule.joins]
        self._blocking = next((instruction for instruction in schedule.instructions if instruction.op.host_sync), None)

    @cached_property
    def digest(self) -> str:
        """Names the schedule; ranks compare it."""
        return digest(self.schedule)

    @cached_property
    def range_names(self) -> list[str]:
        """The name of each instruction's range in profilers, in issue order; made when a run first has ranges."""
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
            inputs: for each micro-batch, its program's inputs in order.
            enter: called on the issuing thread before an op whenever the micro-batch changes; only `compute` ops may
                rely on what it sets.
            instrument: receives each op's interval.
            open_range: opens a range around each op, on the thread that runs or issues it; `Device.find_ranges`.

        Raises:
            DeviceError: if the device captures a graph and an op waits for the device.
            What an op raises, of its own type, with op, micro-batch and line of declaration added as a note. No task
            runs any more by then, and the executor can be used again.
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
        for number, (micro_batch, lane, waits, task, event) in enumerate(self._instructions):
            if open_range is not None:
                task = RangedTask(task, open_range, self.range_names[number])
            for awaited in waits:
                lane.wait(awaited)
            if micro_batch != current:
                enter(micro_batch)
                current = micro_batch
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
    """An op bound to the slots of a run's values: a task of a device.

    Attributes:
        instruction: that it is of.
        reads, writes, frees: the slots that the op reads and writes, and those that are freed before it runs.
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
        """Free what is freed by now, and run the op."""
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
    """An op that runs in a range of the profilers that are on."""

    __slots__ = ("_name", "_open_range")

    def __init__(self, task: BoundOp, open_range: OpenRange, name: str) -> None:
        super().__init__(task.instruction, task.reads, task.writes, task.frees)
        self._open_range = open_range
        self._name = name

    def run(self, values: Values) -> None:
        """Run the op in its range."""
        with self._open_range(self._name):
            super().run(values)


def unpack(result: Any, count: int) -> Sequence[Any]:
    """Return the *count* values of an op's result: one is the result itself, and none leave it aside.

    Where there are several, they come as a tuple or a list: a tensor's rows are not several values.

    Raises:
        ProgramError: if the op returned another number of values.
    """
    if count < 2:
        return (result,) * count
    if not isinstance(result, (tuple, list)):
        raise ProgramError(f"it returned one {type(result).__name__}, but is declared to write {count} values.")
    if len(result) != count:
        raise ProgramError(f"it returned {len(result)} values, but is declared to write {count}.")
    return result


def describe(instruction: Instruction) -> str:
    """Return what an error says of the op that raised it."""
    return describe_op(instruction.op, instruction.issue.micro_batch)


def describe_op(op: Op, micro_batch: int) -> str:
    """Return which op of which micro-batch, and where it was declared."""
    layer = "outside any layer" if op.layer is None else f"layer {op.layer}"
    return f"op {op.name!r}, {layer}, micro-batch {micro_batch}, lane {op.lane!r}, declared at {op.declared_at}"
