"""Check a model folder by its config.json, without its weights: whether the model has an adapter."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbo_runtime.adapters.contract import ModelAdapter, name_adapter
from dbo_runtime.adapters.registry import get_backbone_adapter, name_backbones
from dbo_runtime.errors import ConfigError, ProgramError
from dbo_runtime.lab.doctor.finding import Finding
from dbo_runtime.lab.doctor.packages import get_version, read_source
from dbo_runtime.lab.doctor.probe_process import run_probe
from dbo_runtime.outside_files import parse_json, read_text, suggest_folder
from dbo_runtime.vllm_plugin.api.known import MODEL_REGISTRY, MOE_METHODS

CONFIG = "config.json"


def check_model(folder: str, generic: bool = False, environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check whether the model in *folder* can be split, as far as this is known before loading.

    Args:
        folder: the model's folder.
        generic: whether models without an adapter are split, too (`DBO_GENERIC`).
        environ: the server's environment, used to ask an installed vLLM for the classes of models.
    """
    try:
        config = _read_config(Path(folder))
        architectures = _list_architectures(config, Path(folder))
    except ConfigError as error:
        return [Finding("model", "fail", str(error), "name the folder of a model, as for `vllm serve`")]
    return [_check_adapters(architectures, generic, environ), *_check_quantization(config)]


def _check_adapters(architectures: list[str], generic: bool, environ: Mapping[str, str]) -> Finding:
    adapters: list[ModelAdapter | None] = []
    try:
        adapters = [_find_adapter(name, environ) for name in architectures]
    except ProgramError as error:
        return Finding("model", "fail", str(error), "repair or uninstall that adapter")
    names = ", ".join(architectures)
    if adapters == [None] * len(adapters):
        if generic:
            return _check_generic(names)
        remedy = f"`dbo adapter new {architectures[0]}` drafts one: docs/write-an-adapter.md; or set DBO_GENERIC=1"
        return Finding("model", "fail", f"no adapter is registered for {names}", remedy)
    found = ", ".join(name_adapter(adapter) for adapter in adapters if adapter)
    if len(architectures) > 1:
        note = f"config.json names several architectures ({names}); vLLM takes the first it knows. Adapters: {found}"
        return Finding("model", "ok" if None not in adapters else "warn", note)
    note = f"{names}, split by {found}; whether this configuration can be split is checked when it is loaded"
    return Finding("model", "ok", note)


def _find_adapter(architecture: str, environ: Mapping[str, str]) -> ModelAdapter | None:
    """Return the adapter that serving would use: by architecture name, or by the vLLM class that serves it.

    Asking vLLM takes seconds, so only architectures in its registry are looked up.
    """
    adapter = get_backbone_adapter(architecture)
    registry = "" if adapter is not None else read_source("vllm", MODEL_REGISTRY)
    if not any(f'"{name}"' in registry for name in name_backbones(architecture)):
        return adapter
    return get_backbone_adapter(architecture, run_probe("classes", environ, architecture).get("classes", ()))


def _check_generic(names: str) -> Finding:
    found = f"no adapter is registered for {names}; DBO_GENERIC=1 splits its own forward at the all-reduces"
    if get_version("greenlet") is None:
        return Finding("model", "fail", found, "pip install 'dbo-runtime[generic]', which DBO_GENERIC needs")
    return Finding("model", "ok", f"{found} (experimental), where there are several tensor parallel ranks")


def _check_quantization(config: dict[str, Any]) -> list[Finding]:
    declared = config.get("quantization_config")
    if not declared:
        return []
    method = declared.get("quant_method", "unknown") if isinstance(declared, dict) else declared
    found = (
        f"{method!s:.100}; where tokens are dispatched to experts on other ranks, experts with another method than "
        f"{', '.join(MOE_METHODS)} cannot be decomposed, and every step runs unsplit"
    )
    remedy = "nothing under tensor parallel alone, nor with vllm-ascend; otherwise serve weights that are not quantized"
    return [Finding("quantization", "warn", found, remedy)]


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not os.path.isdir(folder):
        close = suggest_folder(folder)
        raise ConfigError(f"{folder} is not a folder{f'; did you mean {close}?' if close else ''}")
    if not os.path.exists(path):
        raise ConfigError(f"{folder} has no {CONFIG}")
    text = read_text(path, "configuration")
    try:
        config = parse_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object")
    return config


def _list_architectures(config: dict[str, Any], folder: Path) -> list[str]:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not all(isinstance(n, str) for n in architectures):
        raise ConfigError(f"{folder / CONFIG} names no architectures, but {reprlib.repr(architectures)}")
    return architectures
