"""The settings, and the one place where environment variables are read."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dbo_runtime.errors import ConfigError

ENABLE = "VLLM_ASCEND_ENABLE_DBO"
PREFIX = "DBO_"


def _parse_switch(text: str) -> bool:
    return {"0": False, "1": True}[text]


def _parse_mode(text: str) -> str:
    return {"auto": "auto", "always": "always", "off": "off"}[text]


def _parse_side(text: str) -> str:
    return {"auto": "auto", "on": "on", "off": "off"}[text]


def _parse_cores(text: str) -> tuple[int, ...]:
    if not text:
        return ()
    cube, vector = map(_parse_count(1), text.split(":"))
    return cube, vector


def _parse_dispatch(text: str) -> str:
    return {"all_gather": "all_gather", "all_to_all": "all_to_all"}[text]


def _parse_count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(text)
        return int(text)

    return parse


def _parse_parts(text: str) -> int | None:
    return None if text == "auto" else _parse_count(2)(text)


def _parse_margin(text: str) -> float:
    margin = float(text)
    if not 0 <= margin < math.inf:
        raise ValueError(text)
    return margin


def _parse_policy(text: str) -> tuple[str, int]:
    """Split `staggered:LEAD` into its name and its lead; the other policies have lead 0."""
    name, colon, lead = text.partition(":")
    if name in ("sequential", "alternate", "optimal") and not colon:
        return name, 0
    if name == "staggered":
        return name, _parse_count(0)(lead if colon else "1")
    raise ValueError(text)


def name_policy(name: str, lead: int) -> str:
    """Return the text that a policy is set by, such as `staggered:1`."""
    return f"{name}:{lead}" if name == "staggered" else name


def _setting(variable: str, default: Any, parse: Callable[[str], Any], allowed: str, meaning: str) -> Any:
    metadata = {"variable": variable, "parse": parse, "allowed": allowed, "meaning": meaning}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """What a user can set. Each field names its variable, what it allows, and what it means."""

    enabled: bool = _setting(ENABLE, False, _parse_switch, "0 or 1", "Turn dual-batch overlap on.")
    mode: str = _setting(
        "DBO_MODE",
        "auto",
        _parse_mode,
        "auto, always or off",
        "`auto` splits a step where there is communication to hide and splitting pays: by prediction where costs are "
        "known, by thresholds otherwise; `always` splits every step that can be split; `off` splits none.",
    )
    micro_batches: int | None = _setting(
        "DBO_MICRO_BATCHES",
        None,
        _parse_parts,
        "auto, or a whole number, at least 2",
        "Into how many parts a step is split; `auto` takes what is predicted best where costs are known, 2 otherwise.",
    )
    costs: str = _setting(
        "DBO_COSTS",
        "",
        str,
        "a path",
        "The cost file to plan with, which calibration writes. Of one that does not fit, the log says why.",
    )
    calibrate: bool = _setting(
        "DBO_CALIBRATE",
        False,
        _parse_switch,
        "0 or 1",
        "Measure costs at start, with the model's own ops, and write them to DBO_COSTS if that is set.",
    )
    margin: float = _setting(
        "DBO_MARGIN",
        0.02,
        _parse_margin,
        "a number, at least 0",
        "With costs, `auto` splits where more than this share of the step's time is predicted to be gained.",
    )
    min_tokens: int = _setting(
        "DBO_MIN_TOKENS",
        256,
        _parse_count(1),
        "a whole number, at least 1",
        "Without costs, `auto` leaves smaller steps whole.",
    )
    min_prefill_tokens: int = _setting(
        "DBO_MIN_PREFILL_TOKENS",
        64,
        _parse_count(0),
        "a whole number, at least 0",
        "Without costs, `auto` leaves steps with fewer prefill tokens whole; 0 lets pure decode steps split.",
    )
    policy: tuple[str, int] = _setting(
        "DBO_POLICY",
        ("optimal", 0),
        _parse_policy,
        "optimal, sequential, alternate, staggered or staggered:LEAD",
        "The issue order: how the micro-batches' ops are interleaved. `optimal` is searched for where costs are known, "
        "and `alternate` otherwise. LEAD is by how many overlap points the first micro-batch runs ahead (1 if left "
        "out).",
    )
    side: str = _setting(
        "DBO_SIDE",
        "auto",
        _parse_side,
        "auto, on or off",
        "Whether ops may run on a second compute lane, beside others of their own micro-batch: `auto` where costs "
        "predict that it pays, on devices with streams; `on` wherever the model has such ops, in steps that are not "
        "split, too; `off` nowhere. Read at start.",
    )
    side_cores: tuple[int, ...] = _setting(
        "DBO_SIDE_CORES",
        (),
        _parse_cores,
        "CUBE:VECTOR, such as 8:16",
        "How many cores of an NPU the second compute lane may use. The limit holds for kernels written in Ascend C "
        "only, and the vendor warns that others may hang under it. Read at start.",
    )
    dispatch: str = _setting(
        "DBO_DISPATCH",
        "all_gather",
        _parse_dispatch,
        "all_gather or all_to_all",
        "How tokens reach experts on other ranks in split steps: `all_gather` sends all tokens to all ranks, as vLLM's "
        "default does; `all_to_all` sends each only where its experts are, and exchanges sizes first. Read at start.",
    )
    generic: bool = _setting(
        "DBO_GENERIC",
        False,
        _parse_switch,
        "0 or 1",
        "Experimental: split a model that has no adapter, too, by stopping its own forward at each all-reduce. Read at "
        "start.",
    )
    compile: bool = _setting(
        "DBO_COMPILE",
        False,
        _parse_switch,
        "0 or 1",
        "Where vLLM compiles, compile the ops of split steps, too, one by one; CPU only. Takes seconds a layer at "
        "start. Read at start.",
    )
    trace: str = _setting(
        "DBO_TRACE",
        "",
        str,
        "a path",
        "Write the first split steps into this folder, each as a trace of all ranks for ui.perfetto.dev; what that "
        "cost is logged. `dbo trace FOLDER` sums them up.",
    )
    trace_steps: int = _setting(
        "DBO_TRACE_STEPS",
        32,
        _parse_count(1),
        "a whole number, at least 1",
        "How many split steps DBO_TRACE writes.",
    )
    check: bool = _setting(
        "DBO_CHECK",
        False,
        _parse_switch,
        "0 or 1",
        "Run every split step a second time unsplit and compare the results; compare all decisions across ranks. Slow.",
    )

    @property
    def parts(self) -> int:
        """Into how many parts a step is split where nothing is predicted."""
        return self.micro_batches or 2


def describe_settings() -> list[tuple[str, str, str, str]]:
    """Return (variable, allowed values, default, meaning) of each setting, for tables and `--help`."""
    rows = []
    for setting in fields(RuntimeConfig):
        text = _name_default(setting.default)
        rows.append((setting.metadata["variable"], setting.metadata["allowed"], str(text), setting.metadata["meaning"]))
    return rows


def _name_default(default: Any) -> str:
    if isinstance(default, tuple):
        return str(default[0]) if default else "none"
    if default is None:
        return "auto"
    return str(int(default)) if isinstance(default, bool) else str(default) or "none"


def is_enabled(environ: Mapping[str, str]) -> bool:
    """Return whether overlap is turned on, reading nothing else.

    Raises:
        ConfigError: if the variable is neither 0 nor 1.
    """
    return read_environment({ENABLE: environ[ENABLE]}).enabled if ENABLE in environ else False


def read_environment(environ: Mapping[str, str]) -> RuntimeConfig:
    """Read the settings strictly.

    An unknown variable that starts with `DBO_` is an error, because a misspelt setting would otherwise be a silent
    no-op, which is what vllm-ascend v0.11 left its users with.

    Raises:
        ConfigError: names the variable, its value and what is allowed.
    """
    known = {setting.metadata["variable"]: setting for setting in fields(RuntimeConfig)}
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
            raise ConfigError(f"{variable} is not a setting of dbo_runtime; {hint} Correct or unset it.")
    values = {}
    for variable, setting in known.items():
        if variable not in environ:
            continue
        text = environ[variable].strip()
        try:
            values[setting.name] = setting.metadata["parse"](text)
        except (KeyError, ValueError):
            allowed = setting.metadata["allowed"]
            raise ConfigError(
                f"{variable}={environ[variable]!r} is not allowed; it takes {allowed}. Correct or unset it."
            ) from None
    return RuntimeConfig(**values)
