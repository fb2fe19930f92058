"""Small machines whose plans are prepared quickly: like layers, unlike ones, lanes that slow each other, and `side`."""

from __future__ import annotations

import random
from typing import NamedTuple

from dbo_runtime.batch import Batch
from dbo_runtime.ir.program import Program
from dbo_runtime.planner.costs.cost_table import CommCost, ComputeCost, CostTable, HostCost, OpCost
from dbo_runtime.planner.online.planner import Planner
from dbo_runtime.planner.online.shapes import ServingLimits
from tests.support.planner.machines import BYTES, make_table, record_layers
from tests.support.planner.placed_programs import record

FEW_STATES = 1_000
LIMITS = ServingLimits(tokens=4096, requests=128, context=8192)
LAYERS = 4
CONTENDED = {"compute": 1.1, "comm": 1.3}
CONTENDED_SIDE = {"compute": 1.1, "comm": 1.1, "side": 1.1, "compute/side": 1.25, "side/compute": 1.5}


class PreparedMachine(NamedTuple):
    """A program and what its ops cost."""

    program: Program
    table: CostTable

    def open_planner(self, limits: ServingLimits = LIMITS) -> Planner:
        return Planner(self.program, self.table, limits, FEW_STATES)


def make_alike(**changes: object) -> PreparedMachine:
    """Return layers of a compute op with attention, and a message that takes half as long."""
    costs: dict[str, OpCost] = {
        "attention": ComputeCost(10e-6, 0.16e-6, 50e-6, 2e-11, 2e-11, per_decode_pair=2e-10),
        "reduce": CommCost(20e-6, 0.1e-6 / BYTES, BYTES),
    }
    program = record_layers(LAYERS)
    return PreparedMachine(program, make_table(program, costs, **changes))


def make_unlike(**changes: object) -> PreparedMachine:
    """Return layers of two compute ops and two messages, of which one is short and the other long."""
    program = record_layers(LAYERS, ("attention", "reduce", "mlp", "mlp_reduce"))
    costs: dict[str, OpCost] = {
        "attention": ComputeCost(5e-6, 0.5e-6, per_pair=2e-11, per_context_pair=2e-11),
        "reduce": CommCost(2e-6, 0.1e-6 / BYTES, BYTES),
        "mlp": ComputeCost(5e-6, 0.15e-6, 30e-6),
        "mlp_reduce": CommCost(2e-6, 0.5e-6 / BYTES, BYTES, free_bytes=50 * BYTES),
    }
    return PreparedMachine(program, make_table(program, costs, host=HostCost(issue=1e-6, handover=2e-6), **changes))


def make_side() -> PreparedMachine:
    """Return layers with keys and shared experts for `side`, where the whole mixture of experts may be, too."""
    program = record()
    costs: dict[str, OpCost] = {
        "keys": ComputeCost(5e-6, 0.1e-6),
        "queries": ComputeCost(5e-6, 0.15e-6),
        "attention": ComputeCost(5e-6, 0.05e-6, per_pair=4e-11, per_context_pair=4e-11, per_decode_pair=2e-10),
        "add": ComputeCost(2e-6),
        "gate": ComputeCost(3e-6, 0.01e-6),
        "dispatch": CommCost(10e-6, 0.1e-6 / BYTES, BYTES),
        "shared_experts": ComputeCost(5e-6, 0.1e-6),
        "experts": ComputeCost(5e-6, 0.3e-6, 40e-6),
        "combine": CommCost(10e-6, 0.15e-6 / BYTES, BYTES),
        "merge": ComputeCost(2e-6, 0.01e-6),
    }
    return PreparedMachine(program, make_table(program, costs, contention=CONTENDED_SIDE))


MACHINES = {
    "alike": make_alike(),
    "alike, contended": make_alike(contention=CONTENDED),
    "alike, doubted": make_alike(contention={}),
    "unlike": make_unlike(),
    "unlike, contended": make_unlike(contention=CONTENDED),
    "side": make_side(),
}


def draw_batch(rng: random.Random, limits: ServingLimits = LIMITS) -> Batch:
    """Draw a step of prompts, some after a context, of decodes, or of both."""
    decodes = rng.choice((0, 0, rng.randint(1, limits.requests - 4)))
    room = limits.tokens - decodes
    prompts = [rng.randint(2, room // 4) for _ in range(rng.randint(0 if decodes else 1, 4))]
    contexts = [rng.randint(0, limits.context // 2) for _ in range(decodes + len(prompts))]
    return Batch((*[1] * decodes, *prompts), sum(prompts), context_lens=tuple(contexts))
