"""Finds adapters among the entry points of installed packages, and checks them against their contract."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from dbo_runtime.adapters.contract import ArgumentAdapter, EncoderAdapter, InputAdapter, ModelAdapter, locate_source
from dbo_runtime.errors import ProgramError

GROUP = "dbo_runtime.adapters"
ENCODERS = "dbo_runtime.encoders"

GENERATING_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration")
"""Suffixes of architecture names of generating models, as in vLLM."""

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
"""Suffixes of architecture names of models that pool the output of a generating model's backbone, as in vLLM."""


def get_adapter(architecture: str) -> ModelAdapter | None:
    """Return the adapter registered for an architecture name, or None if there is none.

    Adapters are classes, registered as entry points of the group `dbo_runtime.adapters` under the architecture's name.

    Raises:
        ProgramError: the registered adapter cannot be loaded, or is no adapter.
    """
    entry = _get_entry(GROUP, architecture)
    return None if entry is None else cast(ModelAdapter, _load(entry, ModelAdapter))


def get_backbone_adapter(architecture: str, classes: Sequence[str] = ()) -> ModelAdapter | None:
    """Return the adapter for the backbone that an architecture is built on, or None if there is none.

    Takes the first architecture in `name_backbones` that has an adapter. vLLM derives embedding models, classifiers and
    reward models from generating models, and serves several architectures by one class. Once the model is loaded, the
    adapter itself must check that it knows the model's parts.

    Args:
        architecture: the model's architecture name.
        classes: names of the vLLM class that serves the architecture and of its base classes; empty if not known.

    Raises:
        ProgramError: the registered adapter cannot be loaded, or is no adapter.
    """
    names = name_backbones(architecture, *classes)
    return next((adapter for adapter in map(get_adapter, names) if adapter is not None), None)


def name_backbones(*architectures: str) -> list[str]:
    """Return the architectures whose adapters may fit: these themselves, then the backbones they are built on.

    For `Qwen3Model` and `Qwen3ForSequenceClassification` this includes `Qwen3ForCausalLM`.
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
    """Return the adapter registered for an encoder class of this name, or None if there is none.

    Like `get_adapter`, for the entry point group `dbo_runtime.encoders`.
    """
    entry = _get_entry(ENCODERS, name)
    return None if entry is None else cast(EncoderAdapter, _load(entry, EncoderAdapter))


def list_encoders() -> set[str]:
    """Return the class names of the encoders that have an adapter."""
    return {entry.name for entry in entry_points(group=ENCODERS)}


def check_adapter(cls: Any, origin: str, contract: type = ModelAdapter) -> Any:
    """Return an instance of an adapter class after checking it against the contract.

    Raises:
        ProgramError: a method is missing or takes other arguments. The message names it and its declaration.
    """
    if not inspect.isclass(cls):
        raise ProgramError(f"adapter {origin} must be a class, not {cls!r}.")
    needed = _list_methods(contract)
    may_offer = {**_list_methods(InputAdapter), **_list_methods(ArgumentAdapter)}
    offered = {name: method for name, method in may_offer.items() if _find(cls, name) is not None}
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
    """Return an attribute of an adapter class, or None. Does not run the class's own attribute access."""
    return inspect.getattr_static(cls, name, None)


def _list_parameters(method: Any) -> list[str]:
    """Return a method's parameter names; empty if they cannot be inspected, as for methods written in C."""
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
