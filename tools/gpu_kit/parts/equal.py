"""Does an engine answer split as it answers unsplit, wherever steps are cut?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .answers import Answers, answer, compare, find_tolerance
from .engine import BETWEEN, EVERY_STEP, Cuts, Engine, read_options
from .findings import Findings, run_part

CUTS: dict[str, dict[str, Cuts]] = {
    "cuda": {"by settings": None, BETWEEN: BETWEEN, "inside requests": (1000,), "in five": (64, 130, 900, 1500)},
    "cpu": {"by settings": None, BETWEEN: BETWEEN, "inside requests": (90,), "in five": (9, 25, 70, 95)},
}
EXACT = {"--exact": tuple(CUTS["cuda"]), "--exact-between": (BETWEEN,)}
"""At which cuts nothing is explained by rounding, by flag.

Answers must be as near as vLLM's own are when requests are alone: the same to the bit if those are. Such an engine is
compared at these cuts only: latent attention of a request that is cut inside is another computation, as the tail's
attention to its head is merged with that to itself, and short pieces take the kernel of decodes.
"""
SHORT = {"cuda": (700, 60), "cpu": (80, 20)}
"""Tokens of vLLM's own steps, when it cuts prompts by itself."""
UNSPLIT = {"DBO_MODE": "off"}


def run(findings: Findings, device: str, words: list[str]) -> None:
    """Compare one engine: the model, flags, and options for `LLM`."""
    model, *rest = words
    flags = [word for word in rest if word.startswith("--")]
    engine = Engine(model, device, **read_options([word for word in rest if word not in flags]))
    compare_engine(findings, engine, device, flags)


def compare_engine(findings: Findings, engine: Engine, device: str, flags: Sequence[str]) -> None:
    """Compare split answers with unsplit ones at all cuts.

    A flag of `EXACT` is for kernels that take no notice of the batch. With `--check` each step is compared, too, and
    watched for races. Steps that vLLM replays from graphs are not split: `declined` counts them.
    """
    findings.note("engine", described := engine.describe())
    exact = [name for flag in flags for name in EXACT.get(flag, ())]
    comparison = Comparison(findings, engine, device, described["dtype"], bool(exact))
    for name, cuts in CUTS[device].items():
        if name in exact or not exact:
            comparison.add(name, cuts, EVERY_STEP)
            if "--check" in flags:
                comparison.add(f"{name}, each step compared", cuts, {**EVERY_STEP, "DBO_CHECK": "1"})
    if "--check" in flags:
        comparison.add("by settings, watched for races", None, {**EVERY_STEP, "DBO_CHECK": "races"})
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
        is_exact: whether rounding explains nothing but what requests differ by that are alone.

    Attributes:
        is_equal: whether all were so far.
        steps: split steps so far.
    """

    def __init__(self, findings: Findings, engine: Engine, device: str, dtype: str, is_exact: bool = False) -> None:
        self.is_equal = True
        self.steps = 0
        self._findings, self._engine, self._device = findings, engine, device
        engine.configure(UNSPLIT)
        answer(engine, device)  # kernels are compiled
        self._expected: Answers = answer(engine, device)
        alone = self._measure("each request alone", is_alone=True)
        self._tolerance = alone if is_exact else find_tolerance(max([alone, *self._measure_others()]), dtype)
        findings.note("tolerance", self._tolerance)

    def _measure(self, name: str, **options: Any) -> float:
        """Return how far unsplit answers are apart that vLLM computes in another way."""
        noise = compare(self._expected, answer(self._engine, self._device, **options), 0.0)
        self._findings.note(f"unsplit, {name}", noise.as_dict())
        return noise.largest

    def _measure_others(self) -> Iterator[float]:
        """Yield that for prompts that vLLM cuts itself, and for a model's own code where vLLM compiles it."""
        for tokens in SHORT[self._device] if self._engine.cuts_prompts else ():
            with self._engine.with_short_steps(tokens):
                yield self._measure(f"steps of {tokens} tokens")
        if self._engine.is_compiled:
            with self._engine.without_compilation():
                yield self._measure("not compiled")

    def add(self, name: str, cuts: Cuts, settings: dict[str, str]) -> None:
        """Answer split, and compare; under DBO_CHECK vLLM's step raises an error itself."""
        tolerance = self._tolerance
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
