"""The settings: each is declared once, as a field of RuntimeConfig, and read only here.

`dbo doctor`, the tables of README.md and docs/settings.md (`make docs`) and `dbo_configure` take them from here.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeVar

from dbo_runtime.errors import ConfigError
from dbo_runtime.setting_values import (
    CHECK,
    CORES,
    MARGIN,
    NAMES,
    PARTS,
    PATH,
    POLICY,
    SWITCH,
    Check,
    Values,
    allow_count,
    allow_names,
)

ENABLE = "VLLM_ASCEND_ENABLE_DBO"
PREFIX = "DBO_"
MAX_SHOWN = 200  # characters of a variable or a value in messages

T = TypeVar("T")
When = Literal["at start", "each step"]


class Setting(NamedTuple):
    """One setting, as tables show it.

    Attributes:
        variable: the environment variable that sets it.
        allowed: its values, in words.
        default: as text; `none` for an empty one.
        read: `at start`, and never again; or `each step`, so that `dbo_configure` can change it.
        meaning: what it does.
    """

    variable: str
    allowed: str
    default: str
    read: When
    meaning: str


def _setting(variable: str, default: T, values: Values[T], read: When, meaning: str) -> T:
    return field(default=default, metadata={"variable": variable, "values": values, "read": read, "meaning": meaning})


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """What a user can set. Each field declares its variable, values, default, when it is read, and its meaning."""

    enabled: bool = _setting(ENABLE, False, SWITCH, "at start", "Turn dual-batch overlap on.")
    mode: str = _setting(
        "DBO_MODE",
        "auto",
        allow_names("auto", "always", "off"),
        "each step",
        "`auto` splits a step where there is communication to hide and splitting pays: by prediction where costs are "
        "known, by thresholds otherwise; `always` splits every step that can be split; `off` splits none.",
    )
    micro_batches: int | None = _setting(
        "DBO_MICRO_BATCHES",
        None,
        PARTS,
        "each step",
        "Into how many micro-batches a step is split; `auto` takes the number that is predicted best where costs are "
        "known, 2 otherwise.",
    )
    costs: str = _setting(
        "DBO_COSTS",
        "",
        PATH,
        "at start",
        "The cost file to plan with, which calibration writes. If it does not fit this machine or model, the log says "
        "why, and it is not used.",
    )
    calibrate: bool = _setting(
        "DBO_CALIBRATE",
        False,
        SWITCH,
        "at start",
        "Measure costs at start, with the model's own ops, and write them to DBO_COSTS if that is set.",
    )
    margin: float = _setting(
        "DBO_MARGIN",
        0.02,
        MARGIN,
        "each step",
        "With costs, `auto` splits where more than this share of the step's time is predicted to be gained.",
    )
    probation: bool = _setting(
        "DBO_PROBATION",
        True,
        SWITCH,
        "each step",
        "With costs, `auto` runs a few steps of each kind the other way than predicted, split or unsplit, which loses "
        "at most 1 % of their time, and keeps what measured faster; 0 goes by the prediction alone.",
    )
    min_tokens: int = _setting(
        "DBO_MIN_TOKENS", 256, allow_count(1), "each step", "Without costs, `auto` does not split smaller steps."
    )
    min_prefill_tokens: int = _setting(
        "DBO_MIN_PREFILL_TOKENS",
        64,
        allow_count(0),
        "each step",
        "Without costs, `auto` does not split steps with fewer prefill tokens; 0 lets it split pure decode steps.",
    )
    policy: tuple[str, int] = _setting(
        "DBO_POLICY",
        ("optimal", 0),
        POLICY,
        "each step",
        "The issue order: how the ops of the micro-batches are interleaved. `optimal` searches for the best order "
        "where costs are known, and is `alternate` otherwise. LEAD is the number of overlap points by which the first "
        "micro-batch runs ahead (default 1).",
    )
    side: str = _setting(
        "DBO_SIDE",
        "auto",
        allow_names("auto", "on", "off"),
        "each step",
        "Whether ops may run on a second compute lane, concurrently with other ops of their micro-batch: `auto` where "
        "costs predict a gain, on devices with streams; `on` wherever the model has such ops, in unsplit steps, too; "
        "`off` nowhere. The lane is opened at start, unless this is then `off` (or, on a CPU, `auto`); without it, "
        "`dbo_configure` refuses what would need it.",
    )
    side_cores: tuple[int, ...] = _setting(
        "DBO_SIDE_CORES",
        (),
        CORES,
        "at start",
        "How many cores of an NPU the second compute lane may use. The limit applies to kernels written in Ascend C "
        "only, and the vendor warns that others may hang under it.",
    )
    dispatch: str = _setting(
        "DBO_DISPATCH",
        "auto",
        allow_names("auto", "all_gather", "all_to_all"),
        "at start",
        "How tokens reach experts on other ranks in split steps: `all_gather` sends all tokens to all ranks, as vLLM's "
        "default does; `all_to_all` sends each token only to the ranks of its experts, after exchanging sizes, and "
        "with tensor parallel each rank sends a chunk of them. `auto` is `all_to_all` with vllm-ascend on chips "
        "where its own prefills take that, or with `enable_shared_expert_dp`; left to MC2's kernels where those "
        "dispatch its steps of any size; else `all_gather`.",
    )
    kv_connectors: tuple[str, ...] = _setting(
        "DBO_KV_CONNECTORS",
        (),
        NAMES,
        "at start",
        "KV connectors besides the known ones (docs/vllm.md) with which steps are split. Their layer hooks are called "
        "as in an unsplit step; they may rely on nothing else that happens inside a forward.",
    )
    generic: bool = _setting(
        "DBO_GENERIC",
        False,
        SWITCH,
        "at start",
        "Experimental: split models that have no adapter, too, by suspending their own forward at each all-reduce.",
    )
    compile: bool = _setting(
        "DBO_COMPILE",
        False,
        SWITCH,
        "at start",
        "Where vLLM compiles, compile the ops of split steps, too (CPU only), which takes seconds a layer at start.",
    )
    trace: str = _setting(
        "DBO_TRACE",
        "",
        PATH,
        "at start",
        "Write the first split steps into this folder, each as a trace of all ranks for ui.perfetto.dev; the log says "
        "what that cost. `dbo trace FOLDER` summarizes them.",
    )
    trace_steps: int = _setting(
        "DBO_TRACE_STEPS", 32, allow_count(1), "at start", "How many split steps DBO_TRACE writes."
    )
    ranges: str = _setting(
        "DBO_RANGES",
        "auto",
        allow_names("auto", "on", "off"),
        "each step",
        "Name each op of a split step in profilers (docs/observing.md): `auto` while torch's profiler is on; `on` "
        "always, for those that cannot be detected (nsys, msprof), by NVTX on CUDA and MSTX on an NPU; `off` never.",
    )
    check: Check = _setting(  # noqa: RUF009 - members of an enum do not change
        "DBO_CHECK",
        Check.OFF,
        CHECK,
        "each step",
        "`1` runs every split step a second time unsplit and compares the results, and compares all decisions across "
        "ranks. `races` does that, too, watches every value of a split step for races and undeclared writes, and runs "
        "half of them in the issue order that leaves most to chance (docs/reliability.md). Slow. "
        "Platforms and models that are not proven are split only if this is set at start.",
    )

    @property
    def parts(self) -> int:
        """Into how many micro-batches a step is split where nothing is predicted."""
        return self.micro_batches or 2


def list_settings() -> list[Setting]:
    """Return all settings, for tables."""
    return [
        Setting(
            setting.metadata["variable"],
            setting.metadata["values"].allowed,
            _format_default(setting.default),
            setting.metadata["read"],
            setting.metadata["meaning"],
        )
        for setting in fields(RuntimeConfig)
    ]


def _format_default(default: object) -> str:
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
    for variable, value in environ.items():
        if not (isinstance(variable, str) and isinstance(value, str)):
            raise ConfigError(f"{variable!r} is set to {reprlib.repr(value)}; names and values of settings are text.")
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
            raise ConfigError(f"{variable[:MAX_SHOWN]} is not a setting of dbo_runtime; {hint} Correct or unset it.")
    values: dict[str, Any] = {
        setting.name: _parse(setting, environ) for name, setting in known.items() if name in environ
    }
    return RuntimeConfig(**values)


def reread_environment(environ: Mapping[str, str], changes: Mapping[str, str]) -> RuntimeConfig:
    """Read the settings of a running server again, with *changes* on top.

    Raises:
        ConfigError: if a change is unknown, is not allowed, or is of a setting that is read at start only.
    """
    config = read_environment({**environ, **changes})
    fixed = [setting.variable for setting in list_settings() if setting.read == "at start"]
    refused = [variable for variable in fixed if variable in changes]
    if refused:
        raise ConfigError(
            f"{', '.join(refused)}: read at start only, so a running server cannot change it. Set it in the server's "
            "environment and start again."
        )
    return config


def _parse(setting: Field[object], environ: Mapping[str, str]) -> object:
    variable, values = setting.metadata["variable"], setting.metadata["values"]
    try:
        return values.parse(environ[variable].strip())
    except ValueError:
        raise ConfigError(
            f"{variable}={_shorten(environ[variable])} is not allowed; it takes {values.allowed}. Correct or unset it."
        ) from None


def _shorten(value: str) -> str:
    return repr(value) if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]!r}... ({len(value)} characters)"
