"""The entry point that vLLM calls in each of its processes: early, repeatedly, and with overlap on or off."""

from __future__ import annotations

import os

from dbo_runtime.config import SWITCHES, read_environment
from dbo_runtime.setting_sources import is_enabled


def register() -> None:
    """Install the hooks if `VLLM_ASCEND_ENABLE_DBO=1` or `DBO_ENABLE=1`; otherwise import nothing heavy.

    Imports are late for that reason, and ordered: a module of the plugin may rely on names of a known vLLM version
    only.

    Raises:
        ConfigError: a setting is not allowed, or the folder for traces cannot be written to. It ends vLLM's start, so
            that the user sees it.
    """
    if not any(name in os.environ for name in SWITCHES):
        return
    from dbo_runtime.vllm_plugin.api.environment import announce_variable, pass_settings_on

    announce_variable()
    if not is_enabled(os.environ):
        return
    config = read_environment(os.environ)
    from dbo_runtime.observe.declines import warn_declined
    from dbo_runtime.observe.logs import open_log
    from dbo_runtime.observe.trace import prepare_folder
    from dbo_runtime.vllm_plugin.api.versions import check_version
    from dbo_runtime.vllm_plugin.telemetry.metrics import open_folder

    if config.trace:
        prepare_folder(config.trace)
    open_folder()
    pass_settings_on()
    unknown = check_version()
    if unknown is not None:
        warn_declined(open_log(), "every step", unknown)
        return
    from dbo_runtime.vllm_plugin.install.worker_hooks import install

    install()
