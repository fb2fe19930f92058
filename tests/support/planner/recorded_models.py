"""Programs of every registered adapter, recorded from models that have no weights: parts that say what they are."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from itertools import product
from typing import Any, NamedTuple

from dbo_runtime.adapters.contract import EncoderAdapter, ModelAdapter, StageAdapter, name_adapter, record_program
from dbo_runtime.adapters.registry import ENCODERS, GROUP, check_adapter
from dbo_runtime.ir.program import Program

LAYERS = 7
DENSE = 2  # the first layers have no experts
STAGES = {"whole": (0, LAYERS), "first": (0, 3), "middle": (3, 5), "last": (5, LAYERS)}
KIMI_ATTENTIONS = ("AscendKimiK3DeltaAttention", "AscendKimiMLAAttention")  # distinguished by their classes
AUXILIARY = (0, 3, 4, LAYERS)  # numbers of layers after which a drafter reads the hidden states

# What a part has only where it is given: asked for with `hasattr`, or with False as its default.
OPTIONAL = frozenset(
    {
        "attn",
        "aux_hidden_state_layers",
        "block_sparse_moe",
        "enable_dsa_cp",
        "experts",
        "linear_attn",
        "self_attn",
        "use_attn_reduce_scatter_for_moe",
        "use_sequence_parallel",
        "use_sequence_parallel_moe",
    }
)


class Part:
    """A part of a model: it can be called, and has what it is given, and further parts for what else is asked for."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name in OPTIONAL or name.startswith("__"):
            raise AttributeError(name)
        return Part()

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("a part is called while a program is recorded")


class Form(NamedTuple):
    """How a model is served.

    Attributes:
        experts: what `Collectives.decompose` says of them; None if their tokens stay on their rank.
        chunks: whether vLLM's own layers are sequence parallel.
        side: whether there is a side lane.
        drafted: whether a drafter reads hidden states between layers.
        stage: of `STAGES`.
    """

    experts: dict[str, bool] | None
    chunks: bool
    side: bool
    drafted: bool
    stage: str


EXPERTS: dict[str, dict[str, bool] | None] = {
    "tensor parallel": None,
    "all_gather": {"may_move_to_side": True},
    "all_to_all": {"exchanges_sizes": True},
    "sequence parallel": {"is_sequence_parallel": True, "reduces_shared_experts": True},
    "fused": {"is_sequence_parallel": True, "reduces_shared_experts": True, "is_fused": True},
}
SWITCHES = ("may_move_to_side", "exchanges_sizes", "is_sequence_parallel", "reduces_shared_experts", "is_fused")


def list_forms(takes_stages: bool) -> Iterator[Form]:
    """Yield what can be combined."""
    stages = STAGES if takes_stages else ("whole",)
    for (name, experts), side, drafted, stage in product(EXPERTS.items(), (False, True), (False, True), stages):
        for chunks in (False, True) if name in ("sequence parallel", "fused") else (False,):
            if name != "fused" or chunks:  # kernels that dispatch are given chunks
                yield Form(experts, chunks, side, drafted, stage)


class Collectives:
    """Says of communication what a form does."""

    def __init__(self, form: Form) -> None:
        self._experts = form.experts
        self.reduces = form.experts is None or form.chunks

    def decompose(self, experts: Any, get_logits: Any = None, takes_chunks: bool = False) -> Any:
        if self._experts is None:
            return None
        return Part(experts=Part(), has_shared_experts=True, **{**_OFF, **self._experts})

    def decompose_attention(self, attention: Any) -> Any:
        return Part(has_latent=True)

    def divide_attention(self, attention: Any, attend: Any) -> None:
        """Return None: attention stays one op."""

    def without_reduce(self, module: Any) -> Any:
        return module

    all_reduce = take_chunk = reduce_scatter = all_gather = staticmethod(lambda *_: None)


_OFF = dict.fromkeys(SWITCHES, False)


def make_model(form: Form, adapter: str) -> Part:
    """Return a model of seven layers, of any family: multimodal ones hold the others' parts in `language_model`."""
    start, end = STAGES[form.stage]
    layers = [_make_layer(index, form, adapter) for index in range(LAYERS)]
    decoder = Part(layers=layers, start_layer=start, end_layer=end, hc_mult=4, _needs_mtp_hidden_states=form.drafted)
    decoder.use_sequence_parallel_moe = decoder.use_sequence_parallel = decoder.is_sequence_parallel = form.chunks
    decoder.config = Part(attn_res_block_size=3)
    decoder.aux_hidden_state_layers = AUXILIARY if form.drafted and form.stage == "whole" else ()
    deepstack = {"deepstack_num_level": 3, "deepstack_input_embeds": [Part(is_meta=False)] * 3}
    return Part(model=decoder, language_model=Part(model=decoder), **deepstack)


def _make_layer(index: int, form: Form, adapter: str) -> Part:
    is_dense = index < DENSE and "DeepseekV4" not in adapter
    mlp = Part(hash=index == 0) if is_dense else Part(hash=index == 0, experts=Part())
    attention = "linear_attn" if index % 2 and "Hybrid" in adapter else "self_attn"
    module = type(KIMI_ATTENTIONS[index % 2], (Part,), {})() if "KimiK3" in adapter else Part()
    chunks = {"use_sequence_parallel_moe": True} if form.chunks and index != LAYERS - 2 else {}
    moe = Part(experts=Part())  # Gemma 4's, in parallel with the MLP
    return Part(mlp=mlp, moe=moe, enable_dsa_cp=False, **{attention: module}, **chunks)


def make_encoder() -> Part:
    """Return a vision encoder whose blocks differ, and of which three feed the language model."""
    return Part(
        blocks=[Part() for _ in range(LAYERS)],
        fullatt_block_indexes=[3],
        deepstack_visual_indexes=[1, 3, 5],
        deepstack_merger_list=[Part(), Part(), Part()],
    )


def list_adapters() -> dict[str, ModelAdapter]:
    """Return all registered adapters of models, by where they are."""
    return {
        entry.value: check_adapter(entry.load(), entry.value)
        for entry in entry_points(group=GROUP)
        if entry.value.startswith("dbo_models.")
    }


def list_encoders() -> dict[str, EncoderAdapter]:
    """Return all registered adapters of encoders, by where they are."""
    return {entry.value: entry.load()() for entry in entry_points(group=ENCODERS)}


def record_forms(adapter: ModelAdapter) -> Iterator[tuple[Form, Program]]:
    """Yield the program of each form."""
    takes_stages = isinstance(adapter, StageAdapter) and adapter.takes_stages
    for form in list_forms(takes_stages):
        program = record_program(adapter, make_model(form, name_adapter(adapter)), Collectives(form), form.side)
        assert isinstance(program, Program), program
        yield form, program
