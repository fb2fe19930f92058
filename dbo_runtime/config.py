"""The settings. Each is declared once, as a field of RuntimeConfig, and environment variables are read only here.

`dbo doctor`, `dbo_configure` and the table of docs/settings.md (`make docs`) use these declarations.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeVar

from dbo_runtime.errors import ConfigError
from dbo_runtime.nearest import find_nearest
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

PREFIX = "DBO_"
ENABLE, ENABLE_ALIAS = "VLLM_ASCEND_ENABLE_DBO", "DBO_ENABLE"
SWITCHES = ENABLE, ENABLE_ALIAS  # two names of one setting: the first is that of vllm-ascend, the second names no chip
MAX_SHOWN = 200  # characters of a variable or value shown in messages

T = TypeVar("T")
When = Literal["at start", "each step"]


class Setting(NamedTuple):
    """One setting, as shown in tables.

    Attributes:
        variable: name of the environment variable.
        allowed: the allowed values, in words.
        default: the default as text; `none` for an empty one.
        read: `at start` if read only once; `each step` if `dbo_configure` can change it.
        meaning: description of the setting's effect.
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
    """All settings. Each field declares its variable, allowed values, default, time of reading, and meaning."""

    enabled: bool = _setting(ENABLE, False, SWITCH, "at start", "Turn dual-batch overlap on.")
    mode: str = _setting(
        "DBO_MODE",
        "auto",
        allow_names("auto", "always", "off"),
        "each step",
        "`auto` splits a step if there is communication to hide and splitting is faster, as predicted if costs are "
        "known, or else as the thresholds say; `always` splits every step that can be split; `off` splits none.",
    )
    split: str = _setting(
        "DBO_SPLIT",
        "auto",
        allow_names("auto", "micro", "nano"),
        "each step",
        "What a step is split into: `micro`-batches, each with attention metadata of its own; `nano`-batches, which "
        "only cut ops that take tokens one by one, and leave attention whole; `auto` is nano-batches where a model or "
        "a step has no micro-batches, or where costs predict that they are faster. Which models "
        "are declined as a whole depends on the setting at start.",
    )
    micro_batches: int | None = _setting(
        "DBO_MICRO_BATCHES",
        None,
        PARTS,
        "each step",
        "Number of micro-batches to split a step into; `auto` takes the number with the best prediction if costs are "
        "known, otherwise 2. It is also the number of nano-batches, which "
        "is 4 without costs.",
    )
    costs: str = _setting(
        "DBO_COSTS",
        "",
        PATH,
        "at start",
        "Cost file to plan with, written by calibration. A file that does not fit this machine or model is not used, "
        "and the log says why.",
    )
    calibrate: bool = _setting(
        "DBO_CALIBRATE",
        False,
        SWITCH,
        "at start",
        "Measure costs at start, with the model's own ops, and write them to DBO_COSTS if it is set.",
    )
    margin: float = _setting(
        "DBO_MARGIN",
        0.02,
        MARGIN,
        "each step",
        "With costs, `auto` splits a step if the predicted gain exceeds this share of the step's time.",
    )
    probation: bool = _setting(
        "DBO_PROBATION",
        True,
        SWITCH,
        "each step",
        "With costs, `auto` also runs a few steps of each kind against the prediction, split or unsplit, at a loss of "
        "at most 1 % of their time, and keeps the way that measured faster; 0 follows the prediction alone.",
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
        "Issue order: how the ops of the micro-batches are interleaved. `optimal` searches for the best order if costs "
        "are known, and is `alternate` otherwise. LEAD is the number of overlap points by which each micro-batch runs "
        "ahead of the next (default 1).",
    )
    side: str = _setting(
        "DBO_SIDE",
        "auto",
        allow_names("auto", "on", "off"),
        "each step",
        "Whether ops may run on a second compute lane, concurrently with other ops of their micro-batch: `auto` if "
        "costs predict a gain, on devices with streams; `on` wherever the model has such ops, also in unsplit steps; "
        "`off` never. The lane is opened at start, unless this is `off` at that time (or, on a CPU, `auto`); without "
        "the lane, `dbo_configure` refuses values that need it.",
    )
    side_cores: tuple[int, ...] = _setting(
        "DBO_SIDE_CORES",
        (),
        CORES,
        "at start",
        "Numbers of NPU cores that the second compute lane may use. The limit applies only to kernels written in "
        "Ascend C, and the vendor warns that other kernels may hang under it.",
    )
    dispatch: str = _setting(
        "DBO_DISPATCH",
        "auto",
        allow_names("auto", "all_gather", "all_to_all"),
        "at start",
        "How tokens reach experts on other ranks in split steps: `all_gather` sends all tokens to all ranks, as "
        "vLLM's default does; `all_to_all` sends each token only to the ranks of its experts, after exchanging sizes, "
        "and with tensor parallelism each rank sends a chunk of them. `auto` is `all_to_all` with vllm-ascend on "
        "chips where its own prefills use it, or with `enable_shared_expert_dp`; MC2's kernels dispatch instead where "
        "they do so for vllm-ascend's steps of any size; otherwise `auto` is `all_gather`.",
    )
    kv_connectors: tuple[str, ...] = _setting(
        "DBO_KV_CONNECTORS",
        (),
        NAMES,
        "at start",
        "Further KV connectors, besides the known ones (docs/vllm.md), to split steps with. Their layer hooks are "
        "called as in an unsplit step; they must not rely on anything else inside a forward.",
    )
    generic: bool = _setting(
        "DBO_GENERIC",
        False,
        SWITCH,
        "at start",
        "Experimental: also split models without an adapter, by suspending their own forward at each all-reduce.",
    )
    compile: bool = _setting(
        "DBO_COMPILE",
        False,
        SWITCH,
        "at start",
        "If vLLM compiles, also compile the ops of split steps (CPU only); this takes seconds per layer at start.",
    )
    trace: str = _setting(
        "DBO_TRACE",
        "",
        PATH,
        "at start",
        "Folder to write the first split steps to, each as a trace of all ranks for ui.perfetto.dev; the log says how "
        "much time that took. `dbo trace FOLDER` summarizes the traces.",
    )
    trace_steps: int = _setting(
        "DBO_TRACE_STEPS", 32, allow_count(1), "at start", "Number of split steps that DBO_TRACE writes."
    )
    ranges: str = _setting(
        "DBO_RANGES",
        "auto",
        allow_names("auto", "on", "off"),
        "each step",
        "Name each op of a split step in profilers (docs/observing.md): `auto` while torch's profiler is on; `on` "
        "always, for profilers that cannot be detected (nsys, msprof), through NVTX on CUDA and MSTX on an NPU; `off` "
        "never.",
    )
    check: Check = _setting(  # noqa: RUF009 - enum members are immutable
        "DBO_CHECK",
        Check.OFF,
        CHECK,
        "each step",
        "`1` runs every split step a second time, unsplit, compares the results, and compares all decisions across "
        "ranks. `races` also watches every value of a split step for races and undeclared writes, and runs half of the "
        "split steps in the issue order that exposes missing declarations (docs/reliability.md). Both are slow. "
        "Unproven platforms and vision encoders are split only if this is set at start.",
    )

    @property
    def parts(self) -> int:
        """Number of micro-batches to split a step into without a prediction."""
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


