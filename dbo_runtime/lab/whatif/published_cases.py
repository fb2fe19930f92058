"""Cost files of published cases: modelled from published figures, not measured by this project."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType

from dbo_runtime.batch import Batch
from dbo_runtime.errors import ConfigError
from dbo_runtime.lab.whatif.scale import Network
from dbo_runtime.nearest import find_nearest
from dbo_runtime.planner.costs.cost_file import load_costs
from dbo_runtime.planner.costs.cost_table import CostTable


def _fill_prompts(count: int, tokens: int) -> Batch:
    return Batch((tokens,) * count, count * tokens)


def _fill_decodes(count: int, context: int) -> Batch:
    return Batch((1,) * count, 0, context_lens=(context,) * count)


# The step of each case. docs/planner.md and docs/scale.md say which parts are published and which are assumed.
_STEPS: Mapping[str, Batch] = MappingProxyType(
    {
        "a3-layer-4894": _fill_prompts(4, 1024),
        "910b-profile-4894": _fill_prompts(4, 1536),
        "910b-share-5591": _fill_prompts(2, 4096),
        "910c-share-5591": _fill_prompts(2, 4096),
        "r1-tp16-941": _fill_prompts(4, 4096),
        "r1-ep16-1589": _fill_prompts(16, 1024),
        "qwen3-tp4-44677": _fill_prompts(4, 4096),
        "r1-decode-910b": _fill_decodes(96, 4096),
        "r1-decode-910c": _fill_decodes(96, 4096),
        "r1-decode-12708": _fill_decodes(96, 4096),
        "qwen36-tp4-56126": _fill_decodes(128, 1024),
        "llama70b-tp8-11329": _fill_prompts(1, 4096),
        "r1-prefill-910b": _fill_prompts(2, 4096),
        "r1-prefill-910c": _fill_prompts(2, 4096),
        "r1-prefill-h800": _fill_prompts(2, 4096),
        "r1-decode-h800": _fill_decodes(128, 4096),
        "qwen3-235b-910b": _fill_prompts(2, 4096),
        "qwen3-235b-910c": _fill_prompts(2, 4096),
        "qwen3-235b-prefill-h800": _fill_prompts(2, 4096),
        "qwen3-235b-decode-h800": _fill_decodes(128, 4096),
    }
)

# 8 chips per host: 121.3 GB/s within it, from #4894's profile, and 200 Gbit/s RoCE between hosts.
_HOSTS_OF_910B = Network(8, 121.3e9, 25e9)
_NETWORKS: Mapping[str, Network] = MappingProxyType(dict.fromkeys(("r1-tp16-941", "r1-ep16-1589"), _HOSTS_OF_910B))


@dataclass(frozen=True, slots=True)
class PublishedCase:
    """Costs, with the step that they were published for.

    Attributes:
        name: name of the case and of its file.
        table: the costs.
        step: the step: prompts, or decodes after their context in the KV cache.
    """

    name: str
    table: CostTable
    step: Batch


def list_cases() -> tuple[PublishedCase, ...]:
    """Return all cases."""
    return tuple(get_case(name) for name in _STEPS)


def get_case(name: str) -> PublishedCase:
    """Return the case of this name.

    Raises:
        ConfigError: there is no such case.
    """
    if name not in _STEPS:
        raise ConfigError(f"there is no published case {name!r}; {_suggest(name, _STEPS)}")
    with as_file(files("dbo_runtime.lab.whatif") / "published" / f"{name}.json") as path:
        return PublishedCase(name, load_costs(path), _STEPS[name])


def find_network(source: str) -> Network | None:
    """Return the two-level network of a published case, if known."""
    return _NETWORKS.get(source)


def open_costs(source: str) -> tuple[CostTable, Batch | None]:
    """Return the costs in a file, or those of a published case with its step. A name without dot or slash is a case.

    Raises:
        ConfigError: there is no such file or case, or the file is invalid.
    """
    if source in _STEPS:
        case = get_case(source)
        return case.table, case.step
    if not os.path.exists(source) and Path(source).name == source and not Path(source).suffix:
        raise ConfigError(f"costs {source!r} are neither a file nor a published case; {_suggest(source, _STEPS)}")
    if not os.path.exists(source):
        folder = Path(source).parent
        files = [str(folder / entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
        raise ConfigError(f"cost file {source} cannot be read: there is none; {_suggest(source, files)}")
    return load_costs(source), None


def _suggest(name: str, known: Iterable[str]) -> str:
    """Return the rest of a sentence about an unknown name: the one that was meant, or where to look."""
    close = find_nearest(name, known)
    return f"did you mean {close}?" if close else "`dbo plan --list` lists the published cases."
