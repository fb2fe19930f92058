"""What a model adapter is, and how adapters are found and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, cast, runtime_checkable

from dbo_runtime.errors import ProgramError
from dbo_runtime.program import COMM, COMPUTE, SIDE, Program, ProgramBuilder, Value

GROUP = "dbo_runtime.adapters"
ENCODERS = "dbo_runtime.encoders"
LANES = (COMPUTE, COMM, SIDE)

X = "x"
POSITIONS = "positions"
INPUTS: dict[str, dict[str, int | None]] = {
    X: {"token_dim": 0},
    POSITIONS: {"token_dim": -1},  # a row of them, or one for each axis of a rotary embedding of images
    "pixels": {"token_dim": 0},  # an image's tokens are its patches
    "grids": {"token_dim": None, "request_dim": 0},  # a request is an image
}
"""The inputs that `record` of each kind of adapter takes as parameters, and how each is cut into micro-batches."""


class ExpertParallel(Protocol):
    """A mixture of experts, taken apart where its tokens travel between ranks. Each method is the function of one op.

    What lies between dispatch and combine is in the values handed on, so micro-batches share no state.
    """

    @property
    def exchanges_sizes(self) -> bool:
        """Whether `exchange_sizes` is an op of its own before `dispatch`, in which the host then waits for its result.

        Where a lane is a thread that may wait by itself, it is not, and `dispatch` does both.
        """

    @property
    def has_shared_experts(self) -> bool:
        """Whether there are experts that every token passes."""

    def gate(self, x: Any) -> Any:
        """Choose the experts of each token of *x* [tokens, hidden] -> routing."""

    def exchange_sizes(self, routing: Any) -> Any:
        """Exchange how many tokens go where -> routing. For the comm lane."""

    def dispatch(self, x: Any, routing: Any) -> tuple[Any, Any]:
        """Send tokens to their experts' ranks -> (what arrived here, the way back). For the comm lane."""

    def shared_experts(self, x: Any) -> Any:
        """Run the experts that every token passes [tokens, hidden] -> [tokens, hidden]."""

    def experts(self, arrived: Any) -> Any:
        """Run this rank's experts on what arrived -> [received, hidden]."""

    def combine(self, routed: Any, back: Any) -> Any:
        """Send results back and add them up -> [tokens, hidden]. For the comm lane."""

    def merge(self, routed: Any, *shared: Any) -> Any:
        """Scale *routed* in place and add what the shared experts gave, if there are any -> [tokens, hidden]."""


class LatentAttention(Protocol):
    """Multi-head latent attention (DeepSeek V2, arXiv:2405.04434, section 2.1), taken apart between queries and keys.

    Each method but `has_latent` is the function of one op. Only ops on `compute` may look at the forward context, so
    where the KV cache is written to is a value.
    """

    @property
    def has_latent(self) -> bool:
        """Whether queries and keys begin with one projection, `project`. Otherwise each has its own, inside its op."""

    def get_slots(self) -> Any:
        """Return where in the KV cache this micro-batch's tokens are written to [tokens], or None: nowhere."""

    def project(self, x: Any) -> Any:
        """Project *x* [tokens, hidden] -> latent [tokens, ranks of queries and of keys, rotary]."""

    def write_keys(self, latent: Any, positions: Any, slots: Any) -> tuple[Any, Any]:
        """Norm and turn keys, and write them to the cache -> ([tokens, rank], [tokens, 1, rotary]). May be beside."""

    def make_queries(self, latent: Any, positions: Any) -> Any:
        """Make queries -> [tokens, heads, head]."""

    def attend(self, queries: Any, keys: Any, rotary: Any) -> Any:
        """Attend to the cache, and to what `write_keys` gave -> [tokens, heads * head]."""

    def project_out(self, attended: Any) -> Any:
        """Project back -> [tokens, hidden]. Ends in an all-reduce, as attention whole does."""


