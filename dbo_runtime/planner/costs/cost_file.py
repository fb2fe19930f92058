"""Cost tables as JSON files: readable, with times in microseconds, and read strictly."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from glob import escape
from pathlib import Path
from typing import Any

from dbo_runtime.errors import ConfigError
from dbo_runtime.outside_files import parse_json, read_text, write_text
from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, name_field
from dbo_runtime.planner.costs.program_spec import LayerRun, OpSpec, ProgramSpec

FORMAT = 1
_WIDTH = 140
_REMEDY = "Correct the file, or measure anew: `dbo calibrate`."

# Converts the value at a path of the file to the table's value; raises ConfigError if it is not allowed.
_Read = Callable[[Any, str], Any]


def save_costs(table: CostTable, path: str | os.PathLike[str]) -> None:
    """Write *table* atomically: concurrent readers see either the old file or the new one.

    Raises:
        ConfigError: the file cannot be written. The message names it.
    """
    try:
        write_text(path, format_costs(table))
    except (OSError, ValueError) as error:  # a ValueError if the path has a NUL byte
        raise ConfigError(f"cost file {path} cannot be written ({error}). Name a file in a writable folder.") from None


def load_costs(path: str | os.PathLike[str]) -> CostTable:
    """Read the table in a file. It equals the table saved there.

    Raises:
        ConfigError: anything in the file is invalid. The message names the file, the field and the remedy.
    """
    try:
        text = read_text(path, "cost file")
    except ConfigError as error:
        raise ConfigError(f"{error} {_REMEDY}") from None
    try:
        return parse_costs(text)
    except ConfigError as error:
        raise ConfigError(f"cost file {path}: {error} {_REMEDY}") from None


def name_stage_file(path: str, stage: str | None) -> str:
    """Return the path of a pipeline stage's costs, such as `costs.pp0.json`; *path* itself without a stage."""
    file = Path(path)
    return path if stage is None else str(file.with_name(f"{file.stem}.{stage}{file.suffix}"))


def list_stage_files(path: str) -> list[str]:
    """Return the existing cost files for *path* of a pipeline's stages, in stage order."""
    file = Path(path)
    files = file.parent.glob(f"{escape(file.stem)}.pp*{escape(file.suffix)}")
    return [str(one) for one in sorted(files, key=lambda one: (len(one.name), one.name))]


def format_costs(table: CostTable) -> str:
    """Return the text of a cost file."""
    return _render(_describe_table(table)) + "\n"


def _describe_table(table: CostTable) -> dict[str, Any]:
    return {
        "format": FORMAT,
        **{item.name: _thaw(getattr(table.provenance, item.name)) for item in fields(Provenance)},
        "program": {
            "inputs": table.program.inputs,
            "runs": [_describe_run(run) for run in table.program.runs],
            "outputs": table.program.outputs,
        },
        "ops": {name: _describe_part(cost) for name, cost in table.ops.items()},
        "contention": _thaw(table.contention),
        "host": _describe_part(table.host),
        "errors": _thaw(table.errors),
        "split_error": table.split_error,
    }


def _describe_run(run: LayerRun) -> dict[str, Any]:
    return {"repeat": run.repeat, "layered": run.layered, "ops": [_describe_op(op) for op in run.ops]}


def _describe_op(op: OpSpec) -> dict[str, Any]:
    """Return an op's declaration, without defaults."""
    defaults = OpSpec._field_defaults
    return {name: value for name, value in op._asdict().items() if name not in defaults or value != defaults[name]}


def _describe_part(part: ComputeCost | CommCost | HostCost) -> dict[str, Any]:
    return {name: value for name, value, _ in part.list_numbers()}


def _thaw(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _render(node: Any, indent: str = "", room: int = _WIDTH) -> str:
    """Return JSON that puts a value on one line if it fits into *room* characters, indent included."""
    flat = json.dumps(node, allow_nan=False)
    if len(indent) + len(flat) < room or not (node and isinstance(node, (dict, list, tuple))):
        return flat
    inner = indent + "  "
    if isinstance(node, dict):
        keys = [f"{json.dumps(key)}: " for key in node]
        rows = [inner + key + _render(node[name], inner, room - len(key)) for key, name in zip(keys, node, strict=True)]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _render(item, inner) for item in node) + f"\n{indent}]"


def parse_costs(text: str) -> CostTable:
    """Read a table from the text that `format_costs` returns.

    Raises:
        ConfigError: anything is invalid. The message names the field.
    """
    content = parse_json(text)
    actual = content.get("format") if isinstance(content, dict) else None
    if type(actual) is not int or actual != FORMAT:
        raise ConfigError(f"format is {reprlib.repr(actual)}; this version of dbo_runtime reads format {FORMAT}.")
    values = _FILE(content, "")
    provenance = Provenance(**{item.name: values[item.name] for item in fields(Provenance)})
    rest = {item.name for item in fields(CostTable)} & values.keys()
    return CostTable(provenance, **{name: values[name] for name in rest})


