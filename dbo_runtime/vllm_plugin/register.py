"""The entry point that vLLM calls in every process it starts: often, early, and whether or not anyone wants DBO."""

from __future__ import annotations

import os

from dbo_runtime.config import ENABLE, is_enabled, read_environment


def register() -> None:
    """Install the hooks if `VLLM_ASCEND_ENABLE_DBO=1`; otherwise do nothing, and import nothing heavy to do it.

    Raises:
        ConfigError: for a setting that is not allowed, or a folder for traces that cannot be written to. It stops
            vLLM's start, which is what the user needs to see.
    """
    if ENABLE not in os.environ:
        return
    from dbo_runtime.vllm_plugin.api.environment import announce_variable

    announce_variable()
    if not is_enabled(os.environ):
        return
    config = read_environment(os.environ)
    from dbo_runtime.observe.trace import prepare_folder
    from dbo_runtime.vllm_plugin.install.worker_hooks import install
    from dbo_runtime.vllm_plugin.telemetry.metrics import open_folder

    if config.trace:
        prepare_folder(config.trace)
    open_folder()
    install()