class Collectives(Protocol):
    """How an adapter reaches a layer's communication without naming the framework that does it."""

    @property
    def reduces(self) -> bool:
        """Whether modules leave a sum over ranks to be made. Without one, declare no op for it."""

    def decompose(self, experts: Any) -> ExpertParallel | None:
        """Return the parts of a mixture of experts, or None if its tokens stay where they are: then it is one op.

        Raises:
            DeclineError: if tokens travel in a way that cannot be taken apart. The model then runs unsplit.
        """

    def decompose_attention(self, attention: Any) -> LatentAttention | None:
        """Return the parts of a latent attention, or None where it is one op: of another kind, or fused."""

    def without_reduce(self, module: Callable[..., Any]) -> Callable[..., Any]:
        """Return *module* with the all-reduce at its end left out: it gives this rank's part of the sum.

        Raises, when called, `ProgramError` if the module does not end in exactly one all-reduce.
        """

    def all_reduce(self, partial: Any) -> Any:
        """Return the sum of *partial* over the ranks, in the memory of *partial*. Blocks the lane that runs it."""


class ModelAdapter(Protocol):
    """Declares how one family of models runs. See `dbo_models.deepseek` for one of about 60 lines."""

    def decline(self, model: Any) -> str | None:
        """Return why this very model (as configured and loaded) cannot be split, or None if it can."""

    def record(self, p: ProgramBuilder, model: Any, collectives: Collectives, x: Value, positions: Value) -> Value:
        """Declare the program of one micro-batch and return the value of its hidden states.

        `x` will be the embedded tokens [tokens, hidden], `positions` their positions [tokens], or [axes, tokens].
        """


@runtime_checkable
class InputAdapter(Protocol):
    """An adapter of a model that keeps something for its next forward, token by token, beside what it is given."""

    def take_inputs(self, model: Any, x: Any, keep: bool) -> Any:
        """Return *x* [tokens, hidden] with that beside it [tokens, hidden and more]: it is cut as tokens are.

        With *keep*, leave it there for another forward of the same step; otherwise take it away as that would.
        """


@runtime_checkable
class StageAdapter(Protocol):
    """An adapter that declares a stage of a pipeline, too: the layers that are on this rank.

    On a stage that is not the first, `x` is the hidden states that the stage before hands over, and `record` declares
    what else it does as inputs, `p.input("residual")`, before any op. On one that is not the last it returns hidden
    states as the next stage takes them, and names what else that does, `p.output("residual", value)`.

    Attributes:
        takes_stages: True. Other adapters are asked about whole models only.
    """

    takes_stages: bool


class EncoderAdapter(Protocol):
    """Declares how one family of vision encoders runs. See `dbo_models.qwen_vl`."""

    def decline(self, encoder: Any) -> str | None:
        """Return why this very encoder (as configured and loaded) cannot be split, or None if it can."""

    def estimate_flops(self, encoder: Any, grid: Sequence[int]) -> float:
        """Return how much computing an image or a video of *grid* (time, height, width, in patches) takes.

        In any unit: micro-batches are balanced by it.
        """

    def record(self, p: ProgramBuilder, encoder: Any, collectives: Collectives, pixels: Value, grids: Value) -> Value:
        """Declare the program of one micro-batch of images and return the value of their embeddings.

        `pixels` will be the images' patches [patches, values], `grids` a list of (time, height, width) of each image.
        """


def record_program(
    adapter: ModelAdapter | EncoderAdapter, model: Any, collectives: Collectives, has_side: bool = False
) -> Program:
    """Run an adapter once and return the program it declares; with *has_side*, its ops may be on the `side` lane.

    Raises:
        ProgramError: if it breaks the contract, with the line where it does.
    """
    p = ProgramBuilder(has_side)
    inputs = [p.input(name, **INPUTS[name]) for name in list(inspect.signature(adapter.record).parameters)[-2:]]
    result = adapter.record(p, model, collectives, *inputs)
    if not isinstance(result, Value):
        where = inspect.getsourcefile(type(adapter)) or type(adapter).__name__
        raise ProgramError(f"record() of {name_adapter(adapter)} must return one Value, not {result!r}. ({where})")
    program = p.build(result) if has_side else p.build(result).fold_side()
    _check_places(program)
    return program


