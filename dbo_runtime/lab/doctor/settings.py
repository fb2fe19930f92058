"""Check the settings: their values, the sources of these, and whether the files they name can be used."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from dbo_runtime.config import (
    ENABLE,
    ENABLE_ALIAS,
    PREFIX,
    SWITCHES,
    RuntimeConfig,
    Setting,
    list_settings,
    read_environment,
)
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.doctor.finding import Finding
from dbo_runtime.planner.costs.cost_file import list_stage_files, load_costs

CALIBRATE = "`dbo calibrate MODEL --output FILE` writes one"


def split_settings(environ: Mapping[str, str]) -> tuple[RuntimeConfig, list[str]]:
    """Return the settings without values that are not allowed, and an error for each of those."""
    good: dict[str, str] = {}
    problems: list[str] = []
    for variable in sorted(environ):
        if variable == ENABLE or variable.startswith(PREFIX):
            try:
                read_environment({**_pick(good, SWITCHES), variable: environ[variable]})
                good[variable] = environ[variable]
            except ConfigError as error:
                problems.append(str(error))
    return read_environment(good), problems


def _pick(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    return {name: environ[name] for name in names if name in environ}


def check_settings(environ: Mapping[str, str], problems: list[str]) -> list[Finding]:
    """List each setting with its source. A value that is not allowed is a finding of its own: vLLM cannot start."""
    remedy = "correct or unset it: vLLM does not start with it"
    found = [Finding("settings", "fail", problem.removesuffix(" Correct or unset it."), remedy) for problem in problems]
    rows = tuple((setting.variable, _describe_value(setting, environ)) for setting in list_settings())
    own = sum(value.endswith("environment)") for _, value in rows)
    return [*found, Finding("settings", "info", f"{own} from the environment, {len(rows) - own} defaults", "", rows)]


def _describe_value(setting: Setting, environ: Mapping[str, str]) -> str:
    if setting.variable in environ:
        return f"{environ[setting.variable]} (environment)"
    if setting.variable == ENABLE and ENABLE_ALIAS in environ:
        return f"{environ[ENABLE_ALIAS]} ({ENABLE_ALIAS} in the environment)"
    return f"{setting.default} (default)"


def check_switch(config: RuntimeConfig) -> Finding:
    """Check that overlap is turned on."""
    if not config.enabled:
        return Finding("switch", "fail", "overlap is turned off", f"export {ENABLE}=1, on every host")
    if config.mode == "off":
        return Finding("switch", "fail", "DBO_MODE is off: every step runs unsplit", "export DBO_MODE=auto")
    return Finding("switch", "ok", f"overlap is turned on, mode {config.mode}")


def check_costs(config: RuntimeConfig) -> Finding:
    """Check the costs to plan with. Without costs `auto` uses thresholds, so nothing here is a failure."""
    if not config.costs:
        found = "calibration at each start" if config.calibrate else "no cost file: `auto` uses the two thresholds"
        return Finding("costs", "info", found, "" if config.calibrate else f"{CALIBRATE}, for DBO_COSTS")
    path = Path(config.costs)
    if config.calibrate:
        if os.access(path.absolute().parent, os.W_OK) and not os.path.isdir(path):
            return Finding("costs", "ok", f"calibration writes {path} at the start")
        found = f"{path} cannot be written: calibration would run, and its result be lost"
        return Finding("costs", "warn", found, "name a file in a writable folder")
    files = [] if os.path.exists(path) else list_stage_files(config.costs)
    try:
        tables = {file: load_costs(file) for file in files or [config.costs]}
    except ConfigError as error:
        return Finding("costs", "warn", f"{error} Until then `auto` uses thresholds.", CALIBRATE)
    found = "; ".join(
        f"{file}: {table.provenance.kind}, {table.provenance.date}, digest {table.digest}"
        for file, table in tables.items()
    )
    if any(table.provenance.kind != "measured" for table in tables.values()):
        return Finding("costs", "warn", f"{found}; such costs are not of a machine that serves", CALIBRATE)
    return Finding("costs", "ok", f"{found}; whether they are of this machine and model is checked at start")


def check_trace(config: RuntimeConfig) -> list[Finding]:
    """Check that traces can be written, if requested. vLLM does not start otherwise."""
    if not config.trace:
        return []
    folder = Path(config.trace).absolute()
    parent = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        return [Finding("trace", "fail", f"{folder} cannot be written", "let DBO_TRACE name a writable folder")]
    return [Finding("trace", "ok", f"{folder} {'is writable' if parent == folder else 'can be created'}")]
