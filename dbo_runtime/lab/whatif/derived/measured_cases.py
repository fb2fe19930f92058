"""Derive the costs of published cases that were measured unsplit and split, from the unsplit step alone.

What is given and what is assumed is said with the numbers here, and in `docs/planner.md`. Contention is the only number
that is fitted to a split step: of `r1-ep16-1589` to another run on such chips, of `qwen3-tp4-44677` to its own. Run it
to write the files anew:

    python -m dbo_runtime.lab.whatif.derived.measured_cases
"""

from __future__ import annotations

from dataclasses import replace

from dbo_runtime.lab.whatif.derived.files import round_cost, write_files
from dbo_runtime.planner.costs.batch_features import BatchFeatures
from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import LayerRun, OpSpec, ProgramSpec

WITHIN, BETWEEN = 121.3e9, 25e9  # bytes/s of a 910B: within a host (#4894's profile), to another (200 Gbit/s, assumed)
FITTED_TO_941 = 1.41  # contention with which `r1-tp16-941` gains the published 1.12x
FITTED_TO_44677 = 1.74  # contention with which `qwen3-tp4-44677` takes the published 1047 ms

HIDDEN, DENSE, MOE = 7168, 3, 58  # DeepSeek-R1
MLA, DENSE_MLP, EXPERT, CHOSEN = 187e6, 396e6, 44e6, 8  # multiply-adds a token: of attention, of an MLP, of an expert
PAIR = 40_960  # multiply-adds of a query and a key: 128 heads of 192 + 128
WEIGHT = 1 / 1.6e12  # seconds to read a byte of weights, as the other cases of 910B have it


def reduce_bytes(ranks: int, rate: float) -> float:
    """Return the seconds a byte of an all-reduce among *ranks* that each send *rate* bytes a second."""
    return 2 * (ranks - 1) / ranks / rate


def derive_1589() -> CostTable:
    """DeepSeek on 16 910B, DP 2, TP 8, EP 16: 16 prompts of 1024 tokens on each of two hosts, 4017 ms unsplit."""
    tokens, size = 16 * 1024, 2 * HIDDEN
    start = {"attn_reduce": 25e-6, "mlp_reduce": 25e-6, "dispatch": 8.3e-6, "combine": 33.3e-6}  # as of 8, 2 and 16
    near, far = reduce_bytes(8, WITHIN), 1 / BETWEEN
    # Tokens are gathered from the other host, and results scattered to it and reduced within the host.
    rates = {"attn_reduce": near, "mlp_reduce": near, "dispatch": far, "combine": far + near}
    ops: dict[str, OpCost] = {name: CommCost(start[name], rate, size) for name, rate in rates.items()}
    # Multiply-adds a token on each chip; its experts get the tokens of both hosts.
    shares = {"attention": MLA / 8, "mlp": DENSE_MLP / 8, "shared_experts": EXPERT / 8, "experts": EXPERT * CHOSEN / 8}
    weights = {"attention": MLA / 8, "mlp": DENSE_MLP / 8, "shared_experts": EXPERT / 8, "experts": 16 * EXPERT}
    pairs = {"attention": PAIR / 8}
    ops |= {
        name: ComputeCost(0.0, share, weights[name] * WEIGHT, pairs.get(name, 0.0), pairs.get(name, 0.0))
        for name, share in shares.items()
    }
    features = BatchFeatures(tokens, pairs=16 * 1024 * 1025 / 2)
    program = ProgramSpec(("embedded",), list_1589_layers(), ("combine", "shared_experts"))
    return CostTable(
        provenance=describe(
            "vllm-project/vllm-ascend#1589 (merged pull request, 2025-07-02): DBO with expert parallel, DP 2, TP 8, EP "
            "16, 32 prompts of 1024 tokens, up to 32784 tokens a step. Given: a mean time to the first token of 4017 "
            "ms (and 3017 with its overlap). Assumed: that is one step, of 16 prompts on each of two hosts of 8 910B; "
            "DeepSeek-R1 in W8A8; all-reduces at 121.3 GB/s within a host, as in #4894's profile; tokens gathered from "
            "the other host and results scattered to it at 25 GB/s a chip; compute is all the rest, shared out by "
            "operations. Contention 1.41 is fitted to another run, #941, and nothing to this one. "
            "tools/derive_measured_cases.py has the arithmetic, docs/planner.md the reasons.",
            "Ascend 910B",
            "DeepSeek-R1 W8A8",
            {"tensor": 8, "data": 2, "expert": 16, "hosts": 2},
        ),
        program=program,
        ops=share_out(program, ops, features, 4017e-3),
        contention={"compute": FITTED_TO_941, "comm": FITTED_TO_941},
        host=HostCost(),
        errors={},
    )


