"""Issue a schedule by a function generated for it. Serving runs it; it must do the same as the plain loop."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

from dbo_runtime.devices import Device, Lane, Values
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Enter, Executor, describe
from dbo_runtime.errors import add_context
from dbo_runtime.ir.codegen import FILE_PREFIX, FUNCTION, Issuing, Source, write_source
from dbo_runtime.ir.op import unpack
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.observe.instrument import Instrument
from dbo_runtime.observe.ranges import OpenRange

MAX_SHOWN_SOURCES = 16  # number of sources that tracebacks can show: those of the last schedules that failed


class GeneratedExecutor(Executor):
    """Runs one schedule, any number of times, by a function with one line for each action of the host.

    The function is generated when the executor is made, which takes some 20 us per instruction. Runs with an instrument
    or ranges go through the plain loop. So the function is the same whether or not a profiler is on.
    """

    def __init__(self, schedule: Schedule, device: Device, events: EventTable) -> None:
        super().__init__(schedule, device, events)
        self._function = self._compile_function(self.write_source())

    def write_source(self) -> Source:
        """Generate the source of the function, and return it."""
        issuing = {name: _get_issuing(lane) for name, lane in self._lanes.items()}
        return write_source(self.schedule, issuing)

    def _issue(self, values: Values, enter: Enter, instrument: Instrument | None, open_range: OpenRange | None) -> None:
        if instrument is not None or open_range is not None:
            super()._issue(values, enter, instrument, open_range)
            return
        try:
            self._function(values, enter)
        except BaseException as error:
            self._explain(error)
            raise

    def _compile_function(self, source: Source) -> Callable[[Values, Enter], None]:
        namespace: dict[str, Any] = {"unpack": unpack, "start": self._start, **source.functions}
        namespace.update({name: self._lanes[lane] for name, lane in source.lanes.items()})
        for number, (_, _, _, task, event) in enumerate(self._instructions):
            namespace[f"task_{number}"] = task
            namespace[f"event_{number}"] = event
        exec(compile(source.text, source.file, "exec"), namespace)
        function: Callable[[Values, Enter], None] = namespace.pop(FUNCTION)  # not in its own globals: no cycle
        return function

    def _explain(self, error: BaseException) -> None:
        """Add a note to an error that says which op raised it, if one did, and let tracebacks show the source line."""
        source = self.write_source()
        earlier = [name for name in linecache.cache if name.startswith(FILE_PREFIX)]
        for name in earlier[: 1 - MAX_SHOWN_SOURCES]:
            del linecache.cache[name]
        linecache.cache[source.file] = len(source.text), None, source.text.splitlines(keepends=True), source.file
        traceback = error.__traceback__
        assert traceback is not None  # it was raised
        assert traceback.tb_next is not None  # by the function
        number = source.calls.get(traceback.tb_next.tb_lineno)
        if number is not None:
            add_context(error, f"while running {describe(self.schedule.instructions[number])}")


def _get_issuing(lane: Lane) -> Issuing:
    calls = lane.get_direct_calls()
    if calls is None:
        return Issuing.LAUNCHED
    return Issuing.CALLED if calls.switch is None else Issuing.SWITCHED
