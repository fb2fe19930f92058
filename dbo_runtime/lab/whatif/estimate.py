"""Predict many steps, unsplit and in their best split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from dbo_runtime.batch import Batch
from dbo_runtime.bounded import BoundedDict
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.decline import Decline
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.prediction import Prediction

ESTIMATE_SEARCH_STATES = 4_000  # states per search: enough for two micro-batches, and within 1 % for three

MAX_KNOWN = 1_024  # predictions to keep


class Estimator:
    """Predicts steps with one table, unsplit and in their best split.

    Args:
        table: costs to predict by.
        steps: steps to find orders for all at once; other steps are planned by these orders, too. Without them, each
            step gets orders of its own, which takes a second or two each.
    """

    def __init__(self, table: CostTable, steps: Sequence[Batch] = ()) -> None:
        self._table = table
        self._planner = open_planner(table, steps) if steps else None
        self._known: BoundedDict[tuple[Batch, RuntimeConfig], tuple[Prediction, ...]] = BoundedDict(MAX_KNOWN)

    def estimate(self, batch: Batch, config: RuntimeConfig) -> Prediction | None:
        """Return the prediction for the best number of micro-batches; None if the step cannot be cut."""
        return next(iter(self.list_options(batch, config)), None)

    def list_options(self, batch: Batch, config: RuntimeConfig) -> tuple[Prediction, ...]:
        """Return a prediction for each number of micro-batches, fastest first; empty if the step cannot be cut.

        Once a number of micro-batches is slower, larger numbers are not tried, because each adds fixed costs.
        """
        if (batch, config) not in self._known:
            options: dict[int, Prediction] = {}
            planner = self._planner or open_planner(self._table, [batch])
            for parts in planner.list_counts(config):
                option = _estimate_parts(planner, batch, replace(config, mode="always", micro_batches=parts))
                if option is not None:
                    options[option.micro_batches] = option  # some batches do not allow this many cuts
                if parts > 1 and (option is None or option.gain <= 0):
                    break
            self._known[batch, config] = tuple(sorted(options.values(), key=lambda option: option.split))
        return self._known[batch, config]


def open_planner(table: CostTable, steps: Sequence[Batch]) -> Planner:
    """Return a planner like the one that serves, with orders for these steps."""
    return Planner(build_program(table.program), table, max_states=ESTIMATE_SEARCH_STATES, shapes=steps)


def _estimate_parts(planner: Planner, batch: Batch, config: RuntimeConfig) -> Prediction | None:
    planner.memory.forget()  # each answer by itself, whatever was asked before
    choice = planner.choose(batch, config)
    return None if isinstance(choice, Decline) else choice.prediction


def resize_batch(batch: Batch, tokens: int) -> Batch:
    """Return a batch of *tokens* tokens that otherwise resembles *batch*.

    Prompts grow and shrink in proportion, and are dropped if there are fewer tokens than prompts. The number of decodes
    changes, because they have one token each.
    """
    count = min(len(batch.query_lens), tokens) if batch.prefill_tokens else tokens
    contexts = tuple(batch.contexts[number % len(batch.contexts)] for number in range(count))
    if not batch.prefill_tokens:
        return replace(batch, query_lens=(1,) * count, context_lens=contexts)
    kept = batch.query_lens[:count]
    spare = tokens - count  # tokens beyond one per request
    edges = [spare * part // sum(kept) for part in accumulate(kept, initial=0)]
    lengths = tuple(1 + right - left for left, right in pairwise(edges))
    return replace(batch, query_lens=lengths, prefill_tokens=tokens, context_lens=contexts)
