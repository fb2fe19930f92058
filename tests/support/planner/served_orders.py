"""How much slower than the best known order the served one is, on random steps of the published cases."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from dbo_runtime.batch import Batch, place_cuts, share_evenly, slice_batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.oracle.orders import Orders
from dbo_runtime.lab.whatif.published_cases import PublishedCase
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.program_spec import build_program
from dbo_runtime.planner.online.candidates import Candidates
from dbo_runtime.planner.online.cuts import measure_slices
from dbo_runtime.planner.online.named_order import NamedOrder
from dbo_runtime.planner.online.planner import SEARCH_STATES
from dbo_runtime.planner.online.predictor import Predictor

CONTEXTS = (0, 0, 512, 2048, 8192)  # tokens that a request has in the KV cache


class Served(NamedTuple):
    """The order that is served for a step.

    Attributes:
        name: of the order.
        seconds: of its ops.
        loss: by which share the best known order is faster.
    """

    name: str
    seconds: float
    loss: float


class OrderJudge:
    """Compares what is served by the costs of one table with orders that are searched for with the very features."""

    def __init__(self, table: CostTable) -> None:
        self.program = build_program(table.program)
        self.table = table
        self.predictor = Predictor(self.program, table)
        self.orders = Orders(self.program, table, self.predictor, SEARCH_STATES)
        self._candidates = [Candidates(placed, SEARCH_STATES) for placed in self.orders.placements]

    def judge(self, slice_features: Sequence[BatchFeatures]) -> Served:
        """Return what is served for micro-batches with these features."""
        served = self.orders.choose_best(slice_features, RuntimeConfig(side="auto"))
        seconds = self.predict_ops(served, slice_features)
        placement = [placed.ops for placed in self.orders.placements].index(served.programs[0].ops)
        candidates = self._candidates[placement]
        times = [self.table.times(self.program, features) for features in slice_features]
        known = [candidates.find(times), *candidates.list_policies(len(slice_features))]
        best = min(seconds, *(self.predict_ops(order, slice_features) for order in known if order is not None))
        return Served(served.name, seconds, seconds / best - 1.0)

    def predict_ops(self, order: NamedOrder, slice_features: Sequence[BatchFeatures]) -> float:
        """Return the seconds of the ops with these very features, and not with those of their buckets."""
        return self.predictor.simulate_end(order, slice_features)


def draw_features(rng: random.Random, case: PublishedCase) -> tuple[BatchFeatures, ...]:
    """Draw the micro-batches of a step: prompts, some after a context, or decodes, as the case is about."""
    while True:
        batch = draw_prompts(rng) if case.step.prefill_tokens else _draw_decodes(rng)
        cuts = place_cuts(batch, share_evenly(batch, rng.choice((2, 2, 3))))
        if cuts:
            return measure_slices(batch, slice_batch(batch, cuts))


def draw_prompts(rng: random.Random) -> Batch:
    """Draw a step of a few prompts, some after a context, with or without decodes."""
    prompts = [rng.randint(16, rng.choice((800, 4096))) for _ in range(rng.randint(1, 6))]
    decodes = rng.choice((0, 0, rng.randint(1, 128)))
    contexts = [*rng.choices(CONTEXTS[2:], k=decodes), *rng.choices(CONTEXTS, k=len(prompts))]
    return Batch((*[1] * decodes, *prompts), sum(prompts), context_lens=tuple(contexts))


def _draw_decodes(rng: random.Random) -> Batch:
    count = rng.randint(16, 512)
    return Batch((1,) * count, 0, context_lens=tuple(rng.choices(CONTEXTS[2:], k=count)))
