"""Does an engine answer split as it answers unsplit, wherever steps are cut?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .answers import Answers, answer, compare, find_tolerance
from .engine import BETWEEN, EVERY_STEP, Cuts, Engine, read_options
from .findings import Findings, run_part

CUTS: dict[str, dict[str, Cuts]] = {
    "cuda": {"by settings": None, BETWEEN: BETWEEN, "inside requests": (1000,), "in five": (64, 130, 900, 1500)},
    "cpu": {"by settings": None, BETWEEN: BETWEEN, "inside requests": (90,), "in five": (9, 25, 70, 95)},
}
EXACT = {"--exact": tuple(CUTS["cuda"]), "--exact-between": (BETWEEN,)}
"""At which cuts answers must be the same to the bit, by flag.

Latent attention of a request that is cut inside is another computation: the tail's attention to its head is merged with
that to itself, and short pieces take the kernel of decodes.
"""
CHECKS = ("1", "races")
UNSPLIT = {"DBO_MODE": "off"}


def run(findings: Findings, device: str, words: list[str]) -> None:
    """Compare one engine: the model, flags, and options for `LLM`."""
    model, *rest = words
    flags = [word for word in rest if word.startswith("--")]
    engine = Engine(model, device, **read_options([word for word in rest if word not in flags]))
    compare_engine(findings, engine, device, flags)


def compare_engine(findings: Findings, engine: Engine, device: str, flags: Sequence[str]) -> None:
    """Compare split answers with unsplit ones at all cuts.

    With a flag of `EXACT` some must be the same to the bit, as kernels are that take no notice of the batch; with
    `--check` each step is compared, too, and watched for races. Steps that vLLM replays from graphs are not split:
    `declined` counts them.
    """
    findings.note("engine", described := engine.describe())
    comparison = Comparison(findings, engine, device, described["dtype"])
    exact = [name for flag in flags for name in EXACT.get(flag, ())]
    for name, cuts in CUTS[device].items():
        comparison.add(name, cuts, EVERY_STEP, name in exact)
    for check in CHECKS if "--check" in flags else ():
        comparison.add(f"under DBO_CHECK={check}", None, {**EVERY_STEP, "DBO_CHECK": check})
    findings.note("equal", comparison.is_equal)
    findings.note("split steps", comparison.steps if comparison.is_equal else 0)
    findings.note("declined", engine.count()["declined"])


class Comparison:
    """Unsplit answers of an engine, and what its split ones are compared with.

    Args:
        findings: takes each comparison.
        engine: that answers.
        device: whose requests.
        dtype: of the model.

    Attributes:
        is_equal: whether all were so far.
        steps: split steps so far.
    """

    def __init__(self, findings: Findings, engine: Engine, device: str, dtype: str) -> None:
        self.is_equal = True
        self.steps = 0
        self._findings, self._engine, self._device = findings, engine, device
        engine.configure(UNSPLIT)
        answer(engine, device)  # kernels are compiled
        self._expected: Answers = answer(engine, device)
        alone = answer(engine, device, is_alone=True)
        noise = compare(self._expected, alone, 0.0)
        self._tolerance = find_tolerance(noise, dtype)
        findings.note("unsplit, each request alone", noise.as_dict())
        findings.note("tolerance", self._tolerance)

    def add(self, name: str, cuts: Cuts, settings: dict[str, str], is_exact: bool = False) -> None:
        """Answer split, and compare, to the bit if asked to; under DBO_CHECK vLLM's step raises an error itself."""
        tolerance = 0.0 if is_exact else self._tolerance
        before = self._engine.count()["split"]
        try:
            self._engine.configure(settings, cuts)
            found = answer(self._engine, self._device)
        except Exception:
            self.is_equal = False
            raise
        steps = self._engine.count()["split"] - before
        difference = compare(self._expected, found, tolerance)
        is_equal = difference.largest <= tolerance and not difference.others
        is_equal &= steps > 0
        self.is_equal &= is_equal
        self.steps += steps
        outcome: dict[str, Any] = {
            **difference.as_dict(),
            "allowed": tolerance,
            "split steps": steps,
            "equal": is_equal,
        }
        self._findings.note(f"split {name}", outcome)
        if not is_equal:
            what = (
                f"differs by {difference.largest:.3g}, {difference.others} other tokens"
                if steps
                else "no step was split"
            )
            self._findings.fail(f"{name}: {what}")


if __name__ == "__main__":
    run_part(run)
