"""The core needs neither torch nor vLLM: shown in fresh processes in which they cannot be imported."""

from __future__ import annotations

import ast
import doctest
import os
import subprocess
import sys
from pathlib import Path

import dbo_runtime
import dbo_runtime.ir.program

ROOT = Path(dbo_runtime.__file__).parent
FOREIGN = ("torch", "torch_npu", "vllm", "vllm_ascend", "matplotlib")
NOT_CORE = ("__init__", "dispatch", "fit", "testing")  # which need torch.distributed, numpy, and vLLM
CORE = [
    "dbo_runtime",
    *(f"dbo_runtime.{path.stem}" for path in sorted(ROOT.glob("*.py")) if path.stem not in NOT_CORE),
    *(
        f"dbo_runtime.{room}.{path.stem}"
        for room in ("adapters", "ir", "engine")
        for path in sorted(ROOT.glob(f"{room}/*.py"))
        if path.stem not in NOT_CORE
    ),
    "dbo_runtime.devices",
    "dbo_runtime.devices.cpu",
    "dbo_runtime.devices.event_loop",
    "dbo_runtime.devices.virtual",
    "dbo_runtime.lab.simulate.multi_rank_simulator",
    "dbo_runtime.devices.serial",
    "dbo_runtime.observe",
    *(f"dbo_runtime.observe.{path.stem}" for path in sorted(ROOT.glob("observe/*.py")) if path.stem not in NOT_CORE),
    "dbo_runtime.planner",
    *(
        f"dbo_runtime.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
        for pattern in ("planner/*/*.py", "lab/doctor/*.py")
        for path in sorted(ROOT.glob(pattern))
        if path.stem not in NOT_CORE
    ),
    "dbo_runtime.vllm_plugin.api.known",
    "dbo_runtime.vllm_plugin.api.kv_connectors",
    *(f"dbo_runtime.vllm_plugin.platforms.{name}" for name in ("registry", "cpu", "cuda", "npu")),
    "dbo_models.toy",
    "dbo_models.collectives",
    "dbo_models.experts",
    "dbo_models.layers",
    "dbo_models.deepseek",
    "dbo_models.dense",
    "dbo_models.moe",
]


def run_fresh(code: str) -> str:
    """Run code in a process of its own and return what it prints."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_of_the_core_imports_where_nothing_foreign_can_be() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in FOREIGN)
    assert {"dbo_runtime.engine.runtime", "dbo_runtime.planner.online.planner", "dbo_runtime.observe.timeline"} <= set(
        CORE
    )
    run_fresh(f"import sys; {blocked}import {', '.join(CORE)}")


def test_importing_dbo_runtime_pulls_in_nothing_foreign() -> None:
    names = (*FOREIGN, "numpy")
    printed = run_fresh(f"import sys, dbo_runtime; print([name for name in {names} if name in sys.modules])")
    assert printed == "[]"


def test_planning_and_running_on_threads_works_where_nothing_foreign_can_be_imported() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in FOREIGN)
    code = f"""
import sys; {blocked}
from dbo_models.toy import ToyAdapter, ToyCollectives, ToyModel
from dbo_runtime.adapters.contract import record_program
from dbo_runtime.batch import Batch
from dbo_runtime.config import RuntimeConfig
from dbo_runtime.devices import open_device
from dbo_runtime.observe.logs import open_log
from dbo_runtime.engine.runtime import MicroBatchRuntime

program = record_program(ToyAdapter(), ToyModel(2), ToyCollectives())
runtime = MicroBatchRuntime(program, open_device("cpu"), RuntimeConfig(), open_log())
print(len(runtime.run(runtime.plan(Batch((512,), 512)), [(1, 0), (2, 1)])))
runtime.close()
"""
    assert run_fresh(code) == "2"


def test_private_names_of_vllm_are_imported_in_api_and_platforms_only() -> None:
    plugin = ROOT / "vllm_plugin"
    rooms = {path: path.relative_to(plugin).parts[0] for path in plugin.rglob("*.py")}
    found = {
        (room, alias.name)
        for path, room in rooms.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("vllm", "vllm_ascend")
        for alias in node.names
        if alias.name.startswith("_") and room not in ("api", "platforms")
    }
    assert found == set()


def test_every_public_name_is_there() -> None:
    assert dbo_runtime.__all__ == sorted(dbo_runtime.__all__)
    assert all(hasattr(dbo_runtime, name) for name in dbo_runtime.__all__)


def test_the_examples_in_the_programs_docstrings_hold() -> None:
    failed, attempted = doctest.testmod(dbo_runtime.ir.program)
    assert attempted > 0
    assert failed == 0
