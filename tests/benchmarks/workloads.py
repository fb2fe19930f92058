"""What an engine is given to do, by name: `4x500`, `decode-8x32`, `mixed-4+1500`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

SHORT = 16  # tokens of the prompts of a `decode`; those of a `mixed` are multiples of it
ANSWER = 8  # tokens of each answer of a `mixed`
NAMES = ("1x2000", "4x500", "16x125", "decode-8x32", "mixed-4+1500")


class WorkloadError(ValueError):
    """There is no such workload; the message says what there is."""


@dataclass(frozen=True)
class Workload:
    """Requests that come together, and one more, perhaps, when they have begun to answer.

    Attributes:
        prompts: tokens of each prompt.
        answer: tokens of each answer.
        late: tokens of the late prompt, whose answer is one token; 0 if there is none.
    """

    name: str
    prompts: tuple[int, ...]
    answer: int = 1
    late: int = 0

    @property
    def steps(self) -> int:
        """In how many steps it is done, a late prompt's prefill being one with a decode of all others."""
        return self.answer


def read_workload(name: str) -> Workload:
    """Return the workload of this name.

    Raises:
        WorkloadError: if there is none.
    """
    found = re.fullmatch(r"(?:(decode)-)?([1-9]\d*)x([1-9]\d*)|(mixed)-([1-9]\d*)\+([1-9]\d*)", name)
    if found is None:
        raise WorkloadError(
            f"{name!r} is no workload; write PROMPTSxTOKENS (4x500), decode-REQUESTSxTOKENS (decode-8x32) or "
            "mixed-DECODES+TOKENS (mixed-4+1500)."
        )
    if found[4]:
        lengths = tuple(2 * SHORT * (i + 1) for i in range(int(found[5])))
        return Workload(name, lengths, ANSWER, int(found[6]))
    count, tokens = int(found[2]), int(found[3])
    return Workload(name, (SHORT,) * count, tokens) if found[1] else Workload(name, (tokens,) * count)


def run(llm: Any, workload: Workload, ask: bool = False) -> list[tuple[int, ...]]:
    """Have an engine in this very process do the work; return the answers' tokens, the late one's last.

    The engine takes a step only when told to, so what a step consists of is the same in each run.

    Args:
        ask: have the workers keep the timeline of the step that the workload is about: of a prefill the only one, of a
            decode the second, of a mixture the one with the late prompt.
    """
    from vllm import SamplingParams

    from examples.compare_modes import make_prompts

    *prompts, late = make_prompts(llm, [*workload.prompts, workload.late or 1])
    sampling = [
        SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        for tokens in (workload.answer, 1)
    ]
    llm.enqueue(prompts, sampling[0], use_tqdm=False)
    if workload.answer > 1:
        llm.llm_engine.step()
    if workload.late:
        llm.enqueue([late], sampling[1], use_tqdm=False)
    if ask:
        llm.collective_rpc("dbo_request_timeline")
    return [tuple(output.outputs[0].token_ids) for output in llm.wait_for_completion(use_tqdm=False)]
