"""`dbo plan --ways` compares micro-batches, nano-batches and the order alone."""

from __future__ import annotations

import json

import pytest

from dbo_runtime.__main__ import main
from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.whatif.published_cases import get_case
from dbo_runtime.lab.whatif.ways import compare_ways, describe_ways, mark_token_wise
from dbo_runtime.planner.costs.program_spec import build_program
from tests.support.programs import record_toy

DECODES = ["plan", "--costs", "r1-tp16-941", "--decodes", "128", "--context", "4096", "--ways"]


@pytest.mark.slow
def test_the_order_alone_is_fastest_for_decodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DECODES) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["way", "unsplit", "micro-batches", "nano-batches", "order", "both"]
    assert [row.split()[0] for row in rows if "*" in row] == ["order"]


@pytest.mark.slow
def test_figures_are_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*DECODES, "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)
    assert [(way["name"], way["parts"]) for way in ways] == [
        ("unsplit", 0),
        ("micro-batches", 2),
        ("nano-batches", 2),
        ("order alone", 1),
        ("both", 2),
    ]
    assert [way["nano_batches"] for way in ways] == [0, 0, 0, 0, 2]
    assert min(ways, key=lambda way: way["seconds"])["name"] == "order alone"


@pytest.mark.slow
def test_micro_batches_are_fastest_for_the_published_prefill() -> None:
    case = get_case("r1-tp16-941")
    ways = compare_ways(case.table, Batch((4096,) * 4, 4 * 4096), RuntimeConfig())
    micro, nano, order, both = ways[1:]
    assert micro.seconds < nano.seconds < order.seconds < ways[0].seconds
    assert (micro.parts, both.parts, both.nano_batches) == (3, 3, 4)
    assert both.seconds == pytest.approx(micro.seconds, rel=0.003)  # so the planner need not offer it
    assert " 3x4" in describe_ways(ways)


def test_what_a_program_declares_is_kept() -> None:
    declared = record_toy()
    assert mark_token_wise(declared) is declared
    marked = mark_token_wise(build_program(get_case("r1-tp16-941").table.program))
    assert {op.name for op in marked.ops if not op.token_wise} == {"attention"}
