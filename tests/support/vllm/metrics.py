"""Plans to count, and counts as a Prometheus server reads them."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices.virtual import VirtualDevice
from dbo_runtime.engine.execution_plan import ExecutionPlan
from dbo_runtime.engine.runtime import MicroBatchRuntime
from dbo_runtime.observe.logs import open_log
from tests.support.programs import record_toy


def make_plan(*tokens: int) -> ExecutionPlan:
    runtime = MicroBatchRuntime(record_toy(), VirtualDevice(), RuntimeConfig(), open_log(quiet=True))
    plan = runtime.plan(Batch(tokens, sum(tokens)), [sum(tokens[: n + 1]) for n in range(len(tokens) - 1)])
    assert isinstance(plan, ExecutionPlan)
    return plan


def scrape(folder: Path) -> dict[str, dict[tuple[str, ...], float]]:
    """Return samples by name and the values of model, engine and other labels, as a Prometheus server reads them."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in families:
        for sample in family.samples:
            others = sorted(set(sample.labels) - {"model_name", "engine"})
            labels = tuple(sample.labels[name] for name in ("model_name", "engine", *others))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found
