"""Write the dashboard of examples/monitoring, in the types of Grafana's own SDK: `make dashboard`.

Panels have the units in which the metrics are exported, and each query keeps to the model and the engines that are
chosen at the top. Names of metrics come from `dbo_runtime.observe.counts`; a test parses every query.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from dbo_runtime.observe.counts import HELP, PREFIX

FILE = Path(__file__).resolve().parents[1] / "examples" / "monitoring" / "dashboard.json"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
CHOSEN = 'model_name=~"$model", engine=~"$engine"'
SECONDS, SHARE, RATE, NUMBER = "s", "percentunit", "cps", "short"  # Grafana's names of units
WIDTH, HEIGHT = 12, 8  # of a panel, in Grafana's grid of 24 columns


class Query(NamedTuple):
    """A query in PromQL, and the legend of its series."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A panel of the dashboard; its lowest value is 0."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]


def name(metric: str, suffix: str = "") -> str:
    """Return the selector of a metric that is exported, of the chosen engines."""
    assert metric in HELP, metric
    return f"{PREFIX}{metric}{suffix}{{{CHOSEN}}}"


def rate(metric: str, by: str, suffix: str = "_total", over: str = "$__rate_interval") -> str:
    """Return how fast a counter grows, summed by a label."""
    return f"sum by ({by}) (rate({name(metric, suffix)}[{over}]))"


def list_panels() -> Iterator[Panel]:
    """Yield all panels, in their order."""
    yield Panel("Steps", HELP["steps"], RATE, (Query(rate("steps", "mode"), "{{mode}}"),))
    parts = (rate(metric, "engine", over="30m") for metric in ("hidden_seconds", "communication_seconds"))
    yield Panel(
        "Share of communication that is hidden",
        "Over 30 minutes, of the sampled split steps, one in 64: how much of the communication overlapped computation.",
        SHARE,
        (Query(" / ".join(parts), "engine {{engine}}"),),
    )
    yield Panel(
        "Steps that were not split, by reason",
        f"{HELP['declines']} docs/vllm.md explains each.",
        RATE,
        (Query(rate("declines", "reason"), "{{reason}}"),),
    )
    yield Panel(
        "Engines that split nothing, by reason",
        HELP["standing_declines"],
        NUMBER,
        (Query(f"sum by (reason) ({name('standing_declines', '_total')})", "{{reason}}"),),
    )
    yield Panel(
        "Measured by predicted time",
        "1 is a right prediction. Only steps with a prediction count, which needs costs.",
        SHARE,
        (Query(f"{rate('measured_seconds', 'mode')} / {rate('predicted_seconds', 'mode')}", "{{mode}}"),),
    )
    yield Panel(
        "Predicted and measured time",
        "Seconds of steps with a prediction, for each second.",
        SHARE,
        (
            Query(rate("predicted_seconds", "mode"), "predicted, {{mode}}"),
            Query(rate("measured_seconds", "mode"), "measured, {{mode}}"),
        ),
    )
    buckets = rate("planning_seconds", "le", "_bucket")
    yield Panel(
        "Planning time of a step",
        HELP["planning_seconds"],
        SECONDS,
        (
            *(Query(f"histogram_quantile({share}, {buckets})", f"{share:.0%} stay below") for share in (0.5, 0.99)),
            Query(
                f"{rate('planning_seconds', 'engine', '_sum')} / {rate('planning_seconds', 'engine', '_count')}",
                "mean, engine {{engine}}",
            ),
        ),
    )
    yield Panel(
        "Steps about which ranks disagreed",
        f"{HELP['disagreements']} An error ends the engine.",
        NUMBER,
        (Query(f"sum by (outcome) (increase({name('disagreements', '_total')}[$__rate_interval]))", "{{outcome}}"),),
    )
    tokens = f"{rate('micro_batch_tokens', 'engine', '_sum')} / {rate('micro_batch_tokens', 'engine', '_count')}"
    yield Panel(
        "Tokens of a micro-batch, mean", HELP["micro_batch_tokens"], NUMBER, (Query(tokens, "engine {{engine}}"),)
    )
    yield Panel(
        "Costs are known",
        f"{HELP['costs_known']} 0 where the settings ask for costs: the log has the reason.",
        NUMBER,
        (Query(f"min by (engine, asked) ({name('costs_known')})", "engine {{engine}}, asked: {{asked}}"),),
    )
    yield Panel(
        "Forwards of the vision encoder",
        HELP["encoder_forwards"],
        RATE,
        (Query(rate("encoder_forwards", "mode"), "{{mode}}"),),
    )


def make_dashboard() -> str:
    """Return the dashboard as Grafana imports it."""
    board = (
        dashboard.Dashboard("Dual-batch overlap (dbo_runtime)")
        .uid("dbo-runtime")
        .description("Micro-batch overlap of vLLM: is it on, what does it hide, why are steps not split.")
        .tags(["vllm", "dbo_runtime"])
        .time("now-1h", "now")
        .refresh("30s")
        .editable()
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_make_variable("model", "Model", "model_name", f"{PREFIX}steps_total"))
        .with_variable(_make_variable("engine", "Engine", "engine", f'{PREFIX}steps_total{{model_name=~"$model"}}'))
    )
    for panel in list_panels():
        board = board.with_panel(_make_panel(panel))
    return JSONEncoder(sort_keys=True, indent=2).encode(board.build()) + "\n"


def _make_variable(variable: str, label: str, of: str, selector: str) -> dashboard.QueryVariable:
    built = dashboard.QueryVariable(variable)
    built.label(label).datasource(SOURCE).query(f"label_values({selector}, {of})")
    built.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).multi(True).include_all(True).all_value(".*")
    return built


def _make_panel(panel: Panel) -> timeseries.Panel:
    legend = VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    built = timeseries.Panel()
    built.title(panel.title).description(panel.description).datasource(SOURCE)
    built.unit(panel.unit).min(0).legend(legend).span(WIDTH).height(HEIGHT)
    for number, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id("ABCDEF"[number])
        built.with_target(target)
    return built


if __name__ == "__main__":
    FILE.write_text(make_dashboard())
