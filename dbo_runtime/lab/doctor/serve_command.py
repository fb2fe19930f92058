"""Check a serve command: how vLLM would interpret it, which steps would be split, and what prevents splitting."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.doctor.finding import Finding
from dbo_runtime.lab.doctor.probe_process import run_probe
from dbo_runtime.lab.doctor.remedies import find_remedies
from dbo_runtime.outside_files import check_model

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_PYTHON = re.compile(r"(^|/)python[\d.]*$")
_SERVER = "vllm.entrypoints.openai.api_server"
_UNKNOWN = "if the launcher puts all ranks on one host, `auto` splits nothing"
COMPARED = "is not proven yet: compares its first steps of each kind with unsplit ones; a difference ends splitting"
NANO_ONLY = "steps are cut into nano-batches only, and the first of each kind are compared"
_AT_LOAD = "whether steps can be split is known when vLLM has chosen the kernels of the experts"
_DERIVED = "its adapter is for the vLLM class that it derives from; which parts it takes is known when it is loaded"
_READ_LOG = "read the log at the start: it says `active`, or what cannot be split"
HOST_LENGTHS = (
    "the encoder of images and videos takes its sequence lengths from the host, in unsplit steps as well: "
    "it waits for the device no more"
)
IGNORED_SWITCH = Finding(
    "command", "warn", "vllm-ascend ignores --enable-dbo: steps are split by this package alone", "leave it out"
)
USAGE = "dbo doctor -- [NAME=VALUE ...] vllm serve MODEL [OPTIONS]"


class ServeCommand(NamedTuple):
    """A command that starts a server.

    Attributes:
        variables: environment variables for this command only, as a shell sets them from `NAME=VALUE` before a command.
        arguments: arguments of `vllm serve`.
    """

    variables: Mapping[str, str]
    arguments: tuple[str, ...]


def read_command(words: Sequence[str]) -> ServeCommand:
    """Return the pasted command, parsed: `vllm serve`, or the same server started as a module of Python.

    Raises:
        ConfigError: it is neither.
    """
    count = next((number for number, word in enumerate(words) if not _ASSIGNMENT.match(word)), len(words))
    variables = {name: value for name, _, value in (word.partition("=") for word in words[:count])}
    program, arguments = words[count:], words[count + 2 :]
    if tuple(program[:2]) == ("vllm", "serve"):
        return ServeCommand(variables, tuple(arguments))
    if _PYTHON.search("".join(program[:1])) and tuple(program[1:3]) == ("-m", _SERVER):
        return ServeCommand(variables, _put_model_first(program[3:]))
    raise ConfigError(f"{shlex.join(words)!r} is not a `vllm serve` command: {USAGE}")


def _put_model_first(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the server's arguments as `vllm serve` takes them: the model comes first, without `--model`."""
    words = list(arguments)
    for number, word in enumerate(words):
        option, sign, value = word.partition("=")
        if option == "--model" and (sign or number + 1 < len(words)):
            model = value if sign else words[number + 1]
            return (model, *words[:number], *words[number + (1 if sign else 2) :])
    return tuple(words)


def check_serve_command(command: ServeCommand, environ: Mapping[str, str]) -> list[Finding]:
    """Return what a server started with this command and *environ* would split, and everything that prevents it."""
    try:
        check_model(command.arguments[0] if command.arguments else "")
    except ConfigError as error:
        return [Finding("command", "fail", str(error), "correct the path")]
    facts = run_probe("serve", environ, *command.arguments)
    if "missing" in facts:
        remedy = "run the doctor in the environment of the server"
        return [Finding("command", "fail", f"not checked: {facts['missing']} is not installed here", remedy)]
    if "is_silent" in facts:
        remedy = "ask again when the machine is less busy; if it stays so, see what vLLM itself says of the command"
        return [Finding("command", "fail", f"not checked: {facts['error']}", remedy)]
    if "error" in facts:
        remedy = "correct the command, or name a folder with the model's config.json instead of the model"
        return [Finding("command", "fail", f"vLLM does not accept it: {facts['error']}", remedy)]
    return [
        *(_describe_unknown(name, releases, facts["vllm"]) for name, releases in facts["unknown_arguments"]),
        _describe_layout(facts),
        *(Finding("command", "fail", found, _advise(found)) for found in facts["declines"]),
        *(Finding("command", "info", f"{NANO_ONLY}: {reason}") for reason in facts["no_micro_batches"]),
        *(Finding("command", "info", f"{unproven} {COMPARED}") for unproven in facts["compared"]),
        *(
            [Finding("command", "warn", facts["misfit"], "until then `auto` goes by thresholds")]
            if facts["misfit"]
            else []
        ),
        *(Finding("command", "info" if splits else "warn", text) for splits, text in facts["outlooks"]),
        *(Finding("command", "warn", hazard, remedy) for hazard, remedy in facts["hazards"]),
        *([Finding("command", "info", HOST_LENGTHS)] if facts["takes_host_lengths"] else []),
        *([IGNORED_SWITCH] if facts["platform"] == "npu" and "--enable-dbo" in command.arguments else []),
        *(Finding("command", "info", note) for note in facts["notes"]),
    ]


def list_overlaps(sizes: Mapping[str, int]) -> list[str]:
    """Return the communication of a layer that would overlap with computation, given the parallel *sizes* by kind."""
    return [
        *(["all-reduces"] if sizes["tensor"] > 1 else []),
        *(["dispatch and combine of experts"] if sizes["data"] > 1 and sizes["expert"] > 1 else []),
    ]


def _describe_unknown(name: str, releases: Sequence[str], version: str) -> Finding:
    known = f"; known to vLLM {', '.join(releases)}" if releases else ""
    found = f"vLLM {version} does not know {name}, and does not start with it{known}. The rest is checked without it"
    return Finding("command", "fail", found, "leave it out, or serve with a release that knows it")


def _advise(decline: str) -> str:
    return "; ".join(remedy.action for remedy in find_remedies(decline))


def _describe_layout(facts: Mapping[str, Any]) -> Finding:
    sizes = facts["parallel"]
    layout = ", ".join(f"{name} parallel {size}" for name, size in sizes.items() if size > 1) or "one rank"
    found = f"{facts['architecture']} on {facts['platform']}, {layout}"
    if facts["declines"]:
        return Finding("command", "info", f"{found}: every step would run unsplit")
    unsplit = facts["hides_nothing"]
    if unsplit:
        return Finding("command", "fail", f"{found}: every step would run unsplit: {unsplit}", _advise(unsplit))
    overlaps = list_overlaps(sizes)
    if not overlaps:
        return Finding("command", "warn", f"{found}: steps may be split, but there is no communication to hide")
    if facts["is_derived"]:
        return Finding("command", "warn", f"{found}: {_DERIVED}", _READ_LOG)
    if facts["unknown_experts"]:
        text = f"{found}: {_AT_LOAD} ({facts['unknown_experts']})"
        return Finding("command", "warn", text, _READ_LOG)
    where = f"; {_UNKNOWN}" if facts["transport"] is None else ""
    return Finding("command", "ok", f"{found}: {' and '.join(overlaps)} would overlap with computation{where}")
