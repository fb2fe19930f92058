"""Errors of adapters as declines, and jobs of which all ranks tell each other whether they have failed."""

from __future__ import annotations

import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbo_runtime.adapters.contract import record_program
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import ProgramError
from dbo_runtime.vllm_plugin.api.versions import get_version
from dbo_runtime.vllm_plugin.step.failures import FAILED, FAILED_STEP, attempt, call_adapter, describe_error
from tests.support.vllm.engines import Engines

ALONE: Any = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0])
PATIENCE = 2.0


class Adapter:
    """One that reads what no model here has."""

    def decline(self, model: Any) -> Decline | None:
        return Decline("scaled") if model.scaling else None

    def record(self, p: Any, model: Any, collectives: Any, x: Any, positions: Any) -> Any:
        return p.compute("norm", model.input_norm, x)


class Breach(Adapter):
    """One that returns no value."""

    def record(self, p: Any, model: Any, collectives: Any, x: Any, positions: Any) -> Any:
        return 7


@pytest.mark.parametrize("call", ["decline", "record"])
def test_an_attribute_that_is_not_there_is_a_decline_with_the_place_and_the_version(call: str) -> None:
    adapter, model = Adapter(), object()
    calls = {"decline": lambda: adapter.decline(model), "record": lambda: record_program(adapter, model, None)}
    found = call_adapter(adapter, calls[call])
    assert isinstance(found, Decline)
    assert found.reason == FAILED
    attribute = {"decline": "scaling", "record": "input_norm"}[call]
    place = "at tests/vllm_plugin/step/test_failures.py"
    assert f"Adapter: AttributeError: 'object' object has no attribute '{attribute}', {place}:" in found.detail
    assert found.detail.endswith(f"; vLLM {get_version()}")


def test_a_breach_of_the_contract_is_an_error_for_developers_and_a_decline_in_serving() -> None:
    with pytest.raises(ProgramError, match="must return one Value, not 7"):
        record_program(Breach(), object(), None)
    found = call_adapter(Breach(), lambda: record_program(Breach(), object(), None))
    assert isinstance(found, Decline)
    assert "must return one Value, not 7" in found.detail


def test_what_an_adapter_returns_or_declines_is_passed_on() -> None:
    def decline() -> None:
        raise DeclineError("no", "7")

    assert call_adapter(Adapter(), lambda: 7) == 7
    assert call_adapter(Adapter(), decline) == Decline("no", "7")


def test_errors_are_described_alike_on_all_ranks_and_with_their_op() -> None:
    error = TypeError("<object at 0x7f12ab34>\n  is odd")
    error.add_note("while running op 'mlp'")
    assert describe_error(error) == "TypeError: <object at 0x...> is odd; while running op 'mlp'"


def test_one_rank_declines_for_its_own_error() -> None:
    def fail() -> int:
        raise KeyError("scale")

    assert attempt(ALONE, "job", lambda: 7) == 7
    assert attempt(ALONE, "job", fail) == Decline(FAILED_STEP, f"KeyError: 'scale'; vLLM {get_version()}")


def attempt_as(rank: int, address: str, outcomes: list[str], times: int = 1) -> list[Any]:
    """Attempt a job that ends as *outcomes* says of each rank [ranks]; return what comes of it each time."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    group: Any = SimpleNamespace(world_size=2, rank_in_group=rank, ranks=[0, 1])

    def job() -> str:
        if outcomes[rank] == "fails":
            raise AttributeError(f"no norm on rank {rank}")
        if outcomes[rank] == "waits":
            dist.all_reduce(torch.ones(1))
        return outcomes[rank]

    found: list[Any] = []
    for _ in range(times):
        start = time.monotonic()
        try:
            result = attempt(group, "job", job, PATIENCE)
            found.append(str(result))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found.append(f"raised after {time.monotonic() - start >= PATIENCE}: {error}")
    return found


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (["ends", "ends"], "ends"),
        (["fails", "fails"], "AttributeError: no norm on rank 0"),
        (["ends", "fails"], "AttributeError: no norm on rank 1"),
    ],
)
def test_all_ranks_decline_if_all_have_come_to_the_end_and_one_has_failed(
    outcomes: list[str], said: str, engines: Engines, tmp_path: Any
) -> None:
    expected = said if said == "ends" else str(Decline(FAILED_STEP, f"{said}; vLLM {get_version()}"))
    assert engines.run(2, attempt_as, f"file://{tmp_path}/store", outcomes, 2) == [[expected] * 2] * 2


@pytest.mark.vllm
def test_a_rank_that_fails_while_another_waits_for_it_raises_its_error(engines: Engines, tmp_path: Any) -> None:
    alone, waiting = engines.run(2, attempt_as, f"file://{tmp_path}/store", ["fails", "waits"])
    assert alone == ["raised after True: no norm on rank 0"]
    assert len(waiting) == 1
