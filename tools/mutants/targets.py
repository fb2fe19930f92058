"""The modules of the core, and the tests of each: those that are quick, and start no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_CORE = "dbo_runtime"
_PLANNER = f"{_CORE}.planner"
_PLUGIN = f"{_CORE}.vllm_plugin"

TARGETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        f"{_CORE}.batch": ("test_batch.py",),
        f"{_CORE}.ir.codegen": ("ir/test_codegen.py", "properties/test_codegen.py", "engine/test_executor.py"),
        f"{_CORE}.lab.simulate.multi_rank_simulator": (
            "lab/simulate/test_multi_rank_simulator.py",
            "lab/oracle/test_ranks.py",
        ),
        f"{_CORE}.devices.virtual": ("devices/test_virtual.py", "devices/test_contract.py"),
        f"{_CORE}.engine.dispatch": ("engine/test_dispatch.py",),
        f"{_CORE}.engine.executor": (
            "engine/test_executor.py",
            "test_equivalence.py",
            "devices/test_races.py",
            "test_ranges.py",
        ),
        f"{_CORE}.engine.generated_executor": (
            "ir/test_codegen.py",
            "properties/test_codegen.py",
            "engine/test_executor.py",
            "test_ranges.py",
        ),
        f"{_CORE}.ir.lowering": (
            "ir/test_schedule.py",
            "ir/test_validate.py",
            "properties/test_lowering.py",
            "test_layers.py",
        ),
        f"{_CORE}.ir.policies": ("ir/test_policies.py", "ir/test_validate.py"),
        f"{_CORE}.ir.program": ("ir/test_program.py", "planner/online/test_placements.py"),
        f"{_CORE}.lab.oracle.ranks": (
            "lab/oracle/test_ranks.py",
            "properties/test_ranks.py",
            "properties/test_rank_mutants.py",
        ),
        f"{_CORE}.ir.schedule": ("ir/test_schedule.py", "ir/test_validate.py", "ir/test_render.py"),
        f"{_CORE}.ir.validate": ("ir/test_validate.py", "properties/test_mutants.py", "engine/test_runtime.py"),
        f"{_CORE}.lab.calibrate.contention": ("lab/calibrate/test_contention.py",),
        f"{_PLANNER}.costs.cost_table": ("planner/costs/test_cost_table.py",),
        f"{_CORE}.lab.calibrate.fit": ("lab/calibrate/test_fit.py",),
        f"{_PLANNER}.costs.op_cost": ("planner/costs/test_op_cost.py", "planner/costs/test_cost_table.py"),
        f"{_PLANNER}.online.correction": ("planner/online/test_correction.py",),
        f"{_PLANNER}.online.cuts": ("planner/online/test_cuts.py",),
        f"{_PLANNER}.online.step_memory": (
            "planner/online/test_hysteresis.py",
            "planner/online/test_measured_steps.py",
            "planner/online/test_planner.py",
            "planner/online/test_step_memory.py",
        ),
        f"{_PLANNER}.online.order_book": ("planner/online/test_order_book.py",),
        f"{_CORE}.lab.oracle.orders": ("planner/online/test_orders.py",),
        f"{_PLANNER}.online.ab_trial": ("planner/online/test_ab_trial.py",),
        f"{_PLANNER}.search.bound": ("planner/search/test_bound.py", "lab/trace/test_summary.py"),
        f"{_PLUGIN}.api.fields": ("vllm_plugin/context/test_splitter.py",),
        f"{_PLUGIN}.encoder.host_lengths": ("vllm_plugin/encoder/test_forward.py",),
        f"{_PLUGIN}.parallel.agreement": ("vllm_plugin/parallel/test_agreement.py",),
    }
)
