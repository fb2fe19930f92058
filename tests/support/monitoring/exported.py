"""What the code exports, from the real metrics through the real prometheus_client."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics.exposition import ALLOWUTF8, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from dbo_runtime.decline import Decline
from dbo_runtime.observe.timeline import Span, Timeline
from dbo_runtime.vllm_plugin.telemetry.metrics import Metrics
from tests.support.vllm.metrics import make_plan


class Family(NamedTuple):
    """A metric as it is exported, with the values of each label that any of its samples has."""

    name: str
    kind: str
    help: str
    samples: dict[str, dict[str, set[str]]]


def count_everything(folder: Path) -> str:
    """Count one of everything, in *folder*; return what Prometheus 3 reads, whose names keep their colon."""
    metrics = Metrics(folder, "tiny", 0, asks_costs=True)
    for plan in (make_plan(100, 28), Decline("padded batch")):
        metrics.count_step(plan)
        metrics.count_encoder(plan)
    metrics.count_planning(0.001)
    for mode in ("split", "unsplit"):
        metrics.count_time(mode, 0.5, 0.75)
    metrics.add_sample(Timeline((Span("compute", "a", 0, 0.0, 3.0), Span("comm", "b", 1, 2.0, 6.0))))
    metrics.count_standing(Decline("DBO_MODE is off"))
    metrics.count_disagreement("error")
    metrics.show_costs(True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))
    return generate_latest(registry, escaping=ALLOWUTF8).decode()


def read_families(text: str) -> dict[str, Family]:
    """Return the metrics in a text of OpenMetrics by name; its parser refuses what is malformed."""
    families = {}
    for found in text_string_to_metric_families(text):
        samples: dict[str, dict[str, set[str]]] = {}
        for sample in found.samples:
            labels = samples.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, set()).add(value)
        families[found.name] = Family(found.name, found.type, found.documentation, samples)
    return families
