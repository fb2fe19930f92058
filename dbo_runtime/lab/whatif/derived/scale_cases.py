"""Derive the costs of the cases that `dbo plan --scale` spreads over many chips: DeepSeek-R1 and Qwen3-235B.

Attention is data parallel and experts are spread over all ranks, as DeepSeek, SGLang and CloudMatrix-Infer serve. Every
op is a roofline over published rates; nothing is fitted to a step. Run it to write the files anew:

    python -m dbo_runtime.lab.whatif.derived.scale_cases
"""

from __future__ import annotations

from dataclasses import dataclass

from dbo_runtime.lab.whatif.derived.decode_cases import (
    HANDOVER,
    HEAD,
    HEADS,
    KERNEL,
    KV_RANK,
    MLP,
    Q_RANK,
    ROTARY,
    VALUE,
    list_layers,
)
from dbo_runtime.lab.whatif.derived.files import round_cost, write_files
from dbo_runtime.lab.whatif.expert_models import EXPERT_MODELS, ExpertModel
from dbo_runtime.lab.whatif.fabrics import FABRICS
from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import LayerRun, OpSpec, ProgramSpec

RANKS = 32  # of the published prefills (EP 32); `dbo plan --scale` scales from there


@dataclass(frozen=True)
class Chip:
    """What a rank computes with.

    Attributes:
        name: name in cost files.
        products: operations a second in one byte a number.
        attention: operations a second of attention, in bf16.
        weights, cache: bytes a second at which products with few tokens read weights, and decodes the KV cache.
        source: origin of these numbers.
        network: source of what is sent, by phase.
        contention: contention of lanes, by phase, where a source gives it.
    """

    name: str
    products: float
    attention: float
    weights: float
    cache: float
    source: str
    network: dict[str, str]
    contention: dict[str, dict[str, float]]


_ASCEND_SOURCE = (
    "arXiv:2506.12708 (2025-06-15, read in summaries): int8 products reach 77.4 % of the peak, attention 65.4 % of "
    "the bf16 peak and 84.1 % of the bandwidth; 752 TOPS int8 a die (from 1943 tokens/s at 1.29 a TFLOPS of two dies), "
    "half as much bf16, 1.6 TB/s"
)
_UNIFIED_BUS = "same: dispatch of 128 tokens 116 us (EP 8) to 152 us (EP 256), combine 118 to 149 us"
_ROCE = "assumed: 25 GB/s a chip between hosts of 8, start-up of dispatch and combine as on 910C (76 and 74.5 us)"
CHIPS = {
    "910b": Chip(
        "Ascend 910B",
        752e12 * 0.774,
        376e12 * 0.654,
        1.6e12 * 0.841,
        1.6e12 * 0.841,
        f"{_ASCEND_SOURCE}; a 910B is assumed to be such a die",
        {"prefill": _ROCE, "decode": _ROCE},
        {},
    ),
    "910c": Chip(
        "Ascend 910C",
        752e12 * 0.774,
        376e12 * 0.654,
        1.6e12 * 0.841,
        1.6e12 * 0.841,
        f"{_ASCEND_SOURCE}; a rank is a die",
        {"prefill": _UNIFIED_BUS, "decode": _UNIFIED_BUS},
        {},
    ),
    "h800": Chip(
        "NVIDIA H800",
        1093e12,
        660e12,
        2.32e12,
        3.0e12,
        "DeepGEMM's README (deepseek-ai/DeepGEMM, 2025-02): grouped products of prefill reach 1093 TFLOPS in FP8 at "
        "least, products of 64 tokens read 2320 GB/s; FlashMLA's (deepseek-ai/FlashMLA, 2025-04): attention up to 660 "
        "TFLOPS and 3000 GB/s",
        {
            "prefill": "DeepEP's docs/legacy.md (deepseek-ai/DeepEP): normal kernels, 43 to 58 GB/s over RDMA, 24 of "
            "132 SMs, which is the contention of compute, 1.22. Assumed: they start as the low-latency kernels do",
            "decode": "DeepEP's docs/legacy.md (deepseek-ai/DeepEP): low-latency kernels, 128 tokens in 118 to 194 us "
            "(dispatch) and 195 to 360 us (combine) on 16 to 256 GPUs, which is 44 and 65 us of start-up and bytes to "
            "other hosts at the link's 50 GB/s; they use no SM while data travels, so contention is 1",
        },
        {"prefill": {"compute": 132 / 108, "comm": 1.0}, "decode": {"compute": 1.0, "comm": 1.0}},
    ),
}