def _read_plain(kind: type, allowed: str) -> _Read:
    def read(value: Any, path: str) -> Any:
        if type(value) is not kind:
            raise _refuse(value, path, allowed)
        return value

    return read


def _read_number(value: Any, path: str) -> float:
    if type(value) not in (int, float):
        raise _refuse(value, path, "a number")
    try:
        return float(value)
    except OverflowError:
        raise _refuse(value, path, "a number that a float can hold") from None


def _read_list(read_item: _Read) -> _Read:
    def read(value: Any, path: str) -> Any:
        if type(value) is not list:
            raise _refuse(value, path, "a list")
        return tuple(read_item(item, f"{path}[{number}]") for number, item in enumerate(value))

    return read


def _read_mapping(read_item: _Read) -> _Read:
    def read(value: Any, path: str) -> Any:
        return {name: read_item(item, f"{path}.{name}") for name, item in _read_object(value, path).items()}

    return read


def _read_optional(read_item: _Read) -> _Read:
    return lambda value, path: None if value is None else read_item(value, path)


def _read_record(make: Callable[..., Any], readers: Mapping[str, _Read], optional: Collection[str] = ()) -> _Read:
    """Read an object with exactly the fields of *readers*, and pass them to *make* by name."""

    def read(value: Any, path: str) -> Any:
        given = _read_object(value, path)
        prefix = f"{path}." if path else ""
        for name in given:
            if name not in readers:
                raise ConfigError(f"{prefix}{name[:100]} is unknown; known are {', '.join(readers)}.")
        for name in readers:
            if name not in given and name not in optional:
                raise ConfigError(f"{prefix}{name} is missing.")
        return make(**{name: readers[name](item, prefix + name) for name, item in given.items()})

    return read


def _read_part(cls: type[Any]) -> _Read:
    """Read the cost class *cls*: all its fields, by their names in the file."""
    items = {name_field(item): item for item in fields(cls)}
    readers = {name: _read_unit(item.metadata["is_time"]) if item.metadata else _SWITCH for name, item in items.items()}
    optional = [name for name, item in items.items() if item.metadata.get("optional")]

    def make(**values: Any) -> Any:
        return cls(**{items[name].name: value for name, value in values.items()})

    return _read_record(make, readers, optional)


def _read_unit(is_time: bool) -> _Read:
    return lambda value, path: _read_number(value, path) / (1e6 if is_time else 1.0)


def _read_cost(value: Any, path: str) -> Any:
    return (_COMM if "alpha_us" in _read_object(value, path) else _COMPUTE)(value, path)


def _read_object(value: Any, path: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise _refuse(value, path, "an object")
    return value


def _refuse(value: Any, path: str, allowed: str) -> ConfigError:
    return ConfigError(f"{path or 'the content'} is {reprlib.repr(value)}; it must be {allowed}.")


_TEXT = _read_plain(str, "text")
_INTEGER = _read_plain(int, "a whole number")
_SWITCH = _read_plain(bool, "true or false")
_NAMES = _read_list(_TEXT)
_COMPUTE, _COMM, _HOST = _read_part(ComputeCost), _read_part(CommCost), _read_part(HostCost)
_OP = _read_record(
    OpSpec,
    {
        "name": _TEXT,
        "lane": _TEXT,
        "reads": _NAMES,
        "outputs": _INTEGER,
        "ordered": _SWITCH,
        "exclusive": _read_optional(_TEXT),
        "communicator": _read_optional(_TEXT),
        "host_sync": _SWITCH,
        "overwrites": _NAMES,
        "movable": _SWITCH,
        "token_wise": _SWITCH,
    },
    optional=OpSpec._field_defaults,
)
_RUN = _read_record(LayerRun, {"repeat": _INTEGER, "layered": _SWITCH, "ops": _read_list(_OP)})
_FILE = _read_record(
    dict,
    {
        "format": _INTEGER,
        "kind": _TEXT,
        "source": _TEXT,
        "date": _TEXT,
        "machine": _read_mapping(_TEXT),
        "model": _read_mapping(_TEXT),
        "parallel": _read_mapping(_INTEGER),
        "versions": _read_mapping(_TEXT),
        "program": _read_record(ProgramSpec, {"inputs": _NAMES, "runs": _read_list(_RUN), "outputs": _NAMES}),
        "ops": _read_mapping(_read_cost),
        "contention": _read_mapping(_read_number),
        "host": _HOST,
        "errors": _read_mapping(_read_number),
        "split_error": _read_number,
    },
    optional=("split_error",),
)
