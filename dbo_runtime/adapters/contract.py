"""The contracts that adapters implement, and `record_program`, which runs an adapter to record its program."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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
"""The input that an adapter's `record` may declare for token ids [tokens]. vLLM uses the same name."""

ARGUMENT = "argument_"
"""How the names of inputs begin that `ArgumentAdapter.take_arguments` returns; see `name_argument`."""

KEPT = "kept"
"""The name of the output that an `OutputAdapter` declares."""

INPUTS: dict[str, dict[str, int | None]] = {
    X: {"token_dim": 0},
    POSITIONS: {"token_dim": -1},  # one row, or one for each axis of a multimodal rotary embedding
    "pixels": {"token_dim": 0},  # an image's patches are its tokens
    "grids": {"token_dim": None, "request_dim": 0},  # an image is a request
}
"""The inputs that `record` may take as its last parameters, and how each is cut into micro-batches."""


def name_argument(name: str) -> str:
    """Return the name of an input that `ArgumentAdapter.take_arguments` returns."""
    return f"{ARGUMENT}{name}"


def name_auxiliary(layers: int) -> str:
    """Return the name of the output for the hidden states after this many layers, before a norm [tokens, hidden].

    A draft model (Eagle3, arXiv:2503.01840) reads them. For 0 layers they are the embedded tokens.
    """
    return f"hidden_states_after_{layers}"


class ModelAdapter(Protocol):
    """Declares the programs of one model family. `dbo_models.deepseek` is an example, in about 60 lines."""

    def decline(self, model: Any) -> Decline | None:
        """Return why this model, as configured and loaded, cannot be split, or None if it can."""

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare the program of one micro-batch and return the value of its hidden states.

        `x` stands for the embedded tokens [tokens, hidden], `positions` for their positions [tokens] or [axes, tokens].
        """


@runtime_checkable
class InputAdapter(Protocol):
    """An adapter for a model that stores per-token data for its next forward, besides the forward's arguments."""

    def take_inputs(self, model: Any, x: Any, keep: bool) -> Any:
        """Return *x* with the stored data appended [tokens, hidden and more], so that both are cut together.

        *x* is [tokens, hidden]. With *keep*, leave the stored data for another forward of the same step. Otherwise
        remove them, as the model's own forward would.
        """


@runtime_checkable
class RepeatableAdapter(Protocol):
    """An `InputAdapter` that can also restore the stored data, so that a step can run several times for comparison."""

    def give_inputs(self, model: Any, x: Any) -> None:
        """Restore the data that `take_inputs` appended to *x*, for a forward of the same tokens."""


@runtime_checkable
class ArgumentAdapter(Protocol):
    """An adapter for a model whose forward takes arguments by token besides token ids, positions and embeddings.

    `record` declares them as inputs, each with a name from `name_argument`: `p.input(name_argument("mask"))`.
    """

    def take_arguments(self, model: Any, given: Mapping[str, Any], tokens: int) -> dict[str, Any] | Decline:
        """Return these inputs by name, made of the forward's further arguments; or why a step with these is not split.

        Args:
            model: top-level model.
            given: the further arguments by name, some of which may be for another model, or unused.
            tokens: number of tokens of the step. Each input is for as many.
        """


@runtime_checkable
class OutputAdapter(Protocol):
    """An adapter for a model whose forward stores per-token data for another model, besides returning its result.

    `record` declares these data as an output: `p.output(KEPT, value)`.
    """

    def keep_output(self, model: Any, parts: Sequence[Any]) -> None:
        """Store the micro-batches' outputs, given in token order, where the model's own forward would."""


@runtime_checkable
class StageAdapter(Protocol):
    """An adapter that can also declare one pipeline stage: the layers on this rank.

    On every stage but the first, `x` is the previous stage's hidden states. `record` declares the other tensors that
    the previous stage sends as inputs, `p.input("residual")`, before any op. On every stage but the last, `record`
    returns the hidden states that the next stage takes, and declares the other tensors that it sends as outputs,
    `p.output("residual", value)`.

    Attributes:
        takes_stages: True. Adapters without this attribute are not used for pipeline stages.
    """

    takes_stages: bool


@runtime_checkable
class ConfigAdapter(Protocol):
    """An adapter that can say of a configuration alone, before any weights are loaded, that it cannot be split.

    `dbo doctor` and a server ask it before the model is loaded. Other checks ask `decline` alone, which calls it.
    """

    def decline_config(self, config: Any, dtype: str) -> Decline | None:
        """Return why a model of this configuration cannot be split, or None.

        Args:
            config: the language model's part of config.json, as transformers reads it.
            dtype: type of the weights, such as `bfloat16`.
        """


class EncoderAdapter(Protocol):
    """Declares the programs of one family of vision encoders. `dbo_models.qwen_vl` has two examples."""

    def decline(self, encoder: Any) -> Decline | None:
        """Return why this encoder, as configured and loaded, cannot be split, or None if it can."""

    def estimate_flops(self, encoder: Any, grid: Sequence[int]) -> float:
        """Return the number of operations for an image or a video of *grid* (time, height, width, in patches).

        Micro-batches are balanced by this number, so only ratios matter.
        """

    def record(self, p: ProgramBuilder, encoder: Any, collectives: Collectives, pixels: Value, grids: Value) -> Value:
        """Declare the program of one micro-batch of images and return the value of their embeddings.

        `pixels` stands for the images' patches [patches, values], `grids` for a list of one (time, height, width) per
        image.
        """


def record_program(
    adapter: ModelAdapter | EncoderAdapter, model: Any, collectives: Collectives, has_side: bool = False
) -> Program | Decline:
    """Run an adapter once and return the program that it declares. *has_side* allows ops on the `side` lane.

    Returns:
        The program; or a decline, if recording shows that the model cannot be split.

    Raises:
        ProgramError: the adapter breaks its contract or fails. The message names the line.
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
    """Return the `file:line` of a class or function, for messages."""
    try:
        code = inspect.unwrap(thing)
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}"
    except Exception:  # noqa: BLE001 - a built-in, missing source, or a class that raises on inspection
        return f"{thing!r}, no source"


def _declare_inputs(p: ProgramBuilder, adapter: ModelAdapter | EncoderAdapter) -> list[Value]:
    """Declare the inputs that `record` takes as its last two parameters, identified by name."""
    try:
        names = list(inspect.signature(adapter.record).parameters)[-2:]
    except (TypeError, ValueError) as error:
        where = locate_source(type(adapter))
        raise ProgramError(f"record() of {name_adapter(adapter)} cannot be called ({error}). ({where})") from error
    for name in names:
        if name not in INPUTS:
            raise ProgramError(
                f"record() of {name_adapter(adapter)} takes the input {name!r}; adapters can take "
                f"{', '.join(INPUTS)}. ({locate_source(type(adapter))})"
            )
    return [p.input(name, **INPUTS[name]) for name in names]


def _check_ops(program: Program) -> None:
    """Raise ProgramError if an op is on an unknown lane, or lies between layers but belongs to none."""
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
