"""Whether steps will be split by new costs: what the user of a cost file wants to know before serving."""

from __future__ import annotations

from typing import NamedTuple

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.engine.transport import check_transport
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.prediction import Prediction
from dbo_runtime.planner.online.split_choice import SplitChoice

SMALLEST = 256  # tokens of the smallest prefill that is looked at
SEARCH_STATES = 4_000  # states per search, enough for two micro-batches: this is an outlook, not a plan
DECIDED_BY_COSTS = RuntimeConfig(probation=False)
REMEDY = (
    "There is a gain where ranks wait for a network or a bus: over several hosts, or on devices (`make demo` shows one "
    "on a single machine). DBO_MODE=always splits nevertheless."
)


class Outlook(NamedTuple):
    """What serving with a file of costs will split.

    Attributes:
        splits: whether any prefill will be split.
        text: sizes of what will be split, with the largest gain; or why nothing will, and what to do about it.
    """

    splits: bool
    text: str


def find_outlook(table: CostTable, largest: int, path: str) -> Outlook:
    """Return what serving with these costs will split.

    Args:
        table: the costs.
        largest: tokens of the largest measured step.
        path: name of the cost file, for the command that shows more.
    """
    planner = Planner(
        build_program(table.program),
        table,
        max_states=SEARCH_STATES,
        shapes=[_fill_prefill(n) for n in _list_sizes(largest)],
    )
    decline = check_transport(table.provenance.machine.get("transport", ""), "auto", True, planner.can_use_side)
    if decline is not None:
        return Outlook(False, f"With these costs nothing will be split: {decline}.\n{REMEDY}")
    choices = {tokens: _choose(planner, table, tokens) for tokens in _list_sizes(largest)}
    split = {tokens: choice.prediction for tokens, choice in choices.items() if isinstance(choice, SplitChoice)}
    more = f"More: dbo plan --costs {path} --sweep tokens"
    if not split:
        last = choices[max(choices)]
        text = f"With these costs no prefill up to {max(choices)} tokens will be split: {last}.\n{REMEDY}\n{more}"
        return Outlook(False, text)
    best = max(split, key=lambda tokens: split[tokens].gain)
    text = f"With these costs prefills from {min(split)} tokens will be split; {_describe(best, split[best])}.\n{more}"
    return Outlook(True, text)


def _choose(planner: Planner, table: CostTable, tokens: int) -> SplitChoice | Decline:
    planner.memory.forget()  # each answer by itself
    ranks = table.provenance.parallel.get("data", 1)
    if ranks > 1:
        return planner.choose_data_parallel([tokens] * ranks, DECIDED_BY_COSTS)
    return planner.choose(_fill_prefill(tokens), DECIDED_BY_COSTS)


def _list_sizes(largest: int) -> list[int]:
    """Return the powers of two up to *largest* tokens, and *largest* itself if it is smaller than all."""
    return [SMALLEST << number for number in range(16) if SMALLEST << number <= largest] or [largest]


def _fill_prefill(tokens: int) -> Batch:
    return Batch((tokens,), tokens)


def _describe(tokens: int, prediction: Prediction) -> str:
    return f"the largest predicted gain is that of {tokens} tokens: {prediction}"
