"""Scale costs to other ranks, another network or another number of layers, by rules of thumb. All are modelled."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from dbo_runtime.errors import ConfigError
from dbo_runtime.nearest import find_nearest
from dbo_runtime.planner.costs.cost_table import CostTable
from dbo_runtime.planner.costs.op_cost import ATTENTION, CommCost, ComputeCost, OpCost
from dbo_runtime.planner.costs.program_spec import LayerRun, repeat_runs
from dbo_runtime.setting_values import read_count

# Dense layers, then layers with experts, from the models' published configurations.
MODELS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"deepseek-v3": (3, 58), "deepseek-r1": (3, 58), "deepseek-v2": (1, 59), "deepseek-v2-lite": (1, 26)}
)
MAX_RANKS = 65_536
DISPATCHED = ("dispatch", "experts", "combine")  # ops on dispatched tokens, as named by adapters and published cases


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """The bandwidth of a network: a factor relative to that of the costs, or bytes per second."""

    factor: float = 1.0
    bytes_per_second: float | None = None

    def __str__(self) -> str:
        """Format as text such as `0.5x` or `100GB/s`."""
        return f"{self.factor:g}x" if self.bytes_per_second is None else f"{self.bytes_per_second / 1e9:g}GB/s"


def parse_bandwidth(text: str) -> Bandwidth:
    """Read `0.5x` or `100GB/s`.

    Raises:
        ConfigError: the text is neither, or not above zero.
    """
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(x|GB/s)", text.strip(), re.IGNORECASE)
    value = float(found[1]) if found else 0.0
    if not found or not 0 < value < math.inf:
        raise ConfigError(f"bandwidth is {text[:100]!r}; it must be a factor such as 0.5x, or a rate such as 100GB/s.")
    return Bandwidth(value) if found[2].lower() == "x" else Bandwidth(bytes_per_second=value * 1e9)


@dataclass(frozen=True, slots=True)
class Network:
    """A network of two levels: ranks of one host, and hosts.

    Attributes:
        ranks_per_host: number of ranks per host, a power of two.
        within, between: bytes per second that a rank sends to others on its host, and to other hosts: the `busbw` of
            NCCL's performance test.
    """

    ranks_per_host: int
    within: float
    between: float

    def __str__(self) -> str:
        """Format as text such as `8:121.3GB/s:25GB/s`."""
        return f"{self.ranks_per_host}:{self.within / 1e9:g}GB/s:{self.between / 1e9:g}GB/s"

    def reduce_byte(self, ranks: int) -> float:
        """Return the seconds per byte of an all-reduce over *ranks* ranks that fill hosts one after the other.

        Hosts reduce-scatter, each rank then all-reduces its part with the same rank on other hosts, and hosts
        all-gather. With g ranks on each of h hosts, a rank sends 2 (g - 1) / g within its host, and 2 (h - 1) / h / g
        between hosts (hierarchical all-reduce, as in Horovod and HCCL).
        """
        near = min(ranks, self.ranks_per_host)
        return 2 * (_share_sent(near) / self.within + _share_sent(ranks // near) / near / self.between)


def parse_network(text: str) -> Network:
    """Read `8:121.3GB/s:25GB/s`: ranks per host, and rates within a host and between hosts.

    Raises:
        ConfigError: the text has another form.
    """
    count, *rates = (part.strip() for part in text.split(":"))
    bandwidths = [parse_bandwidth(rate).bytes_per_second for rate in rates]
    if len(bandwidths) == 2 and bandwidths[0] and bandwidths[1] and _is_power(read_count(count) or 0):
        return Network(int(count), bandwidths[0], bandwidths[1])
    raise ConfigError(
        f"network is {text[:100]!r}; it must be ranks of a host (a power of two), the rate within a host and that "
        f"between hosts, such as 8:121.3GB/s:25GB/s."
    )


def scale_tensor(table: CostTable, ranks: int, network: Network | None = None) -> CostTable:
    """Return the costs with *ranks* tensor parallel ranks, instead of the table's number.

    - Compute: the costs of tokens, pairs and weights are divided among the ranks. Each rank pays the whole fixed part,
      and the whole fixed part per prefill.
    - Communication: in an all-reduce of n bytes each rank sends 2 (p - 1) / p n, whatever the algorithm, and half of
      that in each of its halves, reduce-scatter and all-gather. Recursive halving and doubling takes 2 log2 p steps,
      each with the same start cost (Thakur, Rabenseifner and Gropp 2005). So `beta` scales with (p - 1) / p, and
      `alpha` with log2 p. With a *network* of two levels, `beta` scales with the network's time per byte.

    Raises:
        ConfigError: *ranks* is not a power of two, or the table's number of ranks is unknown, or it is one but the
            table has communication.
    """
    if not _is_power(ranks):
        raise ConfigError(f"tp is {ranks}; it must be a power of two, from 1 to {MAX_RANKS}.")
    known = table.provenance.parallel.get("tensor")
    if known is None or known < 1:
        raise ConfigError(f"parallel.tensor of the costs is {known}, so they cannot be scaled to tp {ranks}.")
    if known == ranks:
        return table
    if known == 1 and any(isinstance(cost, CommCost) for cost in table.ops.values()):
        raise ConfigError("parallel.tensor of the costs is 1: what more ranks would communicate is not known.")
    alpha = _count_steps(ranks) / (_count_steps(known) or 1)
    beta = _compare_bytes(ranks, known, network)

    def scale(cost: OpCost) -> OpCost:
        if isinstance(cost, CommCost):
            return replace(cost, alpha=cost.alpha * alpha, beta=cost.beta * beta)
        return _scale_compute(cost, known / ranks)

    parallel = {**table.provenance.parallel, "tensor": ranks}
    what = f"tensor parallel {ranks} instead of {known}{f', network {network}' if network else ''}"
    return _change(table, what, _map(table, scale), parallel=parallel)


def scale_bandwidth(table: CostTable, bandwidth: Bandwidth) -> CostTable:
    """Return the costs with another bandwidth. `alpha` stays.

    A rate is the algorithm bandwidth of HCCL's test tool, and the `algbw` of NCCL's: bytes of the message per second.
    """
    if bandwidth == Bandwidth():
        return table

    def scale(cost: OpCost) -> OpCost:
        if not isinstance(cost, CommCost):
            return cost
        rate = bandwidth.bytes_per_second
        return replace(cost, beta=cost.beta / bandwidth.factor if rate is None else 1 / rate)

    return _change(table, f"bandwidth {bandwidth}", _map(table, scale))


def set_imbalance(table: CostTable, imbalance: float) -> CostTable:
    """Return the costs with *imbalance* as the ratio of the busiest expert rank's tokens to the mean.

    All ranks wait for that rank: experts, dispatch and combine take its time, except for their fixed parts.

    Raises:
        ConfigError: the imbalance is below 1, or the costs have no op on dispatched tokens.
    """
    if not (math.isfinite(imbalance) and imbalance >= 1):
        raise ConfigError(f"imbalance is {imbalance:g}; the busiest rank has at least 1 times the tokens of the mean.")
    if "dispatch" not in table.ops:
        raise ConfigError("imbalance needs ranks that tokens are dispatched to, but the costs have no op `dispatch`.")
    ops = {name: replace(cost, imbalance=imbalance) if name in DISPATCHED else cost for name, cost in table.ops.items()}
    return _change(table, f"imbalance {imbalance:g}", ops)


def set_model(table: CostTable, name: str) -> CostTable:
    """Return the costs with the model's number of layers. The cost of a layer stays.

    Costs with one kind of layer get the total of both kinds. With two kinds, the first counts as dense layers.

    Raises:
        ConfigError: the model is unknown, or the costs have more kinds of layers.
    """
    if name not in MODELS:
        close = find_nearest(name, MODELS)
        hint = f"did you mean {close}?" if close else f"known are {', '.join(MODELS)}."
        raise ConfigError(f"model is {name!r}; {hint}")
    kinds = len({_name_kind(run) for run in table.program.runs if run.layered})
    if kinds not in (1, 2):
        raise ConfigError(f"the costs have {kinds} kinds of layers; {name} has 2, and only 1 or 2 can be matched.")
    counts = MODELS[name] if kinds == 2 else (sum(MODELS[name]),)
    return replace(
        set_layers(table, counts), provenance=replace(table.provenance, model={**table.provenance.model, "name": name})
    )


def set_layers(table: CostTable, counts: Sequence[int]) -> CostTable:
    """Return the costs with *counts* layers of each kind [kinds]. Layers are of one kind if their ops have equal names.

    A kind's last run grows or shrinks. Earlier runs stay, because a first layer reads different values.

    Raises:
        ConfigError: the number of kinds differs, or a kind has more layers in its earlier runs.
    """
    kinds = list(dict.fromkeys(_name_kind(run) for run in table.program.runs if run.layered))
    if len(kinds) != len(counts):
        raise ConfigError(f"the costs have {len(kinds)} kinds of layers, but counts for {len(counts)} were given.")
    repeats = [run.repeat for run in table.program.runs]
    for kind, count in zip(kinds, counts, strict=True):
        numbers = [number for number, run in enumerate(table.program.runs) if run.layered and _name_kind(run) == kind]
        repeat = count - sum(repeats[number] for number in numbers[:-1])
        if repeat < 0 or count < 1:
            raise ConfigError(f"{count} layers of {', '.join(kind)} are fewer than the costs' program starts with.")
        repeats[numbers[-1]] = repeat
    return replace(table, program=repeat_runs(table.program, repeats))


def count_layers(table: CostTable) -> int:
    """Return the number of layers in the costs' program."""
    return sum(run.repeat for run in table.program.runs if run.layered)


