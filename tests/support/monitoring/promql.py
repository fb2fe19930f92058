"""What a query in PromQL names, and in which unit its result is, by a parser's syntax tree."""

from __future__ import annotations

from typing import Any, NamedTuple

import promql_parser

INTERVAL = "$__rate_interval"  # Grafana puts a duration there


class Selector(NamedTuple):
    """A metric in a query, with the values that its labels are compared with, by label."""

    name: str
    labels: dict[str, str]


def parse(query: str) -> Any:
    """Return the tree of a query, whose types are checked.

    Raises:
        ValueError: if it is not PromQL.
    """
    return promql_parser.parse(query.replace(INTERVAL, "5m"))


def list_nodes(tree: Any) -> list[Any]:
    """Return all nodes of a tree."""
    nodes: list[Any] = []
    promql_parser.walk(tree, nodes.append)
    return nodes


def list_selectors(tree: Any) -> list[Selector]:
    """Return all metrics that a tree names."""
    found = [node for node in list_nodes(tree) if isinstance(node, promql_parser.VectorSelector)]
    return [Selector(each.name, {match.name: match.value for match in each.matchers.matchers}) for each in found]


def list_groups(tree: Any) -> set[str]:
    """Return all labels that a tree groups or matches by."""
    modifiers = [node.modifier for node in list_nodes(tree) if getattr(node, "modifier", None) is not None]
    matchings = [getattr(modifier, "matching", None) for modifier in modifiers]
    labels = [getattr(each, "labels", None) or [] for each in [*modifiers, *matchings]]
    return {label for each in labels for label in each}


def measure_seconds(node: Any) -> int:
    """Return the power of seconds in the unit of a tree's result: 1 for a duration, -1 for a rate, 0 for a number."""
    if isinstance(node, promql_parser.VectorSelector):
        is_duration = "_seconds" in node.name and not node.name.endswith(("_count", "_bucket"))
        return int(is_duration)
    if isinstance(node, promql_parser.MatrixSelector):
        return measure_seconds(node.vector_selector)
    if isinstance(node, promql_parser.NumberLiteral):
        return 0
    if isinstance(node, promql_parser.AggregateExpr | promql_parser.ParenExpr):
        return measure_seconds(node.expr)
    if isinstance(node, promql_parser.BinaryExpr):
        return _measure_binary(node)
    assert isinstance(node, promql_parser.Call), node
    return _measure_call(node.func.name, node.args)


def _measure_binary(node: Any) -> int:
    left, right = measure_seconds(node.lhs), measure_seconds(node.rhs)
    return {"/": left - right, "*": left + right}.get(str(node.op), left)


def _measure_call(function: str, arguments: list[Any]) -> int:
    if function == "histogram_quantile":  # of buckets, whose bounds have the metric's unit
        (selector,) = list_selectors(arguments[1])
        return int(selector.name.endswith("_seconds_bucket"))
    return measure_seconds(arguments[0]) - (function == "rate")
