"""Split a model without an adapter, by stopping its own forward at each all-reduce. Experimental.

Each micro-batch runs the forward in a coroutine, on a separate stack within the calling thread. At each all-reduce the
coroutine stops and returns the tensor to be summed; it resumes with the sum. The forward thus becomes a program of
parts and reduces like any other, with waits, traces and costs. Unlike an adapter, this module does not know how to
decompose parts further, nor whether modules keep state from one part to the next that another micro-batch overwrites.
DBO_CHECK=1 finds such state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors

from dbo_runtime.adapters.communication import Collectives
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import ProgramError
from dbo_runtime.ir.program import ProgramBuilder
from dbo_runtime.ir.values import Value
from dbo_runtime.vllm_plugin.parallel.stage import HIDDEN, WHOLE_MODEL, Stage

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.models.interfaces_base import VllmModel

SUMS_NOTHING = Decline("one rank sums nothing, so there is nothing to stop its forward at")
COUNTING_TOKENS = 2  # tokens of the run that counts all-reduces
OTHER_COLLECTIVES = (
    "all_gather",
    "all_gatherv",
    "reduce_scatter",
    "reduce_scatterv",
    "gather",
    "broadcast",
    "send",
    "recv",
)


class GenericAdapter:
    """Decomposes any model at its all-reduces.

    Args:
        group: vLLM's coordinator of the tensor parallel ranks.
        vllm_config: vLLM's configuration of the engine.
        stage: the pipeline stage served by the model.
    """

    takes_stages = True

    def __init__(self, group: GroupCoordinator, vllm_config: VllmConfig, stage: Stage = WHOLE_MODEL) -> None:
        self._group = group
        self._vllm_config = vllm_config
        self._stage = stage

    def decline(self, model: VllmModel) -> Decline | None:
        """Decline a model whose forward cannot be stopped at all-reduces."""
        if self._group.world_size == 1:
            return SUMS_NOTHING
        if not hasattr(model, "embed_input_ids"):
            return Decline("it does not embed tokens outside its forward")
        if find_spec("greenlet") is None:
            return Decline("DBO_GENERIC needs greenlet: pip install 'dbo-runtime[generic]'")
        return None

    def record(
        self, p: ProgramBuilder, model: VllmModel, collectives: Collectives, x: Value, positions: Value
    ) -> Value:
        """Declare one micro-batch: parts of the forward, with reduces between them.

        A part may change its inputs in place, as Granite scales its embedded tokens, because a forward owns its inputs.

        Raises:
            DeclineError: the forward sums nothing, or uses other collectives, too.
        """
        if not collectives.reduces:
            raise DeclineError("not supported yet without an adapter: tokens that are dispatched to experts")
        count, stage = self._count_reduces(model), self._stage
        layers = stage.layers or range(self._vllm_config.model_config.hf_text_config.num_hidden_layers)
        each = _count_per_layer(count, len(layers))
        more = [name for name in stage.handed if name != HIDDEN]
        given = (x, positions, *(() if stage.is_first else map(p.input, more)))
        start = partial(_start, partial(Coroutine, self._group, model.forward), None if stage.is_first else more)
        for number in range(count):
            with p.layer(layers.start + number // each):
                name = f"part{number % each}"
                if number == 0:
                    x, coroutine = p.compute(name, start, *given, outputs=2, ordered=True, overwrites=given)
                else:
                    x = p.compute(name, _resume, x, coroutine, ordered=True, overwrites=(x,))
                x = p.comm(f"reduce{number % each}", collectives.all_reduce, x, overwrites=(x,))
        return self._record_tail(p, x, coroutine, more)

    def _record_tail(self, p: ProgramBuilder, x: Value, coroutine: Value, more: Sequence[str]) -> Value:
        """Declare the end of the forward, which returns hidden states, or the tensors for the next stage."""
        if self._stage.is_last:
            hidden: Value = p.compute("tail", _finish, x, coroutine, ordered=True, overwrites=(x,))
            return hidden
        finish = partial(_finish_stage, more)
        results = p.compute("tail", finish, x, coroutine, ordered=True, outputs=1 + len(more), overwrites=(x,))
        hidden, *rest = results if more else (results,)
        for name, value in zip(more, rest, strict=True):
            p.output(name, value)
        return hidden

    def _count_reduces(self, model: VllmModel) -> int:
        """Run a few tokens through the model without communication; return the number of all-reduces."""
        config = self._vllm_config
        weight = next(model.parameters())
        hidden, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
        x = torch.zeros(COUNTING_TOKENS, hidden, dtype=dtype, device=weight.device)
        positions = torch.arange(COUNTING_TOKENS, device=weight.device)
        if config.model_config.uses_mrope:
            positions = positions.expand(3, -1)
        context = set_forward_context(None, config, num_tokens=COUNTING_TOKENS, skip_compiled=True)
        received = (
            None if self._stage.is_first else IntermediateTensors({name: x.clone() for name in self._stage.handed})
        )
        with _replace_collectives(self._group) as reduces, torch.inference_mode(), context:
            embedded = _embed(model, COUNTING_TOKENS, weight.device) if received is None else None
            reduces.clear()  # drops reduces of the embedding, which is outside the program
            try:
                model.forward(None, positions, received, embedded)
            except DeclineError:
                raise
            except Exception as error:  # the forward is unknown code; whatever it raises, leave it unsplit
                detail = f"{COUNTING_TOKENS} tokens: {error!r}"
                raise DeclineError(_name_failure(model, positions, received), detail) from error
        if not reduces:
            raise DeclineError("its forward sums nothing over ranks, so there is nothing to stop it at")
        return len(reduces)


class Coroutine:
    """One run of a forward, stopped at each all-reduce.

    It is a greenlet, that is, a separate stack in the calling thread. Thread-local state (inference mode, current
    stream, OpenMP's pool) therefore stays the same, as it would not in a separate thread.

    Args:
        group: vLLM's coordinator whose `all_reduce` stops the forward.
        forward: the function to run.
    """

    def __init__(self, group: GroupCoordinator, forward: Callable[..., Any]) -> None:
        from greenlet import greenlet

        self._group = group
        self._greenlet = greenlet(forward)

    def resume(self, *given: Any) -> Any:
        """Resume with *given* (first the forward's arguments, later a sum). Return the next tensor to be summed.

        At the end, return the forward's result.
        """
        self._group.all_reduce = self._stop  # shadows the method on this object
        try:
            return self._greenlet.switch(*given)
        finally:
            del self._group.all_reduce

    @property
    def has_ended(self) -> bool:
        """Whether the forward has returned."""
        return bool(self._greenlet.dead)

    def _stop(self, partial: torch.Tensor) -> Any:
        own = partial.clone()  # summed in place, and the forward may still read the original
        return self._greenlet.parent.switch(own)


def _start(
    make_coroutine: Callable[[], Coroutine],
    names: Sequence[str] | None,
    x: torch.Tensor,
    positions: torch.Tensor,
    *more: torch.Tensor,
) -> tuple[torch.Tensor, Coroutine]:
    """Start a forward with embedded tokens, or, if *names* is set, with the previous stage's tensors."""
    coroutine = make_coroutine()
    if names is None:
        first = coroutine.resume(None, positions, None, x)
    else:
        received = IntermediateTensors({HIDDEN: x, **dict(zip(names, more, strict=True))})
        first = coroutine.resume(None, positions, received, None)
    return _expect(coroutine, first, ended=False), coroutine


def _resume(reduced: torch.Tensor, coroutine: Coroutine) -> Any:
    return _expect(coroutine, coroutine.resume(reduced), ended=False)


def _finish(reduced: torch.Tensor, coroutine: Coroutine) -> Any:
    return _expect(coroutine, coroutine.resume(reduced), ended=True)


def _finish_stage(names: Sequence[str], reduced: torch.Tensor, coroutine: Coroutine) -> Any:
    tensors = _finish(reduced, coroutine).tensors
    return (tensors[HIDDEN], *(tensors[name] for name in names)) if names else tensors[HIDDEN]


def _expect(coroutine: Coroutine, result: Any, ended: bool) -> Any:
    if coroutine.has_ended is not ended:
        number = "more" if ended else "fewer"
        raise ProgramError(
            f"the model's forward has made {number} all-reduces than in the run in which they were counted. It cannot "
            "be split without an adapter: unset DBO_GENERIC."
        )
    return result


def _embed(model: VllmModel, tokens: int, device: torch.device) -> torch.Tensor:
    """Return some embedded tokens [tokens, hidden].

    Raises:
        DeclineError: the model has the method, but only its forward can embed (Exaone in vLLM 0.30).
    """
    try:
        embedded: torch.Tensor = model.embed_input_ids(torch.zeros(tokens, dtype=torch.int64, device=device))
    except Exception as error:  # vLLM's method may raise anything; leave the model unsplit
        raise DeclineError("it does not embed tokens outside its forward", repr(error)) from error
    return embedded


def _name_failure(model: VllmModel, positions: torch.Tensor, received: IntermediateTensors | None) -> str:
    """Return why a forward fails without token ids. It may read them in addition to embeddings, as BERT's does."""
    try:
        model.forward(torch.zeros_like(positions), positions, received, None)
    except Exception:  # noqa: BLE001 - any error means the same
        return "its forward fails with a few tokens"
    return "its forward reads token ids, not embedded tokens alone"


def _count_per_layer(count: int, layers: int) -> int:
    """Return the number of all-reduces per layer, or of all layers together if it is not a whole number per layer."""
    return count // layers if count % layers == 0 else count


@contextmanager
def _replace_collectives(group: GroupCoordinator) -> Iterator[list[torch.Size]]:
    """In this context a group communicates nothing; yield the shapes of the tensors to be summed."""
    shapes: list[torch.Size] = []

    def keep(part: torch.Tensor) -> torch.Tensor:
        shapes.append(part.shape)
        return part

    others = {name: partial(_raise_unsupported, name) for name in OTHER_COLLECTIVES if hasattr(group, name)}
    vars(group).update(others, all_reduce=keep)  # shadows the methods on this object
    try:
        yield shapes
    finally:
        for name in ("all_reduce", *others):
            delattr(group, name)


def _raise_unsupported(name: str, *_: object, **__: object) -> NoReturn:
    raise DeclineError("not supported yet without an adapter: a forward with other collectives", name)
