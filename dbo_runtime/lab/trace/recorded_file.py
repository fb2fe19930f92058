"""Read recorded steps from a trace of this package, or from a torch profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.trace.profiles.events import keep_fields
from dbo_runtime.lab.trace.profiles.profile_file import Profile, make_profile
from dbo_runtime.lab.trace.trace_file import read_trace
from dbo_runtime.outside_files import parse_json, read_text

MAX_PROFILE_BYTES = 1 << 29  # unpacked: about two million events
MAX_PROFILE_CONTAINERS = 1 << 23  # most are dropped while reading
MAX_PROFILE_VALUES = 1 << 25


def read_recorded(path: str | Path) -> Profile:
    """Return the steps in a file. A trace of this package is one step with an empty name.

    Raises:
        ConfigError: the file cannot be read, or is neither. The message names file and field.
    """
    text = read_text(path, "trace", MAX_PROFILE_BYTES, unpacks=True)
    try:
        content = parse_json(text, MAX_PROFILE_CONTAINERS, MAX_PROFILE_VALUES, keep_fields)
        del text
        if not _is_own(content):
            return make_profile(content)
    except ConfigError as error:
        raise ConfigError(
            f"{str(path)!r} is neither a trace of dbo_runtime nor a profile of torch's profiler: {error} Name a file "
            "that DBO_TRACE, `plan --trace` or vLLM's /start_profile wrote."
        ) from error
    return Profile({"": read_trace(path)}, ())  # reads it again, within the limits of a trace


def _is_own(content: Any) -> bool:
    other = content.get("otherData") if type(content) is dict else None
    return type(other) is dict and "bound_seconds" in other
