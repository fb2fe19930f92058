"""The contracts of adapters, and how one records a program."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from dbo_runtime.adapters.communication import Collectives
from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import DboError, ProgramError
from dbo_runtime.ir.op import COMM, COMPUTE, SIDE
from dbo_runtime.ir.program import Program, ProgramBuilder
from dbo_runtime.ir.values import Value

LANES = (COMPUTE, COMM, SIDE)

X = "x"
POSITIONS = "positions"
INPUT_IDS = "input_ids"
"""The input that an adapter's `record` may declare for token ids [tokens]; the name is vLLM's."""

KEPT = "kept"
"""The output that an `OutputAdapter` declares."""

INPUTS: dict[str, dict[str, int | None]] = {
    X: {"token_dim": 0},
    POSITIONS: {"token_dim": -1},  # a row of them, or one for each axis of a rotary embedding of images
    "pixels": {"token_dim": 0},  # an image's tokens are its patches
    "grids": {"token_dim": None, "request_dim": 0},  # a request is an image
}
"""The inputs that adapters' `record` takes as parameters, and how each is cut into micro-batches."""


def name_auxiliary(layers: int) -> str:
    """Return the name of the output that has the hidden states after that many layers, before a norm [tokens, hidden].

    A model that drafts (Eagle3, arXiv:2503.01840) reads them. After no layers, they are the embedded tokens.
    """
    return f"hidden_states_after_{layers}"


class ModelAdapter(Protocol):
    """Declares the programs of one family of models. `dbo_models.deepseek` is one, in about 60 lines."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model, as configured and loaded, cannot be split, or None if it can."""

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare the program of one micro-batch and return the value of its hidden states.

        `x` will be the embedded tokens [tokens, hidden], `positions` their positions [tokens], or [axes, tokens].
        """


@runtime_checkable
class InputAdapter(Protocol):
    """An adapter of a model that keeps data for its next forward, token by token, in addition to its arguments."""

    def take_inputs(self, model: Any, x: Any, keep: bool) -> Any:
        """Return *x* [tokens, hidden] with those data appended [tokens, hidden and more], to be cut with the tokens.

        With *keep*, leave them for another forward of the same step; otherwise remove them as the forward would.
        """


@runtime_checkable
class RepeatableAdapter(Protocol):
    """An `InputAdapter` that can also give such data back, so that a step can run several times for comparison."""

    def give_inputs(self, model: Any, x: Any) -> None:
        """Leave the data appended to *x*, which `take_inputs` returned for some tokens, to the forward of these."""


@runtime_checkable
class OutputAdapter(Protocol):
    """An adapter of a model whose forward leaves data for another model, token by token, besides its result.

    Where it does, `record` names them as an output, `p.output(KEPT, value)`.
    """

    def keep_output(self, model: Any, parts: Sequence[Any]) -> None:
        """Leave the output of each micro-batch, in the order of the tokens, where the model's own forward does."""


@runtime_checkable
class StageAdapter(Protocol):
    """An adapter that also declares a stage of a pipeline: the layers that are on this rank.

    On a stage other than the first, `x` is the hidden states of the previous stage, and `record` declares the other
    tensors that this passes on as inputs, `p.input("residual")`, before any op. On a stage other than the last it
    returns hidden states as the next stage takes them, and names the other tensors, `p.output("residual", value)`.

    Attributes:
        takes_stages: True. Other adapters are not used for stages.
    """

    takes_stages: bool


class EncoderAdapter(Protocol):
    """Declares the programs of one family of vision encoders. `dbo_models.qwen_vl` has two."""

    def decline(self, encoder: Any) -> Decline | None:
        """Return why this encoder, as configured and loaded, cannot be split, or None if it can."""

    def estimate_flops(self, encoder: Any, grid: Sequence[int]) -> float:
        """Return the operations that an image or a video of *grid* (time, height, width, in patches) takes.

        Micro-batches are balanced by them, so only ratios matter.
        """

    def record(self, p: ProgramBuilder, encoder: Any, collectives: Collectives, pixels: Value, grids: Value) -> Value:
        """Declare the program of one micro-batch of images and return the value of their embeddings.

        `pixels` will be the images' patches [patches, values], `grids` a list of (time, height, width) of each image.
        """


def record_program(
    adapter: ModelAdapter | EncoderAdapter, model: Any, collectives: Collectives, has_side: bool = False
) -> Program | Decline:
    """Run an adapter once and return the program it declares; with *has_side*, its ops may be on the `side` lane.

    Returns:
        The program, or the decline if the model turns out not to be splittable while it is recorded.

    Raises:
        ProgramError: if it breaks the contract, with the line where it does, or fails.
    """
    p = ProgramBuilder(has_side)
    inputs = _declare_inputs(p, adapter)
    try:
        result = adapter.record(p, model, collectives, *inputs)
    except DeclineError as error:
        return error.decline
    except DboError:
        raise
    except Exception as error:
        where = locate_source(type(adapter))
        raise ProgramError(f"record() of {name_adapter(adapter)} failed: {error!r:.1000}. ({where})") from error
    if not isinstance(result, Value):
        where = inspect.getsourcefile(type(adapter)) or type(adapter).__name__
        raise ProgramError(f"record() of {name_adapter(adapter)} must return one Value, not {result!r}. ({where})")
    program = p.build(result) if has_side else p.build(result).fold_side()
    _check_ops(program)
    return program


def name_adapter(adapter: ModelAdapter | EncoderAdapter) -> str:
    """Return `module.Class` of an adapter."""
    return f"{type(adapter).__module__}.{type(adapter).__qualname__}"


def locate_source(thing: Any) -> str:
    """Return `file:line` of a class or function, for messages."""
    try:
        code = inspect.unwrap(thing)
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}"
    except Exception:  # noqa: BLE001 - a built-in, its source is missing, or a class that raises when it is asked
        return f"{thing!r}, no source"


def _declare_inputs(p: ProgramBuilder, adapter: ModelAdapter | EncoderAdapter) -> list[Value]:
    """Declare the inputs that `record` takes as its last parameters, by their names."""
    try:
        names = list(inspect.signature(adapter.record).parameters)[-2:]
    except (TypeError, ValueError) as error:
        where = locate_source(type(adapter))
        raise ProgramError(f"record() of {name_adapter(adapter)} cannot be called ({error}). ({where})") from error
    for name in names:
        if name not in INPUTS:
            raise ProgramError(
                f"record() of {name_adapter(adapter)} takes the input {name!r}; those of adapters are "
                f"{', '.join(INPUTS)}. ({locate_source(type(adapter))})"
            )
    return [p.input(name, **INPUTS[name]) for name in names]


def _check_ops(program: Program) -> None:
    """Raise ProgramError if an op is on an unknown lane, or in no layer between ops that are in one."""
    inside = [number for number, op in enumerate(program.ops) if op.layer is not None]
    for number, op in enumerate(program.ops):
        if op.lane not in LANES:
            raise ProgramError(
                f"op {op.label!r} is on lane {op.lane!r}; a model's lanes are {', '.join(LANES)}. ({op.declared_at})"
            )
        if op.layer is None and inside and inside[0] < number < inside[-1]:
            raise ProgramError(
                f"op {op.label!r} is in no layer, but lies between layers; declare it inside `with p.layer(index):`. "
                f"({op.declared_at})"
            )
        if not inside and op.lane == COMM:
            raise ProgramError(
                f"op {op.label!r} communicates, but no op of the program is in a layer; declare each layer's inside "
                f"`with p.layer(index):`. ({op.declared_at})"
            )
