"""Workers of Ray: vLLM's own wrapper of them loads the plug-in, and has the settings that the driver copies.

vLLM's CPU platform refuses Ray, and Ray itself is not installed here: of its package only the names are there that
vLLM's module imports. What runs is vLLM's: the choice of variables, and the wrapper that a Ray actor is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "tiny-deepseek"
SETTINGS = {"VLLM_ASCEND_ENABLE_DBO": "1", "DBO_MODE": "always", "DBO_MIN_TOKENS": "77"}

DRIVER = """
import json, os, pickle, sys
from vllm.plugins import load_general_plugins
from vllm.ray.ray_env import get_env_vars_to_copy
from dbo_runtime.lab.start.arguments import make_config

load_general_plugins()  # as the engine does, before it has an executor
model, file = sys.argv[1:]
with open(file, "wb") as config:
    options = ["--dtype=float32", "--attention-backend=CPU_MLA", "--enforce-eager", "--gpu-memory-utilization=0.2"]
    pickle.dump(make_config([model, *options]), config)
print("copied:" + json.dumps({name: os.environ[name] for name in get_env_vars_to_copy() if name in os.environ}))
"""

WORKER = """
import json, pickle, sys
from types import ModuleType

def add(name, **content):
    sys.modules[name] = ModuleType(name)
    vars(sys.modules[name]).update(content)

add("ray")
add("ray.util", placement_group_table=None)
add("ray.util.placement_group", PlacementGroup=object)
add("ray._private")
add("ray._private.state", available_resources_per_node=None)

from vllm.utils.network_utils import get_distributed_init_method, get_open_port
from vllm.v1.executor.ray_utils import RayWorkerWrapper

variables, file = json.loads(sys.argv[1]), sys.argv[2]
wrapper = RayWorkerWrapper(rpc_rank=0)
wrapper.execute_method("update_environment_variables", [variables])
with open(file, "rb") as config:
    vllm_config = pickle.load(config)
method = get_distributed_init_method("127.0.0.1", get_open_port())
arguments = {"vllm_config": vllm_config, "local_rank": 0, "rank": 0, "distributed_init_method": method,
             "is_driver_worker": True}
wrapper.execute_method("init_worker", [arguments])
wrapper.execute_method("init_device")
wrapper.execute_method("load_model")
forward = wrapper.worker.model_runner.get_model().forward
config = forward.runtime.config
print("served:" + json.dumps([type(forward).__name__, config.mode, config.min_tokens]))
"""


def run_script(script: str, *arguments: str, **settings: str) -> str:
    """Run a script where no settings of ours are but *settings*; return what it printed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("DBO_", "VLLM_"))}
    environment = {**own, "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", **settings}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.vllm
def test_a_ray_worker_splits_by_the_settings_of_the_driver(tmp_path: Path) -> None:
    file = str(tmp_path / "config")
    copied = json.loads(run_script(DRIVER, str(MODEL), file, **SETTINGS).rpartition("copied:")[2])
    assert copied.items() >= SETTINGS.items()
    variables = {**copied, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    printed = run_script(WORKER, json.dumps(variables), file)
    assert json.loads(printed.rpartition("served:")[2]) == ["SplitForward", "always", 77]
    copied.pop("VLLM_ASCEND_ENABLE_DBO")
    with pytest.raises(AssertionError, match="has no attribute 'runtime'"):
        run_script(WORKER, json.dumps({**copied, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}), file)
