"""How adapters are found, as entry points of installed packages, and checked against their contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from dbo_runtime.adapters.contract import EncoderAdapter, InputAdapter, ModelAdapter, locate_source
from dbo_runtime.errors import ProgramError

GROUP = "dbo_runtime.adapters"
ENCODERS = "dbo_runtime.encoders"

GENERATING_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")
"""Ends of the names of architectures that generate; the names are vLLM's."""

POOLING_SUFFIXES = (
    "ForTextEncoding",
    "EmbeddingModel",
    "ForEmbedding",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ClassificationModel",
    "ForRewardModeling",
    "ForRewardModel",
    "ForProcessRewardModel",
    "RewardModel",
    "Model",
)
"""Ends of the names of architectures that pool what a generating model's backbone gives."""


def get_adapter(architecture: str) -> ModelAdapter | None:
    """Return the adapter registered for an architecture name, or None if there is none.

    Adapters are entry points of the group `dbo_runtime.adapters`, named like the architecture, that load to a class.

    Raises:
        ProgramError: if the one registered cannot be loaded or is no adapter.
    """
    entry = _get_entry(GROUP, architecture)
    return None if entry is None else cast(ModelAdapter, _load(entry, ModelAdapter))


def get_backbone_adapter(architecture: str, classes: Sequence[str] = ()) -> ModelAdapter | None:
    """Return the adapter of the backbone that an architecture holds, or None if there is none.

    It is the one registered for the first of `name_backbones` that has one: vLLM makes embedding models, classifiers
    and reward models of generating ones, and serves several architectures by one class. Whether the model's parts are
    those that the adapter knows is the adapter's to check, when the model is loaded.

    Args:
        architecture: the model's architecture, by name.
        classes: names of the class that vLLM serves it by, and of those that this derives from; none if not known.

    Raises:
        ProgramError: if the one registered cannot be loaded or is no adapter.
    """
    names = name_backbones(architecture, *classes)
    return next((adapter for adapter in map(get_adapter, names) if adapter is not None), None)


def name_backbones(*architectures: str) -> list[str]:
    """Return the architectures that adapters of these may be registered for: themselves, and their backbones.

    `Qwen3Model` and `Qwen3ForSequenceClassification` have that of `Qwen3ForCausalLM`.
    """
    bases = [
        name.removesuffix(suffix)
        for name in architectures
        for suffix in POOLING_SUFFIXES
        if name.endswith(suffix) and name != suffix
    ]
    backbones = [f"{base}{suffix}" for base in bases for suffix in GENERATING_SUFFIXES]
    return list(dict.fromkeys((*architectures, *backbones)))


def get_encoder_adapter(name: str) -> EncoderAdapter | None:
    """Return the adapter registered for encoders of a class of this name, or None if there is none.

    As `get_adapter`, in the group `dbo_runtime.encoders`.
    """
    entry = _get_entry(ENCODERS, name)
    return None if entry is None else cast(EncoderAdapter, _load(entry, EncoderAdapter))


def list_encoders() -> set[str]:
    """Return the class names of the encoders that have an adapter."""
    return {entry.name for entry in entry_points(group=ENCODERS)}


def check_adapter(cls: Any, origin: str, contract: type = ModelAdapter) -> Any:
    """Return an instance of an adapter class after checking it against the contract.

    Raises:
        ProgramError: naming the method that is missing or takes other arguments, and where it is declared.
    """
    if not inspect.isclass(cls):
        raise ProgramError(f"adapter {origin} must be a class, not {cls!r}.")
    needed = _list_methods(contract)
    offered = {name: method for name, method in _list_methods(InputAdapter).items() if _find(cls, name) is not None}
    for name, method in {**needed, **offered}.items():
        declared = _find(cls, name)
        if not callable(declared):
            raise ProgramError(f"adapter {origin} has no method {name}(). ({locate_source(cls)})")
        expected = list(inspect.signature(method).parameters)
        actual = _list_parameters(declared)
        if actual != expected:
            raise ProgramError(
                f"adapter {origin}: {name}({', '.join(actual)}) must take ({', '.join(expected)}). "
                f"({locate_source(declared)})"
            )
    try:
        adapter = cls()
    except Exception as error:
        raise ProgramError(
            f"adapter {origin} cannot be made by {cls.__name__}(): {error!r}. ({locate_source(cls)})"
        ) from error
    return adapter


def _find(cls: type, name: str) -> Any:
    """Return an attribute of an adapter's class, without running what the class has to say about it; None without."""
    return inspect.getattr_static(cls, name, None)


def _list_parameters(method: Any) -> list[str]:
    """Return the names of what a method takes; none if it does not say, as those that are written in C."""
    try:
        return list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return []


def _get_entry(group: str, name: str) -> EntryPoint | None:
    entries = [entry for entry in entry_points(group=group) if entry.name == name]
    if len({entry.value for entry in entries}) > 1:
        names = ", ".join(sorted(entry.value for entry in entries))
        raise ProgramError(f"{name} has several adapters ({names}); uninstall all but one.")
    return entries[0] if entries else None


def _list_methods(contract: type) -> dict[str, Callable[..., Any]]:
    return {name: method for name, method in vars(contract).items() if inspect.isfunction(method) and name[0] != "_"}


def _load(entry: EntryPoint, contract: type) -> Any:
    try:
        cls = entry.load()
    except Exception as error:
        raise ProgramError(f"adapter {entry.value} of {entry.name} cannot be imported: {error!r}") from error
    return check_adapter(cls, entry.value, contract)
