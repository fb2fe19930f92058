"""Spread the experts of a case over another number of ranks. Attention is data parallel, so a rank's batch stays."""

from __future__ import annotations

from dataclasses import replace

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.whatif.expert_models import ExpertModel
from dbo_runtime.lab.whatif.fabrics import Fabric
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import ComputeCost


def scale_experts(table: CostTable, ranks: int, model: ExpertModel, fabric: Fabric) -> CostTable:
    """Return the costs with the experts of *model* spread over *ranks* ranks, instead of the table's number.

    Each rank has fewer experts, so fewer weights to read. It gets as many tokens as before, because more ranks send it
    some. Dispatch and combine cost what *fabric* says. All other ops stay.

    Raises:
        ConfigError: the table has no separate expert ops, or does not say over how many ranks experts are spread.
    """
    known = table.provenance.parallel.get("expert", 0)
    experts = table.ops.get("experts")
    if known < 1 or not isinstance(experts, ComputeCost) or "dispatch" not in table.ops or "combine" not in table.ops:
        raise ConfigError(
            f"parallel.expert of the costs is {known}: experts are spread over ranks only where ops `dispatch`, "
            "`experts` and `combine` have costs, and the file says for how many ranks."
        )
    weights = experts.weights * model.count_experts(ranks) / model.count_experts(known)
    parallel = {**table.provenance.parallel, "expert": ranks, "data": ranks}
    provenance = replace(
        table.provenance,
        kind="modelled",
        source=f"{table.provenance.source} Scaled: experts over {ranks} ranks instead of {known}.",
        parallel=parallel,
    )
    ops = {
        **table.ops,
        "experts": replace(experts, weights=weights),
        "dispatch": fabric.price_dispatch(model, ranks),
        "combine": fabric.price_combine(model, ranks),
    }
    return replace(table, provenance=provenance, ops=ops)