def list_1589_layers() -> tuple[LayerRun, ...]:
    """Return dense layers, which reduce within a host, and layers with experts."""

    def attend(*stream: str) -> tuple[OpSpec, ...]:
        return OpSpec("attention", "compute", stream, ordered=True), OpSpec("attn_reduce", "comm", ("attention",))

    dense = OpSpec("mlp", "compute", ("attn_reduce",)), OpSpec("mlp_reduce", "comm", ("mlp",))
    moe = (
        OpSpec("dispatch", "comm", ("attn_reduce",)),
        OpSpec("shared_experts", "compute", ("attn_reduce",)),
        OpSpec("experts", "compute", ("dispatch",)),
        OpSpec("combine", "comm", ("experts",)),
    )
    return (
        LayerRun(1, (*attend("embedded"), *dense)),
        LayerRun(DENSE - 1, (*attend("mlp_reduce"), *dense)),
        LayerRun(1, (*attend("mlp_reduce"), *moe)),
        LayerRun(MOE - 1, (*attend("combine", "shared_experts"), *moe)),
    )


def derive_44677() -> CostTable:
    """Qwen3-32B in bf16 on four H200, TP 4: 4 prompts of 4096 tokens, 1110 ms unsplit, of which 248 all-reduce."""
    layers, hidden, tokens = 64, 5120, 4 * 4096
    wall, busy, reducing = 1110e-3, 1086e-3, 248e-3
    start, size = 20e-6, 2 * hidden
    reduce = CommCost(start, (reducing / (2 * layers) - start) / (size * tokens), size)
    # Multiply-adds a token: projections of 64 heads of 128 and 8 of keys and values, and an MLP of 25600; a pair has
    # 128 for each head, twice. Weights are read at 4.8 TB/s, bf16.
    projections, mlp = hidden * (2 * 64 + 2 * 8) * 128, 3 * hidden * 25_600
    read = 2 / 4 / 4.8e12
    ops: dict[str, OpCost] = {
        "attention": ComputeCost(0.0, projections, projections * read, 2 * 64 * 128, 2 * 64 * 128),
        "attn_reduce": reduce,
        "mlp": ComputeCost(0.0, mlp, mlp * read),
        "mlp_reduce": reduce,
    }
    program = list_dense(layers)
    features = BatchFeatures(tokens, pairs=4 * 4096 * 4097 / 2)
    return CostTable(
        provenance=describe(
            "vllm-project/vllm#44677 (open pull request, 2026-06-05): Qwen3-32B in bf16 on 4 H200, TP 4, 4 prompts of "
            "4096 tokens, from a trace. Given: 1110 ms unsplit, of which the GPU is busy for 1086 and all-reduces for "
            "248 (and 1047 ms with its overlap). Assumed: 20 us to start an all-reduce; what is not busy is outside of "
            "ops, split or not; compute is shared out by operations; weights are read at 4.8 TB/s. Contention 1.74 is "
            "fitted to the published 1047 ms. tools/derive_measured_cases.py has the arithmetic, docs/planner.md the "
            "reasons.",
            "NVIDIA H200",
            "Qwen3-32B bf16",
            {"tensor": 4},
        ),
        program=program,
        ops=share_out(program, ops, features, busy),
        contention={"compute": FITTED_TO_44677, "comm": FITTED_TO_44677},
        host=HostCost(unsplit=wall - busy, split=wall - busy),
        errors={},
    )


