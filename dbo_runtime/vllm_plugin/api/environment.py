"""Environment variables that vLLM and Ray must know or pass on. Read against vLLM 0.23.0 to 0.33.0."""

from __future__ import annotations

import os

from dbo_runtime.config import ENABLE, PREFIX

RAY_PREFIXES_VARIABLE = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"


def announce_variable() -> None:
    """Register our variable with vLLM, which otherwise warns of it, or refuses it with --fail-on-environ-validation."""
    from vllm import envs

    envs.environment_variables.setdefault(ENABLE, lambda: os.environ.get(ENABLE, "0"))


def pass_settings_on() -> None:
    """Let Ray pass our settings to its workers: vLLM makes it copy only variables with known prefixes."""
    prefixes = [part for part in os.environ.get(RAY_PREFIXES_VARIABLE, "").split(",") if part]
    if PREFIX not in prefixes:
        os.environ[RAY_PREFIXES_VARIABLE] = ",".join([*prefixes, PREFIX])
