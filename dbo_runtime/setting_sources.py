"""Settings from elsewhere than the whole environment: the switch, changes to a server, options of a command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbo_runtime.config import PREFIX, SWITCHES, RuntimeConfig, list_variables, parse_value, read_environment
from dbo_runtime.errors import ConfigError


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Return whether overlap is turned on, by either name. Reads no other setting.

    Raises:
        ConfigError: a variable is neither 0 nor 1, or the two contradict each other.
    """
    return read_environment({name: environ[name] for name in SWITCHES if name in environ}).enabled


def make_switch(is_on: bool) -> dict[str, str]:
    """Return the variables that turn overlap on or off in a process, whatever those say that it inherits."""
    return dict.fromkeys(SWITCHES, str(int(is_on)))


def reread_environment(environ: Mapping[str, str], changes: Mapping[str, str]) -> RuntimeConfig:
    """Read the settings of a running server again, with *changes* on top.

    Raises:
        ConfigError: a change is unknown, not allowed, or concerns a setting that is read at start only.
    """
    config = read_environment({**environ, **changes})
    known = list_variables()
    refused = [variable for variable in known if variable in changes and known[variable].metadata["read"] == "at start"]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: read at start only, so a running server cannot change it. Set it in the server's "
            "environment and start again."
        )
    return config


def read_options(options: Mapping[str, str]) -> RuntimeConfig:
    """Read settings that a command takes as options, such as `{"--micro-batches": "2"}` for DBO_MICRO_BATCHES.

    Raises:
        ConfigError: a value is not allowed. The message names the option.
    """
    known = list_variables()
    settings = {option: known[PREFIX + option.lstrip("-").replace("-", "_").upper()] for option in options}
    values: dict[str, Any] = {
        each.name: parse_value(each, option, options[option]) for option, each in settings.items()
    }
    return RuntimeConfig(**values)
