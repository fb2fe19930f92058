"""Issues a schedule, and watches everything it does."""

from __future__ import annotations

from dbo_runtime.devices import Device
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.engine.executor import Executor
from dbo_runtime.ir.op import COMPUTE
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.lab.sanitizer.device import SanitizingDevice
from dbo_runtime.lab.sanitizer.monitor import Monitor


class SanitizedExecutor(Executor):
    """Runs one schedule by the plain loop on a watched device. All its lanes are the first lane of *device*.

    Clocks tell what is ordered, not the order in which things happen to run, so nothing has to run at the same time. A
    fault that would crash two kernels sharing memory is reported instead.

    `run` raises SanitizerError, in addition to the errors of `Executor.run`, for undeclared or unordered behaviour of
    an op or of the code that issued it:

    - a value is read before it is written, after it is freed or overwritten, or while the op that writes it may run;
    - a value is freed or overwritten while an op that uses it may run, on any lane that may own its memory;
    - an op changed a value that it declares only to read (bit for bit), or returned memory of a value in use;
    - a collective is not the one that ranks agreed on, or `ordered` and `exclusive` ops may run in another order or at
      the same time;
    - a lane may still be running when the run ends;
    - an op on another lane than `compute` reads the forward context (if that is given to `check_context`).

    Freed memory is filled with NaN, so that a use which nothing here sees gives results that a comparison notices.
    """

    is_serial = True

    def __init__(self, schedule: Schedule, device: Device, events: EventTable) -> None:
        self._monitor = Monitor(schedule)
        sanitizing = SanitizingDevice(device, self._monitor)
        super().__init__(schedule, sanitizing, EventTable(sanitizing))  # not *events*, because these have clocks
        self.check_context = self._check_context

    def _check_context(self, name: str) -> None:
        """Check that the code running on this thread may read the forward context. Code between ops may.

        Raises:
            SanitizerError: it is an op of another lane than `compute`.
        """
        running = self._monitor.running
        if running is not None and running.op.lane != COMPUTE:
            self._monitor.fail(running, f"it reads {name!r} of the forward context, which only ops on 'compute' may")
