"""Every query of the dashboard and of the rules is PromQL, and names what is exported."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.monitoring.promql import list_groups, list_selectors, measure_seconds, parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
PROMTOOL = shutil.which("promtool")
SCRAPED = {"job", "instance"}  # labels that Prometheus adds
SECONDS_OF_UNIT = {"s": 1, "cps": -1, "percentunit": 0, "short": 0}

BOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
RECORDS = {rule["record"] for rule in RULES if "record" in rule}


def list_queries() -> Iterator[Any]:
    """Yield each query with a name for it."""
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for rule in RULES:
        yield pytest.param(rule["expr"], id=rule.get("record") or rule["alert"])


def find_reasons() -> set[str]:
    """Return all phrases in the code by which steps are declined."""
    sources = "\n".join(path.read_text() for path in (ROOT / "dbo_runtime").rglob("*.py"))
    return set(re.findall(r'Decline\(\s*"([^"]+)"', sources))


def is_of_vllm(name: str) -> bool:
    """Return whether vLLM itself exports a metric."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    return f'"{name}"' in (Path(vllm.origin).parent / "v1" / "metrics" / "loggers.py").read_text()


@pytest.mark.parametrize("query", list(list_queries()))
def test_a_query_names_metrics_and_labels_that_are_exported(
    query: str, samples: dict[str, dict[str, set[str]]]
) -> None:
    tree = parse(query)
    selectors = list_selectors(tree)
    assert selectors
    allowed = set(SCRAPED)
    for selector in selectors:
        if selector.name in RECORDS or (not selector.name.startswith("vllm:dbo_") and is_of_vllm(selector.name)):
            continue
        assert selector.name in samples
        labels = samples[selector.name]
        assert set(selector.labels) <= set(labels)
        allowed |= set(labels)
        for label, value in selector.labels.items():
            known = find_reasons() if label == "reason" else labels[label]
            assert value in known or value.startswith("$"), f"{label}={value}"
    assert list_groups(tree) <= allowed


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: panel["title"])
def test_a_panel_has_the_unit_of_what_it_shows(panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    assert {measure_seconds(parse(target["expr"])) for target in panel["targets"]} == {SECONDS_OF_UNIT[unit]}


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: panel["title"])
def test_legends_name_labels_that_the_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= list_groups(parse(target["expr"]))


def test_every_metric_is_on_the_dashboard(samples: dict[str, dict[str, set[str]]]) -> None:
    shown = {
        selector.name
        for panel in BOARD["panels"]
        for target in panel["targets"]
        for selector in list_selectors(parse(target["expr"]))
    }
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples}
    left_out = {"vllm:dbo_micro_batches_total", "vllm:dbo_sampled_steps_total"}
    assert families - {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == left_out


def test_variables_ask_for_labels_that_are_exported(samples: dict[str, dict[str, set[str]]]) -> None:
    queries = [each["query"] for each in BOARD["templating"]["list"] if each["type"] == "query"]
    assert len(queries) == 2
    for query in queries:
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert found is not None
        (selector,) = list_selectors(parse(found[1]))
        assert {found[2], *selector.labels} <= set(samples[selector.name])


def test_alerts_use_labels_that_their_expressions_keep() -> None:
    for rule in RULES:
        text = " ".join(rule.get("annotations", {}).values())
        tree = parse(rule["expr"])
        kept = list_groups(tree) | {"model_name", "engine", "reason", "mode"}
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept


def test_records_are_used_and_named_after_their_labels() -> None:
    used = {selector.name for rule in RULES for selector in list_selectors(parse(rule["expr"]))}
    assert used >= RECORDS
    assert all(re.fullmatch(r"engine(_mode)?:vllm_dbo_\w+:(ratio|p99)_rate\d+m", name) for name in RECORDS)


def test_every_alert_has_a_severity_a_summary_and_a_case() -> None:
    cases = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    tested = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case["exp_alerts"]}
    alerts = [rule for rule in RULES if "alert" in rule]
    assert {rule["alert"] for rule in alerts} == tested
    assert {rule["labels"]["severity"] for rule in alerts} == {"info", "warning", "critical"}
    assert all(set(rule["annotations"]) == {"summary", "description"} for rule in alerts)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize("words", [["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]], ids=" ".join)
def test_promtool_accepts_the_rules_and_their_cases(words: list[str]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("query", ["rate(vllm:dbo_steps_total)", "sum by (mode (x)", "vllm:dbo_steps_total{mode=}"])
def test_the_parser_refuses_what_is_no_promql(query: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(query)


def test_the_dashboard_is_the_one_that_the_code_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="needs Grafana's SDK, for Python 3.11 or newer")
    from tools.dashboard import FILE, make_dashboard

    assert make_dashboard() == FILE.read_text(), "run `make dashboard`"
