"""The schedules of steps that are cut into nano-batches."""

from __future__ import annotations

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.decline import Decline
from dbo_runtime.ir.divided_ops import divide_ops
from dbo_runtime.ir.lowering import lower
from dbo_runtime.ir.nano_batches import Rows, cut_program
from dbo_runtime.ir.policies import get_policy, sequential
from dbo_runtime.ir.program import Program
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.setting_values import MAX_MICRO_BATCHES

NANO_BATCHES = 4  # without a prediction: published costs gain most from 3 to 8 (docs/planner.md)


class NanoSchedules:
    """Makes the schedules of one model in nano-batches, and keeps them.

    Args:
        program: ops of one micro-batch.
        rows: functions that join and cut the values of joint ops; None if no step is cut into nano-batches.
    """

    def __init__(self, program: Program, rows: Rows | None) -> None:
        self._program = divide_ops(program.fold_side())
        self._rows = rows
        self._has_token_wise = any(op.token_wise for op in program.ops)
        self._schedules: BoundedDict[tuple[int, tuple[str, int]], Schedule] = BoundedDict(MAX_MICRO_BATCHES)

    def check(self) -> Decline | None:
        """Return why the model's steps cannot be cut into nano-batches; None if they can."""
        if self._rows is None:
            return Decline("nano-batches are not for this model")
        return None if self._has_token_wise else Decline("no op of the model is declared token-wise")

    def get(self, count: int, policy: tuple[str, int]) -> Schedule:
        """Return the schedule of *count* nano-batches, ordered by a policy; make it if it is new.

        Raises:
            ProgramError: if the program cannot be cut.
        """
        schedule = self._schedules.get((count, policy))
        if schedule is None:
            assert self._rows is not None, "checked before"
            program = cut_program(self._program, count, self._rows, get_policy(*policy)).program
            self._schedules[count, policy] = schedule = lower([program], sequential([program]))
        return schedule
