"""What the plugin does when vLLM starts: shown in fresh processes, with vLLM's own plugin loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dbo_runtime.config import ENABLE

pytestmark = pytest.mark.vllm  # each starts it in a process of its own

# Loads plugins as vLLM does, once for each of some environments, and tells what became of each.
LOADER = """
import json, os, sys
import vllm.plugins
from vllm.v1.worker.worker_base import WorkerWrapperBase

outcomes = []
for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    vllm.plugins.plugins_loaded = False
    outcome = {"error": None, "message": ""}
    try:
        vllm.plugins.load_general_plugins()
    except Exception as error:
        outcome = {"error": type(error).__name__, "message": str(error)}
    init_device = WorkerWrapperBase.init_device
    outcome["untouched"] = init_device.__code__.co_filename == sys.modules[WorkerWrapperBase.__module__].__file__
    outcomes.append(outcome)
    for variable in variables:
        del os.environ[variable]
print(json.dumps(outcomes))
"""


def run_fresh(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process with only these of vLLM's and our variables: other tests' engines set some here."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "DBO_"))}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stderr
    return done


def load_in_each(environments: dict[str, dict[str, str]]) -> dict[str, dict[str, Any]]:
    """Load vLLM's plugins in each of these environments, and return what became of it."""
    done = run_fresh(LOADER, json.dumps(list(environments.values())), VLLM_LOGGING_LEVEL="ERROR")
    return dict(zip(environments, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_where_the_variable_is_not_set_it_imports_nothing() -> None:
    code = (
        "import sys; from dbo_runtime.vllm_plugin.register import register; register()\n"
        "print([name for name in ('vllm', 'torch', 'structlog', 'numpy') if name in sys.modules])"
    )
    assert run_fresh(code).stdout.strip() == "[]"


def test_other_settings_are_not_even_read_while_it_is_off() -> None:
    """A DBO_ variable of somebody else must not stop a vLLM that does not use this plugin."""
    run_fresh("from dbo_runtime.vllm_plugin.register import register; register()", DBO_MODE="sometimes", DBO_TYPO="1")


VALIDATE = """
def validate_environ():
    from vllm import envs, platforms
    validate = getattr(envs, "validate_environ", None)  # up to vLLM 0.30
    (validate or platforms.current_platform.validate_environ)(True)
"""


@pytest.mark.slow
def test_turned_off_it_only_makes_the_variable_known_to_vllm() -> None:
    code = """
import sys, vllm.plugins, vllm.envs
vllm.plugins.load_general_plugins()
validate_environ()
print(vllm.envs.VLLM_ASCEND_ENABLE_DBO)
print([name for name in sys.modules if name in ("structlog", "dbo_runtime.vllm_plugin.install.worker_hooks")])
"""
    assert run_fresh(VALIDATE + code, **{ENABLE: "0"}).stdout.splitlines()[-2:] == ["0", "[]"]


UNTOUCHED = {
    "unset": {},
    "0": {ENABLE: "0"},
    "0 by the second name": {"DBO_ENABLE": "0"},
    "another plugin is asked for": {ENABLE: "1", "VLLM_PLUGINS": "other"},
}

BAD = {
    "DBO_ENABLE=0": (f"{ENABLE}=1 and DBO_ENABLE=0 contradict each other",),
    f"{ENABLE}=yes": (f"{ENABLE}='yes' is not allowed", "it takes 0 or 1"),
    "DBO_MODE=sometimes": ("DBO_MODE='sometimes' is not allowed", "it takes auto, always or off"),
    "DBO_MICRO_BATCHES=1": ("DBO_MICRO_BATCHES='1' is not allowed", "it takes auto, or a whole number, at least 2"),
    "DBO_TYPO=1": ("DBO_TYPO is not a setting", "Correct or unset it."),
    "DBO_MIN_TOKEN=8": ("DBO_MIN_TOKEN is not a setting", "did you mean DBO_MIN_TOKENS?"),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """Return what became of the plugin in each environment, of one process: importing vLLM takes all the time.

    The last one turns it on, and its hooks stay.
    """
    bad = {case: {ENABLE: "1", **dict([case.split("=")])} for case in BAD}
    return load_in_each({**UNTOUCHED, **bad, "second name": {"DBO_ENABLE": "1"}})


@pytest.mark.parametrize("case", UNTOUCHED)
def test_vllm_is_left_as_it_is_unless_the_plugin_is_turned_on(case: str, outcomes: dict[str, dict[str, Any]]) -> None:
    assert outcomes[case] == {"error": None, "message": "", "untouched": True}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_setting_stops_vllms_start_and_says_what_is_allowed(case: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[case]["error"] == "ConfigError"
    assert outcomes[case]["untouched"]
    for part in BAD[case]:
        assert part in outcomes[case]["message"]


def test_turned_on_by_the_second_name_the_hooks_are_installed(outcomes: dict[str, dict[str, Any]]) -> None:
    assert (outcomes["second name"]["error"], outcomes["second name"]["untouched"]) == (None, False)


def test_turned_on_the_hooks_are_installed_once_and_vllm_knows_the_variable() -> None:
    code = """
import vllm.plugins
from vllm import envs
from vllm.v1.worker.worker_base import WorkerWrapperBase
from dbo_runtime.vllm_plugin.register import register

original = WorkerWrapperBase.init_device
vllm.plugins.load_general_plugins()
installed = WorkerWrapperBase.init_device
register()
register()
validate_environ()
print(installed is not original, installed.__wrapped__ is original, WorkerWrapperBase.init_device is installed)
print(envs.VLLM_ASCEND_ENABLE_DBO)
"""
    assert run_fresh(VALIDATE + code, **{ENABLE: "1"}).stdout.splitlines()[-2:] == ["True True True", "1"]


@pytest.mark.slow
def test_an_unsupported_version_of_vllm_is_told_of_and_left_as_it_is() -> None:
    code = """
import sys, vllm
vllm.__version__ = "0.99.1"
vllm.plugins.load_general_plugins()
validate_environ()
print("vllm.v1.worker.worker_base" in sys.modules)
"""
    done = run_fresh(f"import vllm.plugins, vllm.envs\n{VALIDATE}{code}", **{ENABLE: "1"})
    assert done.stdout.splitlines()[-1] == "False"  # what would be wrapped is not even loaded
    lines = [line for line in done.stderr.splitlines() if "[dbo_runtime]" in line]
    assert len(lines) == 1
    assert lines[0].startswith("WARNING ")
    reason = "every step runs unsplit  reason=this version of vLLM is not supported by dbo_runtime  detail=0.99.1; "
    assert reason in lines[0]