def read_environment(environ: Mapping[str, str]) -> RuntimeConfig:
    """Read the settings strictly.

    An unknown `DBO_` variable is an error: a misspelt one would silently have no effect, as in vllm-ascend v0.11.

    Raises:
        ConfigError: a setting is unknown or not allowed, or the two names of the switch contradict each other. The
            message names the variable, its value and what is allowed.
    """
    known = list_variables()
    for variable, value in environ.items():
        if not (isinstance(variable, str) and isinstance(value, str)):
            raise ConfigError(f"{variable!r} is set to {reprlib.repr(value)}; names and values of settings are text.")
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known:
            close = find_nearest(variable, known)
            hint = f"did you mean {close}?" if close else f"known are {', '.join(known)}."
            raise ConfigError(f"{variable[:MAX_SHOWN]} is not a setting of dbo_runtime; {hint} Correct or unset it.")
    values: dict[str, Any] = {}
    for variable in known:
        if variable in environ:
            parsed = parse_value(known[variable], variable, environ[variable])
            if values.setdefault(known[variable].name, parsed) != parsed:
                raise ConfigError(
                    f"{ENABLE}={environ[ENABLE]} and {ENABLE_ALIAS}={environ[ENABLE_ALIAS]} contradict each other: "
                    "they are two names of one setting. Unset one of them."
                )
    return RuntimeConfig(**values)


def list_variables() -> dict[str, Field[Any]]:
    """Return the setting of each variable, both names of the switch included."""
    known: dict[str, Field[Any]] = {setting.metadata["variable"]: setting for setting in fields(RuntimeConfig)}
    return {ENABLE: known[ENABLE], ENABLE_ALIAS: known[ENABLE], **known}


def parse_value(setting: Field[Any], name: str, text: str) -> object:
    """Return the value that *text* is for a setting. *name* is what the user called it."""
    values = setting.metadata["values"]
    try:
        return values.parse(text.strip())
    except ValueError:
        raise ConfigError(
            f"{name}={_shorten(text)} is not allowed; it takes {values.allowed}. Correct or unset it."
        ) from None


def _shorten(value: str) -> str:
    return repr(value) if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]!r}... ({len(value)} characters)"
