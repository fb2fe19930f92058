"""This rank's KV connector, which vLLM's attention layers call. Read against vLLM 0.30.0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import kv_transfer_state

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1


def read_transfer_config(vllm_config: VllmConfig) -> Mapping[str, Any]:
    """Return the connector's options in the form of `--kv-transfer-config`; empty without a connector."""
    config = vllm_config.kv_transfer_config
    return {} if config is None else vars(config)


def get_agent() -> KVConnectorBase_V1 | None:
    """Return this rank's connector; None without one, or if no step is bound to it: its hooks are then not called."""
    agent = kv_transfer_state._KV_CONNECTOR_AGENT
    return agent if agent is not None and agent.has_connector_metadata() else None


def accept_agent(kind: type) -> None:
    """Make vLLM accept instances of *kind* as connectors."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1

    KVConnectorBase_V1.register(kind)


@contextmanager
def replace_agent(agent: object | None) -> Iterator[None]:
    """Make attention layers call *agent* instead of this rank's connector, or call nothing if it is None."""
    own = kv_transfer_state._KV_CONNECTOR_AGENT
    kv_transfer_state._KV_CONNECTOR_AGENT = agent
    try:
        yield
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = own
