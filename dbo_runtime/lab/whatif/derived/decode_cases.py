"""Derive the costs of the published cases about decodes: DeepSeek-R1 in W8A8 on 910C and on 910B.

Every op is a roofline over what its kernels read and compute, and the network has a start-up and a rate. What is given
and what is assumed is said with the numbers here, and in `docs/planner.md`. Run it to write the files anew:

    python -m dbo_runtime.lab.whatif.derived.decode_cases
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dbo_runtime.lab.whatif.derived.files import round_cost, write_files
from dbo_runtime.planner.costs.cost_table import CostTable, Provenance
from dbo_runtime.planner.costs.op_cost import CommCost, ComputeCost, HostCost, OpCost
from dbo_runtime.planner.costs.program_spec import LayerRun, OpSpec, ProgramSpec

# The model, from DeepSeek-R1's configuration.
HIDDEN, Q_RANK, KV_RANK, ROTARY, HEADS, HEAD, VALUE = 7168, 1536, 512, 64, 128, 128, 128
DENSE, MOE, EXPERTS, CHOSEN, EXPERT, MLP, VOCABULARY = 3, 58, 256, 8, 2048, 18432, 129280

# One die of a 910C, arXiv:2506.12708: what it could do, and which share of that was measured there.
BANDWIDTH = 1.6e12 * 0.841  # bytes/s, in the decode of latent attention
INT8 = 752e12 * 0.774  # operations/s, the least of its matrix products
BF16 = 376e12 * 0.654  # operations/s, in the decode of latent attention

# Assumed: what no source gives.
KERNEL = 2e-6  # seconds between one kernel of a captured graph and the next
KEYS = 12e-6  # seconds: norm, rotary embedding, cache write; running them concurrently then brings #1353's 1 %
HANDOVER = 2e-6  # seconds from the end of an op to the begin of one on another lane
CONTENTION = {"compute": 1.1, "comm": 1.1, "side": 1.1, "compute/side": 1.25, "side/compute": 2.0}

DISPATCHED, COMBINED = 7680, 2 * HIDDEN  # bytes of a token for one expert: int8 with its scale (7.5 KB), and bf16


@dataclass(frozen=True)
class Machine:
    """A chip in its layout.

    Attributes:
        name: name of the case.
        chip: name of the chip in cost files.
        ranks: data parallel ranks, over which the experts are spread, too.
        hosts: number of hosts.
        experts: routed experts on each rank, copies included.
        dispatch, combine: costs of sending tokens to their experts and back.
        source: given and assumed facts, in words.
        is_movable: whether gate, experts and merge may run on the lane that keys and shared experts may run on.
    """

    name: str
    chip: str
    ranks: int
    hosts: int
    experts: int
    dispatch: CommCost
    combine: CommCost
    source: str
    is_movable: bool = False


def halve_latency(seconds: float, tokens: int, size: float) -> CommCost:
    """Return a cost that takes *seconds* for *tokens* of *size* bytes, half of it whatever the tokens."""
    return CommCost(seconds / 2, seconds / 2 / tokens / size, size)


def list_machines() -> tuple[Machine, ...]:
    """Return all machines."""
    start = halve_latency(152e-6, 128, CHOSEN * DISPATCHED), halve_latency(149e-6, 128, CHOSEN * COMBINED)
    # Of DeepSeek's 8 groups of experts a token meets 4, and each of 4 hosts has 2 groups: it needs a host unless both
    # of its groups are left out. Hosts pass on what several of their chips need, and add up before they send back.
    remote = 3 * (1 - (4 * 3) / (8 * 7))
    link = 1 / 25e9  # seconds a byte: 200 Gbit/s a chip
    common = (
        "Given by arXiv:2506.12708 (CloudMatrix-Infer, read in a summary): products reach 77.4 % of int8 peak, MLA "
        "65.4 % of bf16 peak and 84.1 % of bandwidth; 752 TOPS int8 a die, from 1943 tokens/s at 1.29 a TFLOPS of two "
        "dies, half as much bf16, 1.6 TB/s"
    )
    assumed = (
        "8 experts a token evenly; every op a roofline of its weights and operations; 2 us a kernel, 12 us of keys, so "
        "that running them beside brings about the 1 % of vllm-project/vllm-ascend#1353; 2 us to hand over between "
        "lanes; contention 1.1, and 1.25 and 2 between compute and side; ops are issued as graphs, at no cost; the "
        "head of the vocabulary is outside of ops. tools/derive_decode_cases.py has the arithmetic, docs/planner.md "
        "the reasons."
    )
    supernode = Machine(
        "r1-decode-910c",
        "Ascend 910C",
        288,
        18,
        1,
        *start,
        f"{common}; dispatch of 128 tokens 152 us, combine 149 us (EP 256). Assumed: DP 288 and EP 288 dies, one "
        f"of 256 experts or 32 copies on each, shared experts on all; half of these latencies is start-up; "
        f"{assumed}",
    )
    two_streams = (
        f"{supernode.source} As r1-decode-910c, but that both lanes compute: gate, experts and merge may be on side, "
        f"as attention and experts have a stream each there. No number is fitted to the published gains, but that "
        f"placement was chosen in knowledge of them."
    )
    return (
        supernode,
        replace(supernode, name="r1-decode-12708", source=two_streams, is_movable=True),
        Machine(
            "r1-decode-910b",
            "Ascend 910B",
            32,
            4,
            EXPERTS // 32,
            CommCost(start[0].alpha, link, remote * DISPATCHED),
            CommCost(start[1].alpha, link, remote * COMBINED),
            f"{common}, all of a 910C; layout DP 32, TP 1, EP 32 on 4 hosts (vllm-project/vllm-ascend#4295). Assumed: "
            f"a 910B is such a die; 25 GB/s a chip between hosts, to each host once (2.36 of 3 others a token); "
            f"start-up of dispatch and combine as on 910C (76 and 74.5 us); {assumed}",
        ),
    )


def read(weights: float, operations: float, kernels: int, rate: float = INT8, size: int = 1) -> ComputeCost:
    """Return the cost of a product with *weights* numbers of *size* bytes, each met *operations* times a token."""
    return ComputeCost(kernels * KERNEL, 2 * weights * operations / rate, weights * size / BANDWIDTH)


def stream(tensors: int) -> ComputeCost:
    """Return the cost of a kernel that reads and writes so many hidden states in bf16."""
    return ComputeCost(KERNEL, tensors * 2 * HIDDEN / BANDWIDTH)


def join(one: ComputeCost, other: ComputeCost) -> ComputeCost:
    """Return the cost of both, one after the other."""
    return ComputeCost(one.fixed + other.fixed, one.per_token + other.per_token, one.weights + other.weights)


def derive_ops(machine: Machine) -> dict[str, OpCost]:
    """Return the cost of each op, by its name in `models/layers.py`."""
    absorbed = read(HEADS * HEAD * KV_RANK, 1, 1, BF16, 2)  # of keys into queries, and of values into the output
    # A query meets all heads of a cached token, of 576 numbers for the scores and 512 for the sum, read once in bf16.
    pair = max(2 * HEADS * (2 * KV_RANK + ROTARY) / BF16, 2 * (KV_RANK + ROTARY) / BANDWIDTH)
    rows = EXPERTS * CHOSEN / EXPERTS  # that a rank's experts get for each token of its own: as many as it sends
    weights = read(machine.experts * 3 * HIDDEN * EXPERT, 1, 3).weights
    return {
        "attn_norm": stream(4),
        "slots": ComputeCost(),
        "latent": read(HIDDEN * (Q_RANK + KV_RANK + ROTARY), 1, 2),
        "keys": ComputeCost(KEYS),
        "queries": join(read(Q_RANK * HEADS * (HEAD + ROTARY), 1, 3), absorbed),
        "attention": ComputeCost(KERNEL, per_decode_pair=pair),
        "attn_out": join(absorbed, read(HEADS * VALUE * HIDDEN, 1, 2)),
        "mlp_norm": stream(4),
        "mlp": read(3 * HIDDEN * MLP, 1, 3),
        "gate": read(HIDDEN * EXPERTS, 1, 2, BF16, 4),
        "dispatch": machine.dispatch,
        "shared_experts": read(3 * HIDDEN * EXPERT, 1, 3),
        "experts": ComputeCost(3 * KERNEL, 2 * 3 * HIDDEN * EXPERT * rows / INT8, weights),
        "combine": machine.combine,
        "merge": stream(3),
        "final_norm": stream(4),
    }


def list_layers(is_movable: bool) -> tuple[LayerRun, ...]:
    """Return the layers as `models/layers.py` records them, with a `side` lane and one tensor parallel rank."""

    def attend(stream: tuple[str, ...]) -> tuple[OpSpec, ...]:
        return (
            OpSpec("attn_norm", "compute", stream, outputs=2, overwrites=stream),
            OpSpec("slots", "compute", ()),
            OpSpec("latent", "compute", ("attn_norm",)),
            OpSpec("keys", "side", ("latent", "positions", "slots"), outputs=2),
            OpSpec("queries", "compute", ("latent", "positions")),
            OpSpec("attention", "compute", ("queries", "keys", "keys.1"), ordered=True),
            OpSpec("attn_out", "compute", ("attention",)),
            OpSpec("mlp_norm", "compute", after := ("attn_out", "attn_norm.1"), outputs=2, overwrites=after),
        )

    dense = (OpSpec("mlp", "compute", ("mlp_norm",)),)
    moe = (
        OpSpec("gate", "compute", ("mlp_norm",), movable=is_movable),
        OpSpec("dispatch", "comm", ("mlp_norm", "gate"), outputs=2, communicator="experts"),
        OpSpec("shared_experts", "side", ("mlp_norm",)),
        OpSpec("experts", "compute", ("dispatch",), movable=is_movable),
        OpSpec("combine", "comm", ("experts", "dispatch.1"), communicator="experts"),
        OpSpec("merge", "compute", ("combine", "shared_experts"), overwrites=("combine",), movable=is_movable),
    )
    last = ("merge", "mlp_norm.1")
    return (
        LayerRun(1, (*attend(("embedded",)), *dense)),
        LayerRun(DENSE - 1, (*attend(("mlp", "mlp_norm.1")), *dense)),
        LayerRun(1, (*attend(("mlp", "mlp_norm.1")), *moe)),
        LayerRun(MOE - 1, (*attend(last), *moe)),
        LayerRun(1, (OpSpec("final_norm", "compute", last, overwrites=last),), layered=False),
    )


def derive_table(machine: Machine) -> CostTable:
    """Return the costs of a case, rounded to what can be read."""
    outside = VOCABULARY * HIDDEN * 2 / BANDWIDTH  # the head of the vocabulary in bf16, split or not
    host = HostCost(unsplit=round(outside, 7), split=round(outside, 7), handover=HANDOVER)
    provenance = Provenance(
        kind="modelled",
        source=machine.source,
        date="2026-11-22",
        machine={"platform": "npu", "chip": machine.chip},
        model={"name": "DeepSeek-R1 W8A8"},
        parallel={"tensor": 1, "data": machine.ranks, "expert": machine.ranks, "hosts": machine.hosts},
        versions={},
    )
    program = ProgramSpec(("embedded", "positions"), list_layers(machine.is_movable), ("final_norm",))
    ops = {name: round_cost(cost) for name, cost in derive_ops(machine).items()}
    return CostTable(provenance, program, ops, CONTENTION, host, {})


def derive_tables() -> dict[str, CostTable]:
    """Return the costs of each case, by its name."""
    return {machine.name: derive_table(machine) for machine in list_machines()}


if __name__ == "__main__":
    write_files(derive_tables())
