"""Which tests are behind a serve command that would be split: those of its model, weights, drafter, ranks and options.

Each was compared inside vllm-ascend over the stand-in, one by one and not in every combination; docs/ascend.md says
how equal, and for which models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from dbo_runtime.vllm_plugin.api.known import HYBRID_MODELS
from tests.support.ascend.recipes import Recipe

EQUIVALENCE, FAMILIES, MINIMAX = "test_equivalence.py", "test_families.py", "test_minimax.py"
DEEPSEEK_V4, DEEPSEEK_V41, GLM5_NEXT = "test_deepseek_v4.py", "test_deepseek_v41.py", "test_glm5_next.py"
KIMI_K3 = "test_kimi_k3.py"
SPARSE, LINEAR = "test_sparse_attention.py", "test_linear_attention.py"
MINIMAX_M2, SPECULATIVE = "test_minimax_m2.py", "test_speculative.py"
MODELS: Mapping[str, str] = MappingProxyType(
    {
        "DeepseekV3ForCausalLM": EQUIVALENCE,
        "DeepseekV32ForCausalLM": SPARSE,
        "DeepseekV4ForCausalLM": DEEPSEEK_V4,
        "DeepseekV41ForCausalLM": DEEPSEEK_V41,
        "Glm5NextForConditionalGeneration": GLM5_NEXT,
        "KimiK3ForConditionalGeneration": KIMI_K3,
        "GlmMoeDsaForCausalLM": SPARSE,
        "MiniMaxM2ForCausalLM": MINIMAX_M2,
        "MiniMaxM3SparseForConditionalGeneration": MINIMAX,
        **dict.fromkeys(HYBRID_MODELS, LINEAR),
    }
)
"""The file of tests of an architecture; of others it is `FAMILIES`."""

WEIGHTS = {
    DEEPSEEK_V4: f"{DEEPSEEK_V4}::test_quantized_weights",
    DEEPSEEK_V41: f"{DEEPSEEK_V41}::test_quantized_weights",
    GLM5_NEXT: f"{GLM5_NEXT}::test_quantized_weights",
    KIMI_K3: f"{KIMI_K3}::test_quantized_weights",
    MINIMAX: f"{MINIMAX}::test_quantized_weights",
    MINIMAX_M2: f"{MINIMAX_M2}::test_minimax_m2_in_int8_with_drafts_is_equal_to_the_bit",
    SPARSE: f"{SPARSE}::test_quantized_weights",
    LINEAR: f"{LINEAR}::test_quantized_weights_are_equal_to_the_bit",
}
DRAFTERS = {
    DEEPSEEK_V4: f"{DEEPSEEK_V4}::test_drafts_of_an_mtp_layer_are_accepted_alike",
    GLM5_NEXT: f"{GLM5_NEXT}::test_drafts_are_verified_alike",
    SPARSE: f"{SPARSE}::test_drafts_of_an_mtp_layer_are_accepted_alike",
    LINEAR: f"{LINEAR}::test_drafts_are_verified_as_unsplit",
    MINIMAX: f"{MINIMAX}::test_drafts_are_verified_in_chunks_of_tokens",
    MINIMAX_M2: f"{MINIMAX_M2}::test_minimax_m2_in_int8_with_drafts_is_equal_to_the_bit",
}
DATA_PARALLEL = {
    DEEPSEEK_V4: f"{DEEPSEEK_V4}::test_data_parallel_ranks_of_chunks_are_equal",
    DEEPSEEK_V41: f"{DEEPSEEK_V41}::test_data_parallel_ranks_are_equal",
    GLM5_NEXT: f"{GLM5_NEXT}::test_data_parallel_ranks_are_equal",
    KIMI_K3: f"{KIMI_K3}::test_data_parallel_ranks_are_equal",
    EQUIVALENCE: "test_data_parallel.py::test_data_parallel_ranks_of_different_sizes_are_equal_to_the_bit",
    SPARSE: f"{SPARSE}::test_data_parallel_ranks_of_different_sizes_are_equal",
    LINEAR: f"{LINEAR}::test_data_parallel_ranks_of_different_sizes_are_equal_to_the_bit",
    MINIMAX: f"{MINIMAX}::test_data_parallel_ranks_of_chunks_are_equal",
}
PIPELINES = {SPARSE: f"{SPARSE}::test_stages_of_a_pipeline_are_equal"}
GRAPHS = {
    file: f"{file}::test_with_graphs_of_decodes_prefills_are_split"
    for file in (DEEPSEEK_V4, DEEPSEEK_V41, GLM5_NEXT, KIMI_K3, SPARSE)
}
OPTIONS_OF = {  # flags of a recipe, where the file of a model has tests of its own
    (DEEPSEEK_V4, "fc1"): f"{DEEPSEEK_V4}::test_layers_that_pass_on_chunks_of_tokens",
    (DEEPSEEK_V4, "shdp"): f"{DEEPSEEK_V4}::test_layers_that_pass_on_chunks_of_tokens",
    (DEEPSEEK_V4, "dsacp"): f"{DEEPSEEK_V4}::test_attention_from_chunks_of_tokens",
    **dict.fromkeys(
        [(DEEPSEEK_V41, "fc1"), (DEEPSEEK_V41, "shdp"), (DEEPSEEK_V41, "dsacp")],
        f"{DEEPSEEK_V41}::test_nano_batches_are_equal_to_unsplit_steps",
    ),
    (DEEPSEEK_V41, "fmc2"): f"{DEEPSEEK_V41}::test_quantized_weights",
    (GLM5_NEXT, "fc1"): f"{GLM5_NEXT}::test_nano_batches_are_equal_to_unsplit_steps",
    (DEEPSEEK_V4, "fmc2"): f"{DEEPSEEK_V4}::test_experts_of_chunks_that_kernels_dispatch",
}
OPTIONS = {  # where it has none
    "fc1": "test_flashcomm.py",
    "dsacp": "test_context_parallel.py",
    "eplb": "test_eplb.py::test_loads_are_equal_and_answers_close_before_and_after_experts_move",
    "fmc2": "test_mc2.py",
    "shdp": "test_sequence_parallel.py::test_chunks_of_tokens_are_dispatched",
}
FIRST_STEPS = "test_first_steps.py"  # of what is not proven
SHARED_KEYS = "test_decode_context_parallel.py"
OTHERWISE = {  # where the file of a model has no test of its own
    "weights": "test_quantized_weights.py::test_split_steps_are_equal_to_unsplit_ones",
    "drafter": f"{SPECULATIVE}::test_split_steps_with_drafts_are_equal_to_unsplit_ones",
    "data parallel": f"{FAMILIES}::test_tokens_are_dispatched_to_data_parallel_ranks",
    "pipeline": f"{EQUIVALENCE}::test_a_prefill_cut_at_any_request_boundary_is_equal_to_the_bit",
    "graphs": "test_settings.py::test_with_graphs_of_decodes_prefills_are_split",
    "connectors": "test_kv_connectors.py",
}


def list_proofs(recipe: Recipe, architecture: str, sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield the tests behind a command that serves a model of this *architecture* with these parallel *sizes*."""
    model = MODELS.get(architecture, FAMILIES)
    yield model
    if recipe.quantization:
        yield WEIGHTS.get(model, OTHERWISE["weights"])
    if recipe.drafter:
        yield DRAFTERS.get(model, OTHERWISE["drafter"])
    if sizes["data"] > 1 and sizes["expert"] > 1:
        yield DATA_PARALLEL.get(model, OTHERWISE["data parallel"])
    if sizes["pipeline"] > 1:
        yield PIPELINES.get(model, OTHERWISE["pipeline"])
    if recipe.cudagraph_mode:
        yield GRAPHS.get(model, OTHERWISE["graphs"])
    if recipe.decode_context_parallel not in ("", "1"):
        yield SHARED_KEYS
    if recipe.connectors:
        yield OTHERWISE["connectors"]
    yield from (OPTIONS_OF.get((model, flag), OPTIONS[flag]) for flag in recipe.flags.split() if flag in OPTIONS)


def list_all() -> set[str]:
    """Return all tests that are named here."""
    tables = MODELS, WEIGHTS, DRAFTERS, DATA_PARALLEL, PIPELINES, GRAPHS, OPTIONS_OF, OPTIONS, OTHERWISE
    return {FAMILIES, FIRST_STEPS, SHARED_KEYS, *(test for table in tables for test in table.values())}
