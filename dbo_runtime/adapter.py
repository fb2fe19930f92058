"""The contracts of adapters, and how one records a program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from dbo_runtime.decline import Decline, DeclineError
from dbo_runtime.errors import DboError, ProgramError
from dbo_runtime.program import COMM, COMPUTE, SIDE, Program, ProgramBuilder, Value

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


class ExpertParallel(Protocol):
    """A mixture of experts, decomposed because its tokens are dispatched to other ranks. Each method is one op.

    All state between dispatch and combine is in the values passed on, so micro-batches share none.
    """

    @property
    def exchanges_sizes(self) -> bool:
        """Whether `exchange_sizes` is a separate op; the host then waits for its result in `dispatch`.

        It is not where a lane is a thread, which can wait without the host: `dispatch` then does both.
        """

    @property
    def has_shared_experts(self) -> bool:
        """Whether there are shared experts, which every token passes."""

    @property
    def is_movable(self) -> bool:
        """Whether `gate`, `experts` and `merge` may run while another micro-batch attends.

        They may if they read no forward context and their kernels share no scratch memory with attention's.
        """

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether each tensor parallel rank dispatches a chunk of the tokens, and no all-reduce follows.

        Then `gate`, `dispatch`, `combine` and `merge` take and return this chunk; see `Collectives.take_chunk`.
        """

    @property
    def reduces_shared_experts(self) -> bool:
        """Whether shared experts take all tokens, not a chunk, and return parts of a sum, for `reduce_scatter`."""

    @property
    def is_fused(self) -> bool:
        """Whether kernels dispatch and combine: then `run_fused` takes the place of all from `gate` to `combine`."""

    def run_fused(self, x: Any, tokens: Any, input_ids: Any = None) -> Any:
        """Route a chunk *x* [chunk, hidden] of *tokens* tokens and run its experts -> [chunk, hidden].

        *input_ids* are as in `gate`.
        """

    def gate(self, x: Any, tokens: Any = None, input_ids: Any = None) -> Any:
        """Choose the experts of each token of *x* [tokens, hidden] -> routing; *tokens* of all chunks if it is one.

        *input_ids* are the token ids of *x* [tokens], where experts are chosen by them.
        """

    def exchange_sizes(self, routing: Any) -> Any:
        """Exchange how many tokens go where -> routing. For the comm lane."""

    def dispatch(self, x: Any, routing: Any) -> tuple[Any, Any]:
        """Send tokens to their experts' ranks -> (tokens received, handle for `combine`). For the comm lane."""

    def shared_experts(self, x: Any) -> Any:
        """Run the shared experts [tokens, hidden] -> [tokens, hidden]."""

    def experts(self, received: Any) -> Any:
        """Run this rank's experts on the tokens received -> [received, hidden]."""

    def combine(self, routed: Any, handle: Any) -> Any:
        """Return results to their tokens' ranks and sum them -> [tokens, hidden]. For the comm lane."""

    def merge(self, routed: Any, *shared: Any) -> Any:
        """Scale *routed* in place and add the shared experts' result, if there is one -> [tokens, hidden]."""


class LatentAttention(Protocol):
    """Multi-head latent attention (DeepSeek V2, arXiv:2405.04434, section 2.1), decomposed into queries and keys.

    Each method is one op's function. Only ops on `compute` may read the forward context, so the slots of the KV cache
    are a value.
    """

    @property
    def has_latent(self) -> bool:
        """Whether queries and keys share a first projection, `project`. Otherwise each op has its own."""

    def get_slots(self) -> Any:
        """Return the slots of the KV cache that this micro-batch's tokens are written to [tokens], or None for none."""

    def project(self, x: Any) -> Any:
        """Project *x* [tokens, hidden] -> latent [tokens, ranks of queries and of keys, rotary]."""

    def write_keys(self, latent: Any, positions: Any, slots: Any) -> tuple[Any, Any]:
        """Norm keys, apply the rotary embedding, write them to the cache -> ([tokens, rank], [tokens, 1, rotary]).

        May run on the `side` lane.
        """

    def make_queries(self, latent: Any, positions: Any) -> Any:
        """Make queries -> [tokens, heads, head]."""

    def attend(self, queries: Any, keys: Any, rotary: Any) -> Any:
        """Attend to the cache and to the results of `write_keys` -> [tokens, heads * head]."""

    def project_out(self, attended: Any) -> Any:
        """Project back -> [tokens, hidden]. Ends in an all-reduce, as attention in one op does."""


class Collectives(Protocol):
    """An adapter's access to a layer's communication, independent of the serving framework."""

    @property
    def reduces(self) -> bool:
        """Whether results of modules have to be summed over ranks. If not, declare no op for it."""

    def decompose(
        self, experts: Any, get_logits: Callable[[Any], Any] | None = None, takes_chunks: bool = False
    ) -> ExpertParallel | None:
        """Return the parts of a mixture of experts, or None if its tokens stay on their rank: then it is one op.

        Experts that do not hold their gate are routed by *get_logits*, [tokens, hidden] -> [tokens, experts]. With
        *takes_chunks* the caller declares the ops of sequence-parallel parts; see `is_sequence_parallel`.

        Raises:
            DeclineError: if its tokens are dispatched, but it cannot be decomposed, or is sequence parallel and the
                caller does not take that. The model then runs unsplit.
        """

    def decompose_attention(self, attention: Any) -> LatentAttention | None:
        """Return the parts of a latent attention, or None if it is one op: of another kind, or fused."""

    def without_reduce(self, module: Callable[..., Any]) -> Callable[..., Any]:
        """Return *module* without the all-reduce at its end: it returns this rank's part of the sum.

        Raises, when called, `ProgramError` if the module does not end in exactly one all-reduce.
        """

    def all_reduce(self, partial: Any) -> Any:
        """Sum *partial* over the ranks in place, and return it. Blocks the lane that runs it."""

    def take_chunk(self, x: Any) -> tuple[Any, Any]:
        """Return this rank's chunk of *x* [tokens, hidden] -> ([chunk, hidden], the number of tokens).

        Chunks of all ranks are equal: the last ones are padded with zeros.
        """

    def reduce_scatter(self, partial: Any) -> tuple[Any, Any]:
        """Sum *partial* [tokens, hidden] over the ranks -> as `take_chunk`, of the sum. For the comm lane."""

    def all_gather(self, chunk: Any, tokens: Any) -> Any:
        """Return the tokens of all ranks' chunks [chunk, hidden] -> [tokens, hidden]. For the comm lane."""


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