def read(chip: Chip, weights: float, kernels: int, tokens: float = 1.0) -> ComputeCost:
    """Return the cost of a product with *weights* numbers of a byte, each met *tokens* times for each token."""
    return ComputeCost(kernels * KERNEL, 2 * weights * tokens / chip.products, weights / chip.weights)


def stream(chip: Chip, model: ExpertModel, tensors: int) -> ComputeCost:
    """Return the cost of a kernel that reads and writes so many hidden states in bf16."""
    return ComputeCost(KERNEL, tensors * 2 * model.hidden / chip.cache)


def attend(chip: Chip, pair: float, decode_pair: float, cached: float) -> ComputeCost:
    """Return the cost of attention: operations of a pair in prefills and in decodes, and bytes of a cached token."""
    return ComputeCost(
        KERNEL,
        per_pair=pair / chip.attention,
        per_context_pair=pair / chip.attention,
        per_decode_pair=max(decode_pair / chip.attention, cached / chip.cache),
    )


def derive_deepseek(chip: Chip) -> dict[str, OpCost]:
    """Return the cost of each compute op of DeepSeek-R1, by its name in `models/layers.py`.

    Prefills expand the latent vector into keys and values. Decodes absorb these products into queries and output, which
    meets as many weights, and attend to latent vectors.
    """
    model = EXPERT_MODELS["r1"]
    expand = KV_RANK * HEADS * (HEAD + VALUE)
    return {
        "attn_norm": stream(chip, model, 4),
        "slots": ComputeCost(),
        "latent": read(chip, model.hidden * (Q_RANK + KV_RANK + ROTARY), 2),
        "keys": ComputeCost(KERNEL),
        "queries": read(chip, Q_RANK * HEADS * (HEAD + ROTARY) + expand, 4),
        "attention": attend(
            chip,
            2 * HEADS * (HEAD + ROTARY + VALUE),
            2 * HEADS * (2 * KV_RANK + ROTARY),
            2 * (KV_RANK + ROTARY),
        ),
        "attn_out": read(chip, HEADS * VALUE * model.hidden, 2),
        "mlp_norm": stream(chip, model, 4),
        "mlp": read(chip, 3 * model.hidden * MLP, 3),
        "gate": ComputeCost(2 * KERNEL, 2 * model.hidden * 256 / chip.attention, model.hidden * 256 * 4 / chip.weights),
        "shared_experts": read(chip, 3 * model.hidden * 2048, 3),
        "experts": derive_experts(chip, 3 * model.hidden * 2048, model),
        "merge": stream(chip, model, 3),
        "final_norm": stream(chip, model, 4),
    }


def derive_experts(chip: Chip, weights: float, model: ExpertModel) -> ComputeCost:
    """Return the cost of experts: as many rows as a rank sends, and the weights of as many experts as it has."""
    each = read(chip, weights, 3, model.chosen)
    return ComputeCost(each.fixed, each.per_token, each.weights * model.count_experts(RANKS))


def derive_qwen(chip: Chip) -> dict[str, OpCost]:
    """Return the cost of each compute op of Qwen3-235B: 64 heads of 128, 4 of keys and values, no shared expert."""
    model = EXPERT_MODELS["qwen3-235b"]
    pair = 2 * 64 * 2 * 128
    return {
        "attn_norm": stream(chip, model, 4),
        "qkv": read(chip, model.hidden * (64 + 2 * 4) * 128, 3),
        "attention": attend(chip, pair, pair, 2 * 2 * 4 * 128),
        "attn_out": read(chip, 64 * 128 * model.hidden, 1),
        "mlp_norm": stream(chip, model, 4),
        "gate": ComputeCost(2 * KERNEL, 2 * model.hidden * 128 / chip.attention, model.hidden * 128 * 4 / chip.weights),
        "experts": derive_experts(chip, 3 * model.hidden * 1536, model),
        "merge": stream(chip, model, 3),
        "final_norm": stream(chip, model, 4),
    }


