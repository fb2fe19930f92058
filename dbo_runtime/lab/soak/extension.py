"""Worker methods for random traffic, in addition to the public ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dbo_runtime.observe.logs import open_log
from dbo_runtime.vllm_plugin.extension import WorkerExtension
from dbo_runtime.vllm_plugin.step.first_steps import FirstSteps

if TYPE_CHECKING:
    from dbo_runtime.vllm_plugin.encoder.forward import SplitEncoder
    from dbo_runtime.vllm_plugin.step.decision import StepDecider


class SoakExtension(WorkerExtension):
    """Compares first steps on any vLLM version, tested or not."""

    def soak_compare_first_steps(self) -> None:
        """Compare the first split steps of each kind from now on, as with an untested vLLM version."""
        for each in self._soak_list():
            each.first_steps = FirstSteps(open_log(quiet=True))

    def soak_list_alarms(self) -> list[str]:
        """Return the differences that this comparison has found."""
        found = [each.first_steps.failure for each in self._soak_list() if each.first_steps is not None]
        return [str(failure) for failure in found if failure is not None]

    def soak_list_failures(self) -> list[str]:
        """Return the reasons why nothing is split any more, because a first split step has failed."""
        return [str(each.refusal) for each in self._soak_list() if each.refusal is not None]

    def _soak_list(self) -> list[StepDecider | SplitEncoder]:
        forward, encoder = self._dbo_forward(), self._dbo_encoder()
        found: list[StepDecider | SplitEncoder] = [] if forward is None else [forward.decider]
        return found if encoder is None else [*found, encoder]