def derive_56126() -> CostTable:
    """Qwen3.6-27B in FP8 on four RTX PRO 6000 without NVLink, TP 4: 128 decodes."""
    layers, hidden, parameters = 64, 5120, 27e9
    kernels, kernel = (815 - 68) / layers, 2e-6  # of a layer, from the published trace; seconds from one to the next
    weights, rate = parameters / 4 / layers, 1.6e12  # bytes of a layer on a GPU; bytes/s
    operations = 2 * weights / 0.5e15  # seconds a token: half of the peak in FP8
    reduce = CommCost(20e-6, reduce_bytes(4, 52e9), 2 * hidden)

    def share(part: float) -> ComputeCost:
        return ComputeCost(kernels * kernel / 2, operations * part, weights * part / rate)

    # The trace has one all-reduce of a layer, 67.5 in a step, and 129 in two micro-batches.
    program = ProgramSpec(
        ("embedded",),
        tuple(
            LayerRun(
                count,
                (
                    OpSpec("attention", "compute", (stream,), ordered=True),
                    OpSpec("mlp", "compute", ("attention",)),
                    OpSpec("mlp_reduce", "comm", ("mlp",)),
                ),
            )
            for count, stream in ((1, "embedded"), (layers - 1, "mlp_reduce"))
        ),
        ("mlp_reduce",),
    )
    return CostTable(
        provenance=describe(
            "vllm-project/vllm#56126 (closed issue, 2026-09-10): Qwen3.6-27B in FP8 on 4 RTX PRO 6000, TP 4 over PCIe "
            "without NVLink, decodes. Given: 67.5 all-reduces and 815 kernels in an unsplit step of 128 decodes, 129 "
            "and 1294 in two micro-batches, which 'does not pay on this box'. Assumed: 2 us a kernel of a captured "
            "graph, weights at 1.6 TB/s, half of the peak in FP8, 52 GB/s between GPUs, 20 us to start an all-reduce; "
            "contexts are short. Nothing is fitted. tools/derive_measured_cases.py has the arithmetic, docs/planner.md "
            "the reasons.",
            "NVIDIA RTX PRO 6000 Blackwell",
            "Qwen3.6-27B FP8",
            {"tensor": 4},
        ),
        program=program,
        ops={"attention": round_cost(share(0.4)), "mlp": round_cost(share(0.6)), "mlp_reduce": round_cost(reduce)},
        contention={},
        host=HostCost(),
        errors={},
    )


def derive_11329() -> CostTable:
    """Llama-3.3-70B in bf16 on eight H100, TP 8: one prompt, with its all-reduces and without them."""
    layers, hidden = 80, 8192
    # ms of a prompt of so many tokens, from the artifact of TokenWeave (artifact/csvs/figure_11a.csv, 2026-01-29): with
    # its fast all-reduces, and with none.
    whole = {1024: 53.66141341316203, 4096: 179.48250393383205, 16384: 744.1146947443485}
    alone = {1024: 41.937577460582055, 4096: 144.89575503394008, 16384: 610.2191342351338}
    # Without them: fixed + per_token * tokens + per_pair * tokens ** 2 / 2, through the three.
    (small, one), (middle, two), (large, three) = ((tokens, seconds / 1e3) for tokens, seconds in alone.items())
    first, second = (two - one) / (middle - small), (three - two) / (large - middle)
    pair = 2 * (second - first) / (large - small)
    token = first - pair * (middle + small) / 2
    fixed = one - token * small - pair * small**2 / 2
    # All-reduces: what is longer with them, two a layer, through the first and the last.
    longer = {tokens: (whole[tokens] - alone[tokens]) / 1e3 / (2 * layers) for tokens in whole}
    beta = (longer[large] - longer[small]) / (large - small) / (2 * hidden)
    reduce = CommCost(longer[small] - beta * 2 * hidden * small, beta, 2 * hidden)
    # Multiply-adds a token: projections of 64 heads of 128 and 8 of keys and values, and an MLP of 28672.
    projections, mlp = hidden * (2 * 64 + 2 * 8) * 128, 3 * hidden * 28_672
    share = projections / (projections + mlp)
    read = 2 * (projections + mlp) / 8 / 3.35e12  # seconds to read the weights of a layer, bf16
    fixed, token, pair = fixed / layers, token / layers, pair / layers
    ops: dict[str, OpCost] = {
        "attention": ComputeCost(fixed * share, token * share, read * share, pair, pair),
        "attn_reduce": reduce,
        "mlp": ComputeCost(fixed * (1 - share), token * (1 - share), read * (1 - share)),
        "mlp_reduce": reduce,
    }
    return CostTable(
        provenance=describe(
            "TokenWeave, arXiv:2505.11329 (2025-05-16), with the figures of its artifact (microsoft/tokenweave, "
            "artifact/csvs/figure_11a.csv, 2026-01-29): Llama-3.3-70B in bf16 on 8 H100, TP 8, one prompt. Given: "
            "53.66, 179.48 and 744.11 ms of 1024, 4096 and 16384 tokens with fast all-reduces, 41.94, 144.90 and "
            "610.22 ms without any; its kernels take 2 to 8 of 132 SMs, which is contention 132 / 124 of compute at "
            "most. Assumed: the difference is two all-reduces in each of 80 layers; weights are read at 3.35 TB/s. "
            "Nothing is fitted. "
            "tools/derive_measured_cases.py has the arithmetic, docs/scale.md the reasons.",
            "NVIDIA H100",
            "Llama-3.3-70B bf16",
            {"tensor": 8},
            "2026-11-25",
        ),
        program=list_dense(layers),
        ops={name: round_cost(cost) for name, cost in ops.items()},
        contention={"compute": 132 / 124, "comm": 1.0},
        host=HostCost(),
        errors={},
    )


