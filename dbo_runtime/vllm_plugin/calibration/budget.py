"""The time budget of a calibration: small batches come first, each repeated as often as leaves time for larger ones."""

from __future__ import annotations

from collections.abc import Sequence

from dbo_runtime.vllm_plugin.calibration.shapes import Shape

MAX_REPEATS = 3  # per shape, after a warm-up round; layers are repeats, too
LONG_ROUND_SECONDS = 1.0  # a longer round runs at most twice: once for each cut


def choose_repeats(left: float, round_seconds: float) -> int:
    """Return how often to repeat a shape whose round takes *round_seconds*, if *left* seconds remain for all shapes.

    At most half of the time goes to this shape, so that time remains for larger shapes.
    """
    most = 2 if round_seconds > LONG_ROUND_SECONDS else MAX_REPEATS
    return max(0, min(most, int(left / 2 / round_seconds)))


def expect_round(rounds: Sequence[tuple[Shape, float]], shape: Shape) -> float:
    """Return a lower bound for the seconds of a round of *shape*, from the measured *rounds* of smaller shapes.

    The time beyond that of the first, smallest shape grows at least in proportion to the tokens, for equally many
    requests.
    """
    (_, fixed), *others = rounds
    alike = [(seconds - fixed) / other.total for other, seconds in others if other.requests == shape.requests]
    return fixed + max(0.0, *alike[-1:]) * shape.total if alike else fixed