def get_adapter(architecture: str) -> ModelAdapter | None:
    """Return the adapter registered for an architecture name, or None if nobody registered one.

    Adapters are entry points of the group `dbo_runtime.adapters`, named like the architecture, that load to a class.

    Raises:
        ProgramError: if the one registered cannot be loaded or is no adapter.
    """
    entry = _find_entry(GROUP, architecture)
    return None if entry is None else cast(ModelAdapter, _load(entry, ModelAdapter))


def get_encoder_adapter(name: str) -> EncoderAdapter | None:
    """Return the adapter registered for encoders of a class of this name, or None if nobody registered one.

    As `get_adapter`, in the group `dbo_runtime.encoders`.
    """
    entry = _find_entry(ENCODERS, name)
    return None if entry is None else cast(EncoderAdapter, _load(entry, EncoderAdapter))


def list_encoders() -> set[str]:
    """Return the names of the classes of encoders that have an adapter."""
    return {entry.name for entry in entry_points(group=ENCODERS)}


def check_adapter(cls: Any, origin: str, contract: type = ModelAdapter) -> Any:
    """Return an instance of an adapter class after checking it against the contract.

    Raises:
        ProgramError: naming what is missing or takes the wrong arguments, and where.
    """
    if not inspect.isclass(cls):
        raise ProgramError(f"adapter {origin} must be a class, not {cls!r}.")
    needed = _list_methods(contract)
    offered = {name: method for name, method in _list_methods(InputAdapter).items() if hasattr(cls, name)}
    for name, method in {**needed, **offered}.items():
        declared = getattr(cls, name, None)
        if not callable(declared):
            raise ProgramError(f"adapter {origin} has no method {name}(). ({_locate(cls)})")
        wanted = list(inspect.signature(method).parameters)
        given = list(inspect.signature(declared).parameters)
        if given != wanted:
            raise ProgramError(
                f"adapter {origin}: {name}({', '.join(given)}) must take ({', '.join(wanted)}). ({_locate(declared)})"
            )
    try:
        adapter = cls()
    except Exception as error:
        raise ProgramError(
            f"adapter {origin} cannot be made by {cls.__name__}(): {error!r}. ({_locate(cls)})"
        ) from error
    return adapter


def name_adapter(adapter: ModelAdapter | EncoderAdapter) -> str:
    """Return `module.Class` of an adapter."""
    return f"{type(adapter).__module__}.{type(adapter).__qualname__}"


def _check_places(program: Program) -> None:
    """Raise ProgramError if an op is on a lane that models have not, or in no layer where there should be one."""
    inside = [number for number, op in enumerate(program.ops) if op.layer is not None]
    for number, op in enumerate(program.ops):
        if op.lane not in LANES:
            raise ProgramError(
                f"op {op.label!r} is on lane {op.lane!r}; a model's lanes are {', '.join(LANES)}. ({op.declared_at})"
            )
        if op.layer is None and inside and inside[0] < number < inside[-1]:
            raise ProgramError(
                f"op {op.label!r} is in no layer, but stands between layers; declare it inside `with p.layer(index):`. "
                f"({op.declared_at})"
            )
        if not inside and op.lane == COMM:
            raise ProgramError(
                f"op {op.label!r} communicates, but no op of the program is in a layer; declare each layer's inside "
                f"`with p.layer(index):`. ({op.declared_at})"
            )


def _find_entry(group: str, name: str) -> EntryPoint | None:
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    if len({entry.value for entry in found}) > 1:
        names = ", ".join(sorted(entry.value for entry in found))
        raise ProgramError(f"{name} has several adapters ({names}); uninstall all but one.")
    return found[0] if found else None


def _list_methods(contract: type) -> dict[str, Callable[..., Any]]:
    return {name: method for name, method in vars(contract).items() if inspect.isfunction(method) and name[0] != "_"}


def _load(entry: EntryPoint, contract: type) -> Any:
    try:
        cls = entry.load()
    except Exception as error:
        raise ProgramError(f"adapter {entry.value} of {entry.name} cannot be imported: {error!r}") from error
    return check_adapter(cls, entry.value, contract)


def _locate(thing: Any) -> str:
    code = inspect.unwrap(thing)
    try:
        return f"{inspect.getsourcefile(code)}:{inspect.getsourcelines(code)[1]}"
    except (TypeError, OSError):  # it is built in, or its source is not at hand
        return f"{code!r}, no source"
