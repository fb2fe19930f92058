"""Ranks that differ: servers of two nodes, one of which is started otherwise. Their start is to be refused."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

from tests.support.reliability.layouts import Layout
from tests.support.reliability.observation import Outcome, describe_left
from tests.support.reliability.servers import STARTS_WITHIN, Servers, find_cause

PATIENCE_SECONDS = 120.0  # after a refusal


class Refusal(NamedTuple):
    """What differs, and the variables of each node in which it does."""

    title: str
    layout: Layout
    nodes: tuple[Mapping[str, str], ...]
    other_version: bool = False


def refuse(servers: Servers, refusal: Refusal) -> Outcome:
    """Start nodes that differ, and return what became of them."""
    each = dict(enumerate(refusal.nodes))
    if refusal.other_version:
        each[1] = {**each[1], "PYTHONPATH": f"{install_other(servers.sandbox.folder)}:{servers.python_path}"}
    begin, log = time.monotonic(), [0] * refusal.layout.nodes
    servers.launch(each)
    while "ConfigError: " not in servers.read_log(log) and servers.sandbox.find_processes():
        if time.monotonic() > begin + STARTS_WITHIN:
            break
        time.sleep(0.1)
    refused = time.monotonic() - begin
    seconds, left = servers.watch_end(PATIENCE_SECONDS)
    cause = find_cause(servers.read_log(log))
    end = f"there {PATIENCE_SECONDS:.0f} s after that" if seconds is None else f"gone {seconds:.0f} s after that"
    said = f"refused {refused:.0f} s after the start" if cause else f"nothing in {refused:.0f} s"
    return Outcome("connection refused", cause, f"{said}, {end}", describe_left(servers, left))


def install_other(folder: Path) -> str:
    """Write the metadata of another version of this package; return the folder, for PYTHONPATH."""
    package = folder / "other" / "dbo_runtime-99.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: dbo-runtime\nVersion: 99.0\n")
    (package / "entry_points.txt").write_text(distribution("dbo-runtime").read_text("entry_points.txt") or "")
    return str(package.parent)


SAME: Mapping[str, str] = {}
SWITCHED_OFF = {"VLLM_ASCEND_ENABLE_DBO": "0"}
TENSOR, DATA = Layout("tensor", 2), Layout("data", 2)
REFUSALS = (
    Refusal("the second rank is switched off", TENSOR, (SAME, SWITCHED_OFF)),
    Refusal("the first rank is switched off", TENSOR, (SWITCHED_OFF, SAME)),
    Refusal("the second rank has other settings", TENSOR, (SAME, {"DBO_MICRO_BATCHES": "3"})),
    Refusal("the second rank has another version", TENSOR, (SAME, SAME), other_version=True),
    Refusal("the second rank is switched off", DATA, (SAME, SWITCHED_OFF)),
)