def list_dense(layers: int) -> ProgramSpec:
    """Return layers that reduce after attention and after the MLP."""

    def body(stream: str) -> tuple[OpSpec, ...]:
        return (
            OpSpec("attention", "compute", (stream,), ordered=True),
            OpSpec("attn_reduce", "comm", ("attention",)),
            OpSpec("mlp", "compute", ("attn_reduce",)),
            OpSpec("mlp_reduce", "comm", ("mlp",)),
        )

    runs = LayerRun(1, body("embedded")), LayerRun(layers - 1, body("mlp_reduce"))
    return ProgramSpec(("embedded",), runs, ("mlp_reduce",))


def share_out(
    program: ProgramSpec, ops: dict[str, OpCost], features: BatchFeatures, seconds: float
) -> dict[str, OpCost]:
    """Return the costs with multiply-adds of compute ops as seconds, so that the step takes *seconds*."""
    counts: dict[str, int] = {}
    for run in program.runs:
        for op in run.ops:
            counts[op.name] = counts.get(op.name, 0) + run.repeat
    operations = sum(
        counts[name] * (cost.per_token * features.tokens + cost.per_pair * features.pairs)
        for name, cost in ops.items()
        if isinstance(cost, ComputeCost)
    )
    communication = sum(counts[name] * cost.time(features) for name, cost in ops.items() if isinstance(cost, CommCost))
    rate = (seconds - communication) / operations
    return {name: round_cost(scale_compute(cost, rate)) for name, cost in ops.items()}


def scale_compute(cost: OpCost, rate: float) -> OpCost:
    """Return a cost whose multiply-adds take *rate* seconds each."""
    if isinstance(cost, CommCost):
        return cost
    per_token, per_pair = cost.per_token * rate, cost.per_pair * rate
    return replace(cost, per_token=per_token, per_pair=per_pair, per_context_pair=per_pair)


def describe(source: str, chip: str, model: str, parallel: dict[str, int], date: str = "2026-11-23") -> Provenance:
    """Return where costs come from."""
    machine = {"platform": "npu" if chip.startswith("Ascend") else "cuda", "chip": chip}
    return Provenance("modelled", source, date, machine, {"name": model}, parallel, {})


def derive_tables() -> dict[str, CostTable]:
    """Return the costs of each case, by its name."""
    return {
        "r1-ep16-1589": derive_1589(),
        "qwen3-tp4-44677": derive_44677(),
        "qwen36-tp4-56126": derive_56126(),
        "llama70b-tp8-11329": derive_11329(),
    }


if __name__ == "__main__":
    write_files(derive_tables())
