"""vLLM's own profiler shows the ops of split steps, those on the threads of lanes, too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dbo_runtime.lab.trace.recorded_file import read_recorded
from dbo_runtime.observe.ranges import name_ops
from tests.support.vllm.engine import make_prompt
from tests.support.vllm.engines import Engines

torch = pytest.importorskip("torch")

from dbo_runtime.vllm_plugin.api.profiler import profile_all_threads  # noqa: E402 - it needs torch


def test_vllms_profiler_shows_each_op_of_a_split_step(engines: Engines, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "profiler": "torch",
        "torch_profiler_dir": str(tmp_path),
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }
    engine = engines.get(1, "nobind", profiler_config=options)
    prompts = [make_prompt(40, seed) for seed in range(2)]
    before = engine.generate(prompts)
    engine.llm.llm_engine.reset_prefix_cache()
    engine.llm.start_profile()
    profiled = engine.generate(prompts)
    engine.llm.stop_profile()
    assert [answer.tokens for answer in profiled] == [answer.tokens for answer in before]
    served = engine.runner.get_model().forward
    (schedule,) = {executor.schedule for executor in _list_executors(served.runtime)}
    (file,) = tmp_path.glob("*.json.gz")
    (steps,) = read_recorded(file).steps.values()
    (timeline,) = steps.values()
    shown = {f"{span.op}/{span.micro_batch}": span.lane for span in timeline.spans}
    assert shown == {instruction.label: instruction.op.lane for instruction in schedule.instructions}
    assert len(timeline.spans) == len(name_ops(schedule))
    assert {*shown.values()} == {"compute", "comm"}


def _list_executors(runtime: Any) -> list[Any]:
    return list(runtime._executors._executors.values())


def test_a_profiler_that_is_configured_already_stays_as_it_is() -> None:
    plain, configured = torch.profiler.profile(), torch.profiler.profile()
    configured.experimental_config = own = torch._C._profiler._ExperimentalConfig()
    assert profile_all_threads(SimpleNamespace(profiler=SimpleNamespace(profiler=plain)))  # type: ignore[arg-type]
    assert plain.experimental_config is not None
    assert not profile_all_threads(SimpleNamespace(profiler=SimpleNamespace(profiler=configured)))  # type: ignore[arg-type]
    assert configured.experimental_config is own
    for worker in (SimpleNamespace(), SimpleNamespace(profiler=None), SimpleNamespace(profiler=SimpleNamespace())):
        assert not profile_all_threads(worker)  # type: ignore[arg-type]


def test_a_torch_that_cannot_record_all_threads_records_one(monkeypatch: pytest.MonkeyPatch) -> None:
    profiler = torch.profiler.profile()
    monkeypatch.setattr(torch._C._profiler, "_ExperimentalConfig", lambda: None)  # takes no such option
    assert not profile_all_threads(SimpleNamespace(profiler=SimpleNamespace(profiler=profiler)))  # type: ignore[arg-type]
    assert profiler.experimental_config is None
