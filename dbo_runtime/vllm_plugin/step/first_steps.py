"""Compare the first split steps of each class with unsplit ones, where it is not proven that they are equal.

That is with an untested version of vLLM, on GPUs, and inside vllm-ascend with models, quantized weights and drafters
that were not compared there.

With DBO_CHECK, every step is compared, and a difference ends the engine. With `FirstSteps`, only a few steps are
compared. A difference ends splitting, and the request gets the unsplit result.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.decline import Decline
from dbo_runtime.engine.execution_plan import ExecutionPlan

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

COMPARED_STEPS = 3
"""Number of steps of each class that are compared."""

MAX_CLASSES = 1024
"""Number of classes that are kept. All ranks forget the same classes, and compare steps of these again."""


def name_class(plan: ExecutionPlan, of_ranks: Sequence[int]) -> Hashable:
    """Return the class of a step: its schedule, its sizes in octaves, and whether a request is cut.

    With data parallel ranks, the sizes are their numbers of tokens, *of_ranks* [ranks]. Without, they are the tokens
    and requests of this rank: prefills have many tokens per request, decodes few.
    """
    if of_ranks:
        return plan.digest, *(count.bit_length() for count in of_ranks)
    last = plan.slices[-1]
    cuts_request = any(after.first_request < before.last_request for before, after in pairwise(plan.slices))
    return plan.digest, last.last_token.bit_length(), last.last_request.bit_length(), cuts_request


class FirstSteps:
    """Counts the first split steps of each class of one model, which are compared. All ranks count alike.

    Args:
        log: log of the model.

    Attributes:
        failure: reason for which nothing is split any more; None as long as all compared steps were equal.
    """

    def __init__(self, log: FilteringBoundLogger) -> None:
        self.failure: Decline | None = None
        self._log = log
        self._compared: BoundedDict[Hashable, int] = BoundedDict(MAX_CLASSES)

    @property
    def size_and_capacity(self) -> tuple[int, int]:
        """Number of classes that are known, and the most that are kept."""
        return len(self._compared), self._compared.max_size

    def takes(self, step_class: Hashable) -> bool:
        """Return whether a step of this class is still to be compared. All ranks must ask for the same class."""
        return self._compared.get(step_class, 0) < COMPARED_STEPS

    def observe(self, step_class: Hashable, difference: str) -> Decline | None:
        """Count a compared step. End splitting, and log it, if there is a *difference*, which is equal on all ranks."""
        self._compared[step_class] = self._compared.get(step_class, 0) + 1
        if difference:
            self.failure = Decline("the first split steps differ from unsplit ones", difference)
            self._log.error("nothing is split any more", reason=self.failure.reason, detail=difference)
        elif self._compared[step_class] == COMPARED_STEPS:
            self._log.info("first steps equal unsplit ones", steps=COMPARED_STEPS, kind=str(step_class))
        return self.failure