def list_qwen_layers(layers: int = 94) -> tuple[LayerRun, ...]:
    """Return the layers of Qwen3-235B, all with experts."""

    def body(stream: tuple[str, ...]) -> tuple[OpSpec, ...]:
        return (
            OpSpec("attn_norm", "compute", stream, outputs=2, overwrites=stream),
            OpSpec("qkv", "compute", ("attn_norm",)),
            OpSpec("attention", "compute", ("qkv",), ordered=True),
            OpSpec("attn_out", "compute", ("attention",)),
            OpSpec("mlp_norm", "compute", after := ("attn_out", "attn_norm.1"), outputs=2, overwrites=after),
            OpSpec("gate", "compute", ("mlp_norm",)),
            OpSpec("dispatch", "comm", ("mlp_norm", "gate"), outputs=2, communicator="experts"),
            OpSpec("experts", "compute", ("dispatch",)),
            OpSpec("combine", "comm", ("experts", "dispatch.1"), communicator="experts"),
            OpSpec("merge", "compute", ("combine",), overwrites=("combine",)),
        )

    last = ("merge", "mlp_norm.1")
    final = OpSpec("final_norm", "compute", last, overwrites=last)
    return LayerRun(1, body(("embedded",))), LayerRun(layers - 1, body(last)), LayerRun(1, (final,), layered=False)


def derive_table(key: str, chip_key: str, phase: str) -> CostTable:
    """Return the costs of a model on a chip, for one phase."""
    model, chip, fabric = EXPERT_MODELS[key], CHIPS[chip_key], FABRICS[f"{phase}-{chip_key}"]
    is_deepseek = key == "r1"
    compute = derive_deepseek(chip) if is_deepseek else derive_qwen(chip)
    ops: dict[str, OpCost] = {
        **compute,
        "dispatch": fabric.price_dispatch(model, RANKS),
        "combine": fabric.price_combine(model, RANKS),
    }
    layers = list_layers(False) if is_deepseek else list_qwen_layers()
    program = ProgramSpec(("embedded", "positions") if is_deepseek else ("embedded",), layers, ("final_norm",))
    names = [op.name for run in layers for op in run.ops]
    vocabulary = (129_280 if is_deepseek else 151_936) * model.hidden * 2 / chip.weights  # the head, in bf16
    source = (
        f"Given by {chip.source}. {chip.network[phase]}. Assumed: {model.name} in one byte a weight; attention data "
        f"parallel and experts over {RANKS} ranks; experts get tokens evenly; every op a roofline of its weights and "
        "operations; 2 us a kernel, 2 us to hand over between lanes; ops are issued at no cost; the head of the "
        "vocabulary is outside of ops. Nothing is fitted. tools/derive_scale_cases.py has the arithmetic, "
        "docs/scale.md the reasons."
    )
    return CostTable(
        Provenance(
            kind="modelled",
            source=source,
            date="2026-11-25",
            machine={"platform": "cuda" if chip_key == "h800" else "npu", "chip": chip.name},
            model={"name": model.name},
            parallel={"tensor": 1, "data": RANKS, "expert": RANKS},
            versions={},
        ),
        program,
        {name: round_cost(ops[name]) for name in dict.fromkeys(names)},
        chip.contention.get(phase, {}),
        HostCost(unsplit=round(vocabulary, 7), split=round(vocabulary, 7), handover=HANDOVER),
        {},
    )


def derive_tables() -> dict[str, CostTable]:
    """Return the costs of each case, by its name.

    Decodes of DeepSeek-R1 on Ascend have cases of their own already. Of Qwen3, one case has both phases there.
    """
    cases = (
        ("r1-prefill-910b", "r1", "910b", "prefill"),
        ("r1-prefill-910c", "r1", "910c", "prefill"),
        ("r1-prefill-h800", "r1", "h800", "prefill"),
        ("r1-decode-h800", "r1", "h800", "decode"),
        ("qwen3-235b-910b", "qwen3-235b", "910b", "prefill"),
        ("qwen3-235b-910c", "qwen3-235b", "910c", "prefill"),
        ("qwen3-235b-prefill-h800", "qwen3-235b", "h800", "prefill"),
        ("qwen3-235b-decode-h800", "qwen3-235b", "h800", "decode"),
    )
    return {name: derive_table(model, chip, phase) for name, model, chip, phase in cases}


if __name__ == "__main__":
    write_files(derive_tables())