def _name_kind(run: LayerRun) -> tuple[str, ...]:
    return tuple(op.name for op in run.ops)


def _count_steps(ranks: int) -> int:
    """Return log2 of *ranks*, rounded up."""
    return (ranks - 1).bit_length()


def _share_sent(ranks: int) -> float:
    return (ranks - 1) / ranks


def _compare_bytes(ranks: int, known: int, network: Network | None) -> float:
    """Return the ratio of the time per byte with *ranks* ranks to that with *known* ranks."""
    if network is None:
        return _share_sent(ranks) / (_share_sent(known) or 1.0)
    return network.reduce_byte(ranks) / (network.reduce_byte(known) or 1.0)


def _is_power(ranks: int) -> bool:
    return 1 <= ranks <= MAX_RANKS and not ranks & (ranks - 1)


def _scale_compute(cost: ComputeCost, share: float) -> ComputeCost:
    shared = {"per_token", "weights", *ATTENTION} - {"per_prefill"}
    return replace(cost, **{name: getattr(cost, name) * share for name in shared})


def _map(table: CostTable, scale: Callable[[OpCost], OpCost]) -> dict[str, OpCost]:
    return {name: scale(cost) for name, cost in table.ops.items()}


def _change(
    table: CostTable, what: str, ops: Mapping[str, OpCost], parallel: Mapping[str, int] | None = None
) -> CostTable:
    """Return the costs with other *ops*, marked as modelled, with a note on the change."""
    provenance = replace(
        table.provenance,
        kind="modelled",
        source=f"{table.provenance.source} Scaled: {what}.",
        parallel=table.provenance.parallel if parallel is None else parallel,
    )
    return replace(table, provenance=provenance, ops=ops)
