"""Splits a model that nobody wrote an adapter for: its own forward, stopped at each all-reduce. Experimental.

Each micro-batch runs the forward on a strand, a stack of its own within the calling thread. Where the model sums over
ranks, the strand hands over what is to be summed and stops; it goes on with the sum. So the forward becomes a program
of parts and reduces like any other, with its waits, traces and costs. What an adapter knows and this cannot: where
parts could be taken apart further, and whether modules keep something from one part to the next that another
micro-batch overwrites. DBO_CHECK=1 tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from vllm.forward_context import set_forward_context
from vllm.sequence import IntermediateTensors

from dbo_runtime.adapter import Collectives
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import ProgramError
from dbo_runtime.program import ProgramBuilder, Value
from dbo_runtime.vllm_plugin.parallel.stage import HIDDEN, WHOLE_MODEL, Stage

TRIAL_TOKENS = 2  # of the run in which all-reduces are counted
OTHERS = ("all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "gather", "broadcast", "send", "recv")


class GenericAdapter:
    """Takes any model apart at its all-reduces.

    Args:
        group: vLLM's coordinator of the ranks that sum.
        vllm_config: of the engine.
        stage: of a pipeline that the model is.
    """

    takes_stages = True

    def __init__(self, group: Any, vllm_config: Any, stage: Stage = WHOLE_MODEL) -> None:
        self._group = group
        self._vllm_config = vllm_config
        self._stage = stage

    def decline(self, model: Any) -> Decline | None:
        """Return why this model cannot be split, or None."""
        if self._group.world_size == 1:
            return Decline("one rank sums nothing, so there is nothing to stop its forward at")
        if not hasattr(model, "embed_input_ids"):
            return Decline("it does not embed tokens apart from its forward")
        if find_spec("greenlet") is None:
            return Decline("DBO_GENERIC needs greenlet: pip install 'dbo-runtime[generic]'")
        return None

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare one micro-batch: parts of the forward, and the reduces between them.

        Raises:
            DeclineError: if it sums nothing, or communicates in another way, too.
        """
        if not collectives.reduces:
            raise DeclineError("not supported yet without an adapter: tokens that travel to experts")
        count, stage = self._count_reduces(model), self._stage
        layers = stage.layers or range(self._vllm_config.model_config.hf_text_config.num_hidden_layers)
        each = _count_per_layer(count, len(layers))
        more = [name for name in stage.handed if name != HIDDEN]
        given = [] if stage.is_first else [p.input(name) for name in more]
        start = partial(_start, partial(Coroutine, self._group, model.forward), None if stage.is_first else more)
        for number in range(count):
            with p.layer(layers.start + number // each):
                name = f"part{number % each}"
                if number == 0:
                    x, coroutine = p.compute(name, start, x, positions, *given, outputs=2, ordered=True)
                else:
                    x = p.compute(name, _go_on, x, coroutine, ordered=True)
                x = p.comm(f"reduce{number % each}", collectives.all_reduce, x, overwrites=(x,))
        return self._record_tail(p, x, coroutine, more)

    def _record_tail(self, p: ProgramBuilder, x: Value, coroutine: Value, more: Sequence[str]) -> Value:
        """Declare the end of the forward, which gives hidden states, or what goes to the next stage."""
        if self._stage.is_last:
            hidden: Value = p.compute("tail", _finish, x, coroutine, ordered=True)
            return hidden
        results = p.compute("tail", partial(_hand_on, more), x, coroutine, ordered=True, outputs=1 + len(more))
        hidden, *rest = results if more else (results,)
        for name, value in zip(more, rest, strict=True):
            p.output(name, value)
        return hidden

    def _count_reduces(self, model: Any) -> int:
        """Run a few tokens through the model, without any communication, and return how often it would sum."""
        config = self._vllm_config
        weight = next(model.parameters())
        hidden, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
        x = torch.zeros(TRIAL_TOKENS, hidden, dtype=dtype, device=weight.device)
        positions = torch.arange(TRIAL_TOKENS, device=weight.device)
        if config.model_config.uses_mrope:
            positions = positions.expand(3, -1)
        context = set_forward_context(None, config, num_tokens=TRIAL_TOKENS, skip_compiled=True)
        handed = None if self._stage.is_first else IntermediateTensors({name: x.clone() for name in self._stage.handed})
        try:
            with _stand_in(self._group) as reduces, torch.inference_mode(), context:
                model.forward(None, positions, handed, None if handed else x)
        except DeclineError:
            raise
        except Exception as error:  # nobody has read this forward; whatever it raises, it runs whole
            raise DeclineError(f"its forward cannot be tried with {TRIAL_TOKENS} tokens: {error!r}") from error
        if not reduces:
            raise DeclineError("its forward sums nothing over ranks, so there is nothing to stop it at")
        return len(reduces)


class Coroutine:
    """One run of a forward, stopped at each all-reduce.

    It is a greenlet: a stack of its own in the calling thread, so that everything that belongs to a thread (inference
    mode, current stream, OpenMP's pool) stays what it is, which in a thread of its own it would not.

    Args:
        group: whose `all_reduce` it stops at.
        forward: what it runs.
    """

    def __init__(self, group: Any, forward: Callable[..., Any]) -> None:
        from greenlet import greenlet

        self._group = group
        self._greenlet = greenlet(forward)

    def resume(self, *given: Any) -> Any:
        """Go on with *given*, first the forward's arguments and later a sum, and return what is to be summed next.

        At the end, return what the forward returned.
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
        own = partial.clone()  # it is summed in place, and the forward may still need its part
        return self._greenlet.parent.switch(own)


def _start(
    make_coroutine: Callable[[], Coroutine], names: Sequence[str] | None, x: Any, positions: Any, *more: Any
) -> tuple[Any, Coroutine]:
    """Begin a forward with embedded tokens, or, with *names*, with hidden states and more of the stage before."""
    coroutine = make_coroutine()
    if names is None:
        first = coroutine.resume(None, positions, None, x)
    else:
        handed = IntermediateTensors({HIDDEN: x, **dict(zip(names, more, strict=True))})
        first = coroutine.resume(None, positions, handed, None)
    return _expect(coroutine, first, ended=False), coroutine


def _go_on(reduced: Any, coroutine: Coroutine) -> Any:
    return _expect(coroutine, coroutine.resume(reduced), ended=False)


def _finish(reduced: Any, coroutine: Coroutine) -> Any:
    return _expect(coroutine, coroutine.resume(reduced), ended=True)


def _hand_on(names: Sequence[str], reduced: Any, coroutine: Coroutine) -> Any:
    tensors = _finish(reduced, coroutine).tensors
    return (tensors[HIDDEN], *(tensors[name] for name in names)) if names else tensors[HIDDEN]


def _expect(coroutine: Coroutine, result: Any, ended: bool) -> Any:
    if coroutine.has_ended is not ended:
        found = "more" if ended else "fewer"
        raise ProgramError(
            f"the model's forward has made {found} all-reduces than in the run in which they were counted. It cannot "
            "be split without an adapter: unset DBO_GENERIC."
        )
    return result


def _count_per_layer(count: int, layers: int) -> int:
    """Return how many all-reduces a layer makes; all of them are taken for one layer's if that does not come out."""
    return count // layers if count % layers == 0 else count


@contextmanager
def _stand_in(group: Any) -> Iterator[list[torch.Size]]:
    """Let a group communicate nothing meanwhile, and yield the shapes of what it was asked to sum."""
    shapes: list[torch.Size] = []

    def keep(part: torch.Tensor) -> torch.Tensor:
        shapes.append(part.shape)
        return part

    others = {name: partial(_refuse, name) for name in OTHERS if hasattr(group, name)}
    vars(group).update(others, all_reduce=keep)  # shadows the methods on this object
    try:
        yield shapes
    finally:
        for name in ("all_reduce", *others):
            delattr(group, name)


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise DeclineError(f"not supported yet without an adapter: a forward that calls {name}")
