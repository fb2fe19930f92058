"""Compare the first split steps of each kind with unsplit ones, where the version of vLLM is untested.

DBO_CHECK compares every step and ends the engine at a difference. `FirstSteps` compares a few, ends by itself, and at a
difference stops splitting: the request gets the unsplit result.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from dbo_runtime.bounded import BoundedDict
from dbo_runtime.decline import Decline
from dbo_runtime.errors import SplitError
from dbo_runtime.execution_plan import ExecutionPlan
from dbo_runtime.vllm_plugin.parallel.agreement import Agreement
from dbo_runtime.vllm_plugin.step.comparison import compare_split

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

COMPARED_STEPS = 3
"""Steps of each kind that are compared."""

MAX_KINDS = 1024
"""Kinds that are remembered; all ranks forget the same, and compare steps of it again."""


def name_kind(plan: ExecutionPlan, of_ranks: Sequence[int]) -> Hashable:
    """Name the kind of a step: its schedule, its sizes in octaves, and whether a request is cut.

    Sizes are the tokens *of_ranks*, all data parallel ones [ranks]; without them, tokens and requests of this rank:
    prefills have many tokens for each request, decodes few.
    """
    if of_ranks:
        return plan.digest, *(count.bit_length() for count in of_ranks)
    last = plan.slices[-1]
    cuts_request = any(after.first_request < before.last_request for before, after in pairwise(plan.slices))
    return plan.digest, last.last_token.bit_length(), last.last_request.bit_length(), cuts_request


class FirstSteps:
    """Compares the first split steps of each kind of one model.

    Args:
        agreement: of all ranks that communicate in a step: they compare the same steps, and stop together.
        log: of the model.

    Attributes:
        failure: why nothing is split any more; None while all steps have been equal.
    """

    def __init__(self, agreement: Agreement, log: FilteringBoundLogger) -> None:
        self.failure: Decline | None = None
        self._agreement = agreement
        self._log = log
        self._compared: BoundedDict[Hashable, int] = BoundedDict(MAX_KINDS)

    @property
    def fill(self) -> tuple[int, int]:
        """How many kinds of steps are remembered, and how many may be."""
        return len(self._compared), self._compared.max_size

    def takes(self, kind: Hashable) -> bool:
        """Return whether a step of this kind is still to be compared. All ranks must ask with the same kind."""
        return self._compared.get(kind, 0) < COMPARED_STEPS

    def compare(
        self,
        kind: Hashable,
        split: Mapping[str, torch.Tensor],
        unsplit: Mapping[str, torch.Tensor],
        plan: ExecutionPlan,
    ) -> None:
        """Compare the results of a step; if any rank finds a difference, all of them stop splitting. Collective."""
        own = ""
        try:
            compare_split(split, unsplit, plan)
        except SplitError as error:
            own = str(error)
        self._compared[kind] = self._compared.get(kind, 0) + 1
        found = next(filter(None, self._agreement.gather(own)), None)
        if found is not None:
            self.failure = Decline("split steps differ from unsplit ones with this untested version of vLLM", found)
            self._log.error("nothing is split any more", reason=self.failure.reason, detail=found)
        elif self._compared[kind] == COMPARED_STEPS:
            self._log.info("first steps equal unsplit ones", steps=COMPARED_STEPS, kind=str(kind))
