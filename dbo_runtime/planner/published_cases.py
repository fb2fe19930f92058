"""Cost files of cases that others published: modelled from their figures, never measured here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType

from dbo_runtime.errors import ConfigError
from dbo_runtime.planner.cost_file import load_costs
from dbo_runtime.planner.costs import CostTable

# The prompts of the step that each case is about; docs/planner.md says which are given and which are assumed.
_PROMPTS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "a3-layer-4894": (1024,) * 4,
        "910b-profile-4894": (1536,) * 4,
        "910b-share-5591": (4096,) * 2,
        "910c-share-5591": (4096,) * 2,
        "r1-tp16-941": (4096,) * 4,
    }
)


@dataclass(frozen=True, slots=True)
class PublishedCase:
    """Costs with the step they were published for.

    Attributes:
        name: of the case, and of its file.
        table: the costs.
        prompts: tokens of each prompt in the step.
    """

    name: str
    table: CostTable
    prompts: tuple[int, ...]


def list_cases() -> tuple[PublishedCase, ...]:
    """Return all cases."""
    return tuple(find_case(name) for name in _PROMPTS)


def find_case(name: str) -> PublishedCase:
    """Return the case of this name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in _PROMPTS:
        raise ConfigError(f"there is no published case {name!r}; known are {', '.join(_PROMPTS)}.")
    with as_file(files("dbo_runtime.planner") / "published" / f"{name}.json") as path:
        return PublishedCase(name, load_costs(path), _PROMPTS[name])


def open_costs(source: str) -> tuple[CostTable, tuple[int, ...] | None]:
    """Return the costs of a file, or of a published case with its prompts. A name without a dot or slash is a case's.

    Raises:
        ConfigError: if there is no such file or case, or the file is not as it must be.
    """
    if source in _PROMPTS:
        case = find_case(source)
        return case.table, case.prompts
    if not Path(source).exists() and Path(source).name == source and not Path(source).suffix:
        raise ConfigError(f"costs {source!r} are neither a file nor a published case; known are {', '.join(_PROMPTS)}.")
    return load_costs(source), None
