"""The cost of sending tokens to their experts and back by number of ranks, from published measurements."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from dbo_runtime.lab.whatif.expert_models import ExpertModel
from dbo_runtime.planner.costs.op_cost import CommCost

MEASURED_TOKENS = 128  # tokens in DeepEP's and CloudMatrix-Infer's measurements of dispatch and combine latency
MEASURED_BYTES = 8 * 7680  # bytes per token that CloudMatrix-Infer dispatched; it combined 8 x 14336
BF16 = 2  # bytes per value of a combined result


class Fabric(Protocol):
    """The network of a chip: prices an all-to-all among its ranks."""

    @property
    def largest(self) -> int:
        """The largest number of ranks that such a network was published to join."""

    def price_dispatch(self, model: ExpertModel, ranks: int) -> CommCost:
        """Return the cost of sending tokens, one byte per value, to experts on *ranks* ranks."""

    def price_combine(self, model: ExpertModel, ranks: int) -> CommCost:
        """Return the cost of sending their results back, in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFabric(ABC):
    """A network whose all-to-all takes the time of the link to other hosts, plus a start.

    Attributes:
        start_dispatch, start_combine: seconds of the start.
        padding: bytes of scales per byte of the token that they belong to.
        ranks_per_host: number of ranks that reach each other without this link; a power of two.
        largest: largest number of ranks; see `Fabric`.
    """

    start_dispatch: float
    start_combine: float
    padding: float
    ranks_per_host: int = 8
    largest: int = 1024

    def price_dispatch(self, model: ExpertModel, ranks: int) -> CommCost:
        """See `Fabric`."""
        size = model.hidden * (1 + self.padding)
        return CommCost(self.start_dispatch, 1 / self.get_rate(ranks), self.count_sent(model, ranks) * size)

    def price_combine(self, model: ExpertModel, ranks: int) -> CommCost:
        """See `Fabric`."""
        return CommCost(
            self.start_combine, 1 / self.get_rate(ranks), self.count_sent(model, ranks) * model.hidden * BF16
        )

    @abstractmethod
    def get_rate(self, ranks: int) -> float:
        """Return the bytes per second that a rank sends."""

    @abstractmethod
    def count_sent(self, model: ExpertModel, ranks: int) -> float:
        """Return how often a token is sent over the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFabric(LinkFabric):
    """A network that sends a token once to each host that has experts for it.

    Attributes:
        rates: bytes per second that a rank sends, by number of ranks; larger numbers have the last rate.
        sends_to_own: whether the published rates include data that stay on the same host.
    """

    rates: Mapping[int, float]
    sends_to_own: bool

    def get_rate(self, ranks: int) -> float:
        """See `LinkFabric`."""
        known = [rate for count, rate in self.rates.items() if count <= ranks] or list(self.rates.values())
        return known[-1]

    def count_sent(self, model: ExpertModel, ranks: int) -> float:
        """See `LinkFabric`."""
        hosts = max(ranks // self.ranks_per_host, 1)
        return model.count_hosts(hosts) * (1.0 if self.sends_to_own else (hosts - 1) / hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFabric(LinkFabric):
    """A network that sends a token to each of its experts.

    Attributes:
        rate: bytes per second of the link.
    """

    rate: float

    def get_rate(self, ranks: int) -> float:
        """See `LinkFabric`."""
        return self.rate

    def count_sent(self, model: ExpertModel, ranks: int) -> float:
        """See `LinkFabric`."""
        return (1 - min(self.ranks_per_host / ranks, 1.0)) * model.chosen


@dataclass(frozen=True, slots=True)
class MeasuredFabric:
    """A network with published latencies of 128 tokens for few and for many ranks.

    Latencies in between are interpolated by the logarithm of the number of ranks. Half of each is assumed to be
    start-up, independent of the tokens; no source gives this share.

    Attributes:
        few, many: the two numbers of ranks.
        dispatch, combine: seconds with few ranks and with many.
        largest: largest number of ranks; see `Fabric`.
    """

    few: int
    many: int
    dispatch: tuple[float, float]
    combine: tuple[float, float]
    largest: int = 512

    def price_dispatch(self, model: ExpertModel, ranks: int) -> CommCost:
        """See `Fabric`."""
        size = model.chosen * (model.hidden + 512.0)  # int8, and 512 bytes with the scale, as in DeepSeek's 7.5 KB
        return self._price(self.dispatch, ranks, MEASURED_BYTES, size)

    def price_combine(self, model: ExpertModel, ranks: int) -> CommCost:
        """See `Fabric`."""
        return self._price(self.combine, ranks, 8 * 7168 * BF16, float(model.chosen * model.hidden * BF16))

    def _price(self, latency: tuple[float, float], ranks: int, measured: float, size: float) -> CommCost:
        share = math.log2(max(ranks, self.few) / self.few) / math.log2(self.many / self.few)
        seconds = latency[0] + (latency[1] - latency[0]) * min(share, 1.0)
        return CommCost(seconds / 2, seconds / 2 / MEASURED_TOKENS / measured, size)


# 910B: 200 Gbit/s RoCE per chip (assumed, as in all cases of 910B), start-up as on 910C.
_ROCE = HostFabric(
    rates=MappingProxyType({8: 25e9}),
    start_dispatch=76e-6,
    start_combine=74.5e-6,
    padding=512 / 7168,
    sends_to_own=False,
)
# 910C: CloudMatrix-Infer, arXiv:2506.12708, against DeepEP: 116 and 152 us, 118 and 149 us, of 8 and 256 dies.
_UNIFIED_BUS = MeasuredFabric(8, 256, (116e-6, 152e-6), (118e-6, 149e-6))
# H800: DeepEP's normal kernels (its docs/legacy.md), 4096 tokens, by the number of GPUs; a start as below.
_NORMAL = HostFabric(
    rates=MappingProxyType({16: 43e9, 32: 57.5e9, 64: 50.5e9}),
    start_dispatch=44e-6,
    start_combine=65e-6,
    padding=4 / 128,
    sends_to_own=True,
)
# H800: DeepEP's low-latency kernels, same page, 128 tokens. They take 118, 155, 173, 192 and 194 us (dispatch) and 195,
# 273, 314, 369 and 360 us (combine) on 16 to 256 GPUs. Once bytes to other hosts are sent at the link's 50 GB/s, 41 to
# 50 us and 48 to 94 us remain: their means are the start-up here.
_LOW_LATENCY = ExpertFabric(rate=50e9, start_dispatch=44e-6, start_combine=65e-6, padding=4 / 128)

FABRICS: Mapping[str, Fabric] = MappingProxyType(
    {
        "prefill-910b": _ROCE,
        "decode-910b": _ROCE,
        "prefill-910c": _UNIFIED_BUS,
        "decode-910c": _UNIFIED_BUS,
        "prefill-h800": _NORMAL,
        "decode-h800": _LOW_LATENCY,
    }
)
