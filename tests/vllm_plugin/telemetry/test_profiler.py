"""vLLM's own profiler shows the ops of split steps, those on the threads of lanes, too."""

from __future__ import annotations

from pathlib import Path
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


def make_wrapper(folder: Path) -> Any:
    """Return vLLM's wrapper of a profiler of the host."""
    from vllm.config import ProfilerConfig
    from vllm.profiler.wrapper import TorchProfilerWrapper

    config = ProfilerConfig(profiler="torch", torch_profiler_dir=str(folder))
    return TorchProfilerWrapper(config, worker_name="rank0", local_rank=0, activities=["CPU"])


def start(wrapper: Any) -> Any:
    """Start and stop the profiler; return the options that it had."""
    profile_all_threads()
    profile_all_threads()  # a second worker in this process
    wrapper.start()
    wrapper.stop()
    return wrapper.profiler.experimental_config


def test_every_start_records_all_threads(tmp_path: Path) -> None:
    wrapper = make_wrapper(tmp_path)
    assert start(wrapper) is not None
    assert start(wrapper) is not None


def test_a_profiler_that_is_configured_already_stays_as_it_is(tmp_path: Path) -> None:
    wrapper = make_wrapper(tmp_path)
    own = torch._C._profiler._ExperimentalConfig()
    if hasattr(wrapper, "_profiler_kwargs"):  # from vLLM 0.32 on
        wrapper._profiler_kwargs["experimental_config"] = own
    else:
        wrapper.profiler.experimental_config = own
    assert start(wrapper) is own


def test_a_torch_that_cannot_record_all_threads_records_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._profiler, "_ExperimentalConfig", lambda: None)  # takes no such option
    assert start(make_wrapper(tmp_path)) is None
