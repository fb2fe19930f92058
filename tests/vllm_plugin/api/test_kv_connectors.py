"""Which KV connectors are known, and whether their layer hooks do something. No engine needed."""

from __future__ import annotations

import inspect
import textwrap
from ast import Constant, Expr, FunctionDef, Pass, Return, parse
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from dbo_runtime.vllm_plugin.api.kv_connectors import (
    COMPOSITE,
    IDLE_HOOKS,
    WORKING_HOOKS,
    check_connectors,
    has_layer_hooks,
)

UNKNOWN = ("HiSparseConnector", "ExampleHiddenStatesConnector")  # which need more than hooks; see docs/vllm.md
REGISTERED = sorted(KVConnectorFactory._registry)


def make(name: str, module: str | None = None, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_module_path": module, "kv_connector_extra_config": extra}


def combine(*children: dict[str, Any]) -> dict[str, Any]:
    return make(COMPOSITE, connectors=[*children])


def does_nothing(hook: Any) -> bool:
    """Return whether a method has no statement but its docstring, `pass` and an empty `return`."""
    (function,) = parse(textwrap.dedent(inspect.getsource(hook))).body
    assert isinstance(function, FunctionDef)
    idle = (
        isinstance(one, Pass)
        or (isinstance(one, Return) and one.value is None)
        or (isinstance(one, Expr) and isinstance(one.value, Constant))
        for one in function.body
    )
    return all(idle)


@pytest.mark.parametrize("name", [name for name in REGISTERED if name in IDLE_HOOKS])
def test_the_layer_hooks_that_are_said_to_do_nothing_do_nothing(name: str) -> None:
    try:
        kind = KVConnectorFactory.get_connector_class_by_name(name)
    except ImportError as error:
        pytest.skip(f"vLLM's module needs what is not installed: {error}")
    assert does_nothing(kind.wait_for_layer_load)
    assert does_nothing(kind.save_kv_layer)


def test_hooks_that_do_something_are_seen_to() -> None:
    kind = KVConnectorFactory.get_connector_class_by_name("ExampleConnector")
    assert does_nothing(kind.wait_for_layer_load)
    assert not does_nothing(kind.save_kv_layer)
    assert not does_nothing(KVConnectorFactory.get_connector_class_by_name("LMCacheConnectorV1").wait_for_layer_load)


def test_every_connector_of_vllm_is_known_or_declined_on_purpose() -> None:
    known = {*IDLE_HOOKS, *WORKING_HOOKS, COMPOSITE}
    assert [name for name in REGISTERED if name not in known] == sorted(UNKNOWN)


def test_vllm_has_no_other_layer_hooks_than_those_that_are_handled() -> None:
    hooks = {name for name in KVConnectorBase_V1.__abstractmethods__ if "layer" in name}
    assert hooks == {"wait_for_layer_load", "save_kv_layer"}


@pytest.mark.parametrize("name", [*IDLE_HOOKS, *WORKING_HOOKS])
def test_known_connectors_are_split_alone_and_together(name: str) -> None:
    assert check_connectors(make(name)) is None
    assert check_connectors(combine(make("NixlConnector"), make(name))) is None
    assert has_layer_hooks(make(name)) == (name not in IDLE_HOOKS)
    assert has_layer_hooks(combine(make("NixlConnector"), make(name))) == (name not in IDLE_HOOKS)


@pytest.mark.parametrize("name", sorted(IDLE_HOOKS.keys() & WORKING_HOOKS.keys()))
def test_ascend_store_has_hooks_where_it_stores_by_layer(name: str) -> None:
    assert not has_layer_hooks(make(name, use_layerwise=False))
    assert has_layer_hooks(make(name, use_layerwise=True))
    assert has_layer_hooks(combine(make("MooncakeConnectorV1"), make(name, use_layerwise=True)))


def test_without_a_connector_nothing_is_declined() -> None:
    for transfer in ({}, {"kv_connector": None}):
        assert check_connectors(transfer) is None
        assert not has_layer_hooks(transfer)


@pytest.mark.parametrize(
    "transfer",
    [
        make("Novel"),
        make("Novel", "novel.connector"),
        make("NixlConnector", "novel.connector"),  # another class of that name
        combine(make("NixlConnector"), make("Novel")),
        combine(make("NixlConnector"), combine(make("Novel", "novel.connector"))),
        *(make(name) for name in UNKNOWN),
    ],
)
def test_an_unknown_connector_is_declined_by_name_and_may_be_declared(transfer: dict[str, Any]) -> None:
    decline = check_connectors(transfer)
    assert decline is not None
    assert decline.reason == "the KV connector is not known to dbo_runtime"
    name, _, remedy = decline.detail.partition(";")
    assert f"DBO_KV_CONNECTORS={name} " in remedy
    assert check_connectors(transfer, (name,)) is None
    assert has_layer_hooks(transfer), "what is not known may use its hooks"


def test_the_classes_of_vllm_and_vllm_ascend_are_known_by_their_modules_too() -> None:
    for module in ("vllm.distributed.somewhere", "vllm_ascend.distributed.mooncake_connector"):
        assert check_connectors(make("MooncakeConnectorV1", module)) is None
        assert not has_layer_hooks(make("MooncakeConnectorV1", module))
