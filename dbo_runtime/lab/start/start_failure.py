"""What vLLM says when it does not start: its own last message out of a long log, and what helps. Read in 0.23 to 0.33.

The wording of a message may change with vLLM. Then the message is still shown, only without a remedy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dbo_runtime.outside_files import suggest_folder

MAX_CHARACTERS = 400  # characters of vLLM's message
# A line of a log that names an error: vLLM puts the process, the time and the place before it.
_ERROR = re.compile(
    r"^(?:\([^)]*\) *)?(?:ERROR [^\]]*\] *)?(?P<type>[A-Za-z_][\w.]*(?:Error|Exception))(?:: (?P<text>.*))?$"
)
_DETAIL = re.compile(r"^ +(?:Value error, )?(?P<text>\S.*?)(?: \[type=.*)?$")
# Messages that only say that another process has failed; the reason is further up.
_ELSEWHERE = re.compile(
    r"initialization failed|root cause above|background process|EngineDeadError|EngineCore encountered"
)
_REMEDIES = (
    (
        re.compile(r"NUMA nodes? to bind|OMP_THREADS_BIND", re.IGNORECASE),
        'Set VLLM_CPU_OMP_THREADS_BIND to the cores of each rank, such as "0|1" for two ranks, or to nobind.',
    ),
    (
        re.compile(r"memory utilization|memory for the cache blocks|KV cache is needed", re.IGNORECASE),
        "Say how much the KV cache may take: --kv-cache-memory-bytes 134217728 is enough for a tiny model.",
    ),
    (
        re.compile(r"gloo|connectFullMesh", re.IGNORECASE),
        "Set VLLM_HOST_IP and GLOO_SOCKET_IFNAME to this host's address and network interface.",
    ),
    (
        re.compile(r"divisible by tensor parallel size", re.IGNORECASE),
        "Choose a --tensor-parallel-size that divides the number of heads.",
    ),
    (
        re.compile(r"max_model_len .*is greater than the derived max_model_len"),
        "Lower --max-model-len to the model's own maximum, or leave it out.",
    ),
)


def describe_failure(model: str, log: str, error: BaseException) -> str:
    """Return vLLM's own message and a remedy, if one is known, as one line.

    Args:
        model: directory or name of the model that vLLM was started with.
        log: everything that vLLM and its processes printed, tracebacks included.
        error: the error that vLLM raised in this process, or one that says how another process ended.
    """
    text = list_problems(error)
    cause = find_cause(f"{log}\n{type(error).__name__}: {text}") or text.partition("\n")[0]
    return f"vLLM fails: {_shorten(cause)} {find_remedy(model, cause)}".rstrip()


def find_cause(log: str) -> str:
    """Return the last error in a log that is not only about another error; empty if there is none."""
    lines = log.splitlines()
    found = ""
    for number, line in enumerate(lines):
        match = _ERROR.match(line)
        if match is None or _ELSEWHERE.search(line):
            continue
        text = match["text"] or match["type"]
        if re.search(r"validation errors? for \w+$", text):  # pydantic's, with what is wrong below
            text = _find_detail(lines[number + 1 :]) or text
        found = text
    return found


def _find_detail(lines: Sequence[str]) -> str:
    """Return what is wrong: the first indented line, after the name of the field that is on the line before, if any."""
    for before, line in pairwise(("", *lines)):
        match = _DETAIL.match(line)
        if match:
            return f"{before}: {match['text']}" if re.fullmatch(r"[\w.]+", before) else match["text"]
    return ""


def _shorten(text: str) -> str:
    """Return the text on one line. If it is long, end it after the last whole sentence, or else in the middle."""
    short = " ".join(text.split())
    if len(short) <= MAX_CHARACTERS:
        return f"{short.rstrip('.')}."
    sentences, end, _ = short[:MAX_CHARACTERS].rpartition(". ")
    return f"{sentences}." if end else f"{short[:MAX_CHARACTERS].rpartition(' ')[0]} ..."


def find_remedy(model: str, cause: str) -> str:
    """Return what helps against a message of vLLM's, as a sentence; empty if nothing is known to help."""
    remedy = next((remedy for pattern, remedy in _REMEDIES if pattern.search(cause)), "")
    if remedy or os.path.isdir(model):
        return remedy
    close = suggest_folder(model)
    return f"There is no folder {model}{f'; did you mean {close}?' if close else '. Name the folder of a model.'}"


def list_problems(error: BaseException) -> str:
    """Return the text of an error; of pydantic's, what each field has to say."""
    problems = error.errors() if hasattr(error, "errors") else ()
    return "; ".join(map(_describe_problem, problems)) or str(error)


def _describe_problem(problem: Mapping[str, Any]) -> str:
    name, text = ".".join(map(str, problem["loc"])), problem["msg"].removeprefix("Value error, ")
    return f"{name}: {text}" if name else text
