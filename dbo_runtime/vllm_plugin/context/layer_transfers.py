"""The layer hooks of a KV connector in a split step, called as in an unsplit step: once per layer.

A split step runs a layer's attention once per micro-batch, and vLLM calls the connector's hooks each time. A connector
that counts calls, or saves a layer on each call, must not see the extra calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dbo_runtime.decline import Decline
from dbo_runtime.errors import TransferError
from dbo_runtime.ir.policies import keeps_layers
from dbo_runtime.ir.schedule import Schedule
from dbo_runtime.vllm_plugin.api.forward_context import get_current
from dbo_runtime.vllm_plugin.api.kv_agent import accept_agent, get_agent, replace_agent

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata

WAIT, WRITTEN, SAVE = "wait_for_layer_load", "on_kv_cache_written", "save_kv_layer"


class LayerTransfers:
    """Stands in for a connector while a split step runs, and forwards the calls that an unsplit step would make.

    For each layer this is one wait, before the first micro-batch's attention, and one save with the metadata of the
    whole step, after the last micro-batch's attention. vllm-ascend's third hook, for a written cache, is treated like
    the save. Layers take turns, as in an unsplit step. All other attributes of the connector are passed through.

    Args:
        agent: the connector.
        metadata: the whole step's attention metadata, by layer.
        contexts: the micro-batches' forward contexts; those without attention metadata call no hooks.
    """

    def __init__(
        self, agent: KVConnectorBase_V1, metadata: Mapping[str, AttentionMetadata], contexts: Sequence[ForwardContext]
    ) -> None:
        self._agent = agent
        self._metadata = metadata
        self._numbers = {id(context): number for number, context in enumerate(contexts)}
        self._attending = [number for number, context in enumerate(contexts) if context.attn_metadata]
        self._finished: set[str] = set()
        self._layer = ""  # the layer whose turn it is; empty between two layers
        self._attended = 0  # number of micro-batches that have attended in that layer
        self._called: list[str] = []  # hooks that the next micro-batch has called
        self._waited = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer, unless a micro-batch has already done so.

        Raises:
            TransferError: it is not the turn of this layer and micro-batch.
        """
        self._check_turn(WAIT, layer_name)
        if not self._waited:
            self._waited = True
            self._agent.wait_for_layer_load(layer_name)

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        """Tell a connector that has this hook that a layer's cache has the whole step.

        Raises:
            TransferError: it is not the turn of this layer and micro-batch.
        """
        self._check_turn(WRITTEN, layer_name)
        if self._is_last and hasattr(self._agent, WRITTEN):
            self._agent.on_kv_cache_written(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Save a layer [cache of the layer] once all micro-batches have attended.

        Attention metadata is forwarded in the form it came in: for the layer, or, from vllm-ascend, for all layers.

        Raises:
            TransferError: it is not the turn of this layer and micro-batch.
        """
        self._check_turn(SAVE, layer_name)
        if self._is_last:
            of_all = isinstance(attn_metadata, Mapping)
            whole = self._metadata if of_all else self._metadata[layer_name]
            self._agent.save_kv_layer(layer_name, kv_layer, whole, **kwargs)
            self._finished.add(layer_name)
            self._layer, self._attended, self._waited = "", 0, False
        else:
            self._attended += 1
        self._called = []

    def finish(self) -> None:
        """Check that no layer is left unsaved.

        Raises:
            TransferError: a layer is left unsaved.
        """
        if self._layer:
            raise self._make_error(f"the step ended before {self._layer} was saved")

    @property
    def _is_last(self) -> bool:
        return self._attended == len(self._attending) - 1

    def _check_turn(self, hook: str, layer: str) -> None:
        """Check that *layer* may call *hook* now, from the current micro-batch. Begin the layer's turn if necessary."""
        if layer not in self._metadata:
            raise self._make_error(f"{hook} of {layer!r}, a layer that has no attention metadata in this step")
        if layer in self._finished:
            raise self._make_error(f"{hook} of {layer}, which is saved already")
        if self._layer not in ("", layer):
            raise self._make_error(f"{hook} of {layer} before {self._layer} was saved")
        number, due = self._numbers.get(id(get_current())), self._attending[self._attended]
        if number != due:
            raise self._make_error(f"{hook} of {layer} by micro-batch {number}, where {due} comes next")
        if hook in self._called:
            raise self._make_error(f"{hook} of {layer} twice by micro-batch {number}")
        self._layer = layer
        self._called.append(hook)

    def _make_error(self, what: str) -> TransferError:
        return TransferError(
            f"{type(self._agent).__name__}: {what}. Nothing was saved out of turn; please report it. DBO_MODE=off "
            "serves unsplit."
        )


@contextmanager
def transfer_once(step: ForwardContext, contexts: Sequence[ForwardContext]) -> Iterator[None]:
    """While a step's micro-batches run, call the connector's layer hooks as an unsplit step would.

    Raises:
        TransferError: hooks are called out of turn.
    """
    agent = get_agent()
    if agent is None or not step.attn_metadata:
        yield
        return
    accept_agent(LayerTransfers)
    transfers = LayerTransfers(agent, step.attn_metadata, contexts)
    with replace_agent(transfers):
        yield
    transfers.finish()


def check_turns(schedule: Schedule) -> Decline | None:
    """Decline an issue order that lets a micro-batch attend in a layer before all have attended in the previous one."""
    if keeps_layers(each.op for each in schedule.instructions):
        return None
    return Decline("the KV connector takes one layer after the other", "DBO_POLICY=optimal and alternate issue them so")
