"""Plant faults of every kind, and write which check catches each: `make planted-faults`.

Schedules and plans of ranks are changed without vLLM; adapters and metadata in a tiny model that vLLM serves.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dbo_runtime.devices.cpu import CpuDevice
from dbo_runtime.engine.event_table import EventTable
from dbo_runtime.errors import ScheduleError
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.ir.validate import validate
from dbo_runtime.lab.oracle.ranks import validate_ranks
from dbo_runtime.lab.sanitizer.executor import SanitizedExecutor
from tests.support.mutants import BREAKING, Mutation
from tests.support.oracle import find_violations
from tests.support.page import make_table, tell_section
from tests.support.rank_mutants import FAULTS, GROUPS, make_plans, plant
from tests.support.reliability.adapter_faults import ADAPTER_FAULTS
from tests.support.reliability.metadata_faults import METADATA_FAULTS
from tests.support.reliability.page import PAGE
from tests.support.reliability.probe import CHECKS, ENDED, Outcome, run_probe
from tests.support.strategies import Case, cases, make_inputs

COMMAND = "make planted-faults"
EXAMPLES = 500  # random schedules that each mutation is tried on
RANKS = 4
EXPERTS = "experts"  # the column of a mixture of experts


def main() -> None:
    """Plant all faults, print the tables, and write them to the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write-page", action="store_true", help="write the tables to docs/reliability.md")
    is_written = parser.parse_args().write_page
    schedules, ranks, served = list(plant_schedules()), list(plant_ranks()), plant_served()
    kinds = len(schedules) + len(ranks) + len(served)
    missed = [row[0] for row in served if set(row[2:]) == {"–"}]
    lines = [
        f"{kinds} kinds of fault; by no check: {', '.join(missed) or 'none'}.",
        "",
        f"Schedules that are changed after they were made ({EXAMPLES} random ones for each kind; which are unsafe is "
        "said by an oracle that shares no code with either check):",
        "",
        *make_table(["change", "unsafe", "validator", "sanitizer"], schedules),
        "",
        "Plans of four ranks, one of which differs (in every place that it can):",
        "",
        *make_table(["difference on one rank", "planted", "validator of ranks"], ranks),
        "",
        "Adapters and metadata, in a Llama-like model; DBO_CHECK with two tensor parallel ranks. The last column is "
        "that of a mixture of experts in bf16, where rounding may lead tokens to other experts:",
        "",
        *make_table(
            ["fault", "what it is", "`dbo adapter`", "`DBO_CHECK=1`", "`DBO_CHECK=races`", "experts, `DBO_CHECK=1`"],
            served,
        ),
    ]
    tell_section(is_written, "planted-faults", COMMAND, lines, PAGE)


def plant_schedules() -> Iterator[tuple[str, int, str, str]]:
    """Yield for each mutation how many unsafe schedules it made, and how many of them each check refused."""
    device = CpuDevice()
    for mutation in BREAKING:
        unsafe, refused, stopped = _try_mutation(mutation, device)
        yield mutation.__name__.replace("_", " "), unsafe, f"{refused} of {unsafe}", f"{stopped} of {unsafe}"
    device.close()


def _try_mutation(mutation: Mutation, device: CpuDevice) -> tuple[int, int, int]:
    counts = [0, 0, 0]

    @settings(
        max_examples=EXAMPLES, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(cases(), st.data())
    def check(case: Case, data: st.DataObject) -> None:
        mutant = mutation(case.lower(), data.draw)
        if mutant is not None and find_violations(mutant):
            counts[0] += 1
            counts[1] += _raises(validate, mutant)
            counts[2] += _raises(_run_watched, mutant, case, device)

    check()
    return counts[0], counts[1], counts[2]


def _run_watched(schedule: Schedule, case: Case, device: CpuDevice) -> None:
    SanitizedExecutor(schedule, device, EventTable(device)).run(make_inputs(case))


def _raises(call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except Exception:  # noqa: BLE001 - any refusal counts
        return True
    return False


def plant_ranks() -> Iterator[tuple[str, int, str]]:
    """Yield for each fault of one rank in how many places it was planted, and how often it was refused."""
    for fault in FAULTS:
        planted = refused = 0
        for rank in range(RANKS):
            for plans in plant(fault, rank, make_plans()):
                planted += 1
                with suppress(ScheduleError):
                    validate_ranks(plans, GROUPS)
                    continue
                refused += 1
        yield fault.__name__.replace("_", " "), planted, f"{refused} of {planted}"


def plant_served() -> list[tuple[str, ...]]:
    """Return for each fault of adapters and metadata what each check says."""
    from tests.support.vllm.families import make_family

    faults = (*ADAPTER_FAULTS, *METADATA_FAULTS)
    said: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_family("LlamaForCausalLM", Path(folder) / "model")
        names = [fault.__name__ for fault in faults]
        for outcome in run_probe(model, names):
            said[outcome.fault, outcome.check] = classify(outcome)
        experts = make_family("Qwen3MoeForCausalLM", Path(folder) / "experts", mlp_only_layers=[0])
        for outcome in run_probe(experts, names, ("1",), "bfloat16"):
            said[outcome.fault, EXPERTS] = classify(outcome)
    return [
        (
            fault.__name__.replace("_", " "),
            (fault.__doc__ or "").strip().rstrip("."),
            *(said[fault.__name__, check] for check in (*CHECKS, EXPERTS)),
        )
        for fault in faults
    ]


def classify(outcome: Outcome) -> str:
    """Return in a few words what a check said of a fault; a dash if it saw nothing."""
    said = re.sub(r"^Worker failed with error '", "", outcome.error)
    for word, pattern in CLASSES.items():
        if re.search(pattern, said):
            return word
    return "the op's own error" if said else "–"


CLASSES = {
    "the engine stops": re.escape(ENDED),
    "changes what it only reads": "it changed %",
    "returns memory in use": "has memory of|share memory",
    "computes on a communicator": "it computes on communicator",
    "reads the context off compute": "of the forward context",
    "metadata does not fit": "that does not fit",
    "results differ": "differ by|differs first",
}


if __name__ == "__main__":
    main()
