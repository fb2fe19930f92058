"""How a calibration spends its seconds: small batches first, each as often as leaves time for larger ones."""

from __future__ import annotations

from collections.abc import Sequence

from dbo_runtime.vllm_plugin.calibration.shapes import Shape

MAX_REPEATS = 3  # of each shape, after a round to warm up; layers are repeats, too
LONG_ROUND_SECONDS = 1.0  # a longer round is repeated twice at most: once for each cut


def choose_repeats(left: float, round_seconds: float) -> int:
    """Return how often to repeat a shape whose round takes *round_seconds*, with *left* seconds for all shapes.

    At most half of the time goes to it, so that some is left for larger shapes.
    """
    most = 2 if round_seconds > LONG_ROUND_SECONDS else MAX_REPEATS
    return max(0, min(most, int(left / 2 / round_seconds)))


def expect_round(rounds: Sequence[tuple[Shape, float]], shape: Shape) -> float:
    """Return a lower bound of the seconds of a round of *shape*, from the measured *rounds* of smaller ones.

    What it takes beyond the first, which is the smallest, grows with the tokens of as many requests at least.
    """
    (_, fixed), *others = rounds
    alike = [(seconds - fixed) / other.total for other, seconds in others if other.requests == shape.requests]
    return fixed + max(0.0, *alike[-1:]) * shape.total if alike else fixed
