"""How each vLLM version is treated. These functions need only the version, so the doctor calls them without vLLM."""

from __future__ import annotations

import re
from enum import Enum

from dbo_runtime.vllm_plugin.api.known import TESTED_VLLM_VERSIONS, VLLM_WINDOW


class Standing(Enum):
    """The treatment of a vLLM version."""

    TESTED = "steps are split"
    UNTESTED = "steps are split, and the first of each kind compared with unsplit ones"
    OUTSIDE = "every step runs unsplit"


def classify_version(version: str) -> Standing:
    """Return the standing of a version such as `0.30.0+cpu` or `0.31.0rc1.dev5`; OUTSIDE for an unreadable one."""
    release = parse_release(version)[:2]
    if release in TESTED_VLLM_VERSIONS:
        return Standing.TESTED
    oldest, end = VLLM_WINDOW
    return Standing.UNTESTED if oldest <= release < end else Standing.OUTSIDE


def describe_tested() -> str:
    """Return the tested versions as text for messages."""
    return ", ".join(f"{major}.{minor}.x" for major, minor in TESTED_VLLM_VERSIONS)


def describe_window() -> str:
    """Return the window in pip's notation."""
    return ">={}.{},<{}.{}".format(*VLLM_WINDOW[0], *VLLM_WINDOW[1])


def parse_release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as (2, 10, 0) for `2.10.0.post4`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()
