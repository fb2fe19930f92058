"""Tables on the pages have the columns of their writers, though a page is not measured anew when these change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.benchmarks import (
    bench_never_lose,
    bench_planning,
    bench_scale,
    bench_ways,
    bench_what_if,
    serving_report,
    step_time_report,
    two_hosts_report,
)
from tests.support.page import PAGE, make_table
from tests.support.reliability import report
from tests.support.reliability.page import PAGE as RELIABILITY

HEADS: dict[str, tuple[Sequence[str], ...]] = {
    "scale": ((*bench_scale.SIZE_HEADER, "recording", "order, lowering", "validation", "planning", "issuing"),),
    "planning": (bench_planning.COST_HEADER, bench_planning.DECISION_HEADER),
    "never-lose": (("truth", *bench_never_lose.POLICIES), ("truth", *bench_never_lose.STAGES)),
    "what-if": (bench_what_if.HEADER,),
    "ways": (bench_ways.HEADER,),
    "two-hosts-tensor": (two_hosts_report.HEADER, two_hosts_report.EVIDENCE),
    "serving": (serving_report.HEADER, serving_report.EVIDENCE),
    "step-time": (step_time_report.COUNTS, step_time_report.TIMES),
    "faults": (report.HEADER, report.LOG_HEADER),
}


@pytest.mark.parametrize("section", HEADS)
def test_tables_on_the_pages_have_the_columns_of_what_writes_them(section: str) -> None:
    page = RELIABILITY if section == "faults" else PAGE
    text = page.read_text(encoding="utf-8").partition(f"<!-- {section} -->\n")[2].partition("<!-- /")[0]
    for head in HEADS[section]:
        assert "\n".join(make_table(head, [])) in text
