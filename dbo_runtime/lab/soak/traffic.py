"""Draw random traffic with hypothesis: the same for the same seed and the same version of hypothesis."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dbo_runtime.lab.soak.request import GREEDY, Abilities, Prompt, Request, Round

PREFIXES = 3  # prefixes per round
IMAGE_SIDES = (56, 84, 112)  # pixels
TINY, SHORT, ANSWER = 5, 8, 24  # most tokens of tiny prompts, of short prompts, and of answers
LOG_PROBS, COPIES = 5, 3  # most log-probabilities and answers per request
TURNS = 12  # turns in which the requests of a round arrive
DRAWN, REPEATED = 4, 8  # factor of requests to draw; one in this many may repeat a prompt
PAUSES = range(4, 9)  # turns before which a round may pause
PATIENCE = 20  # most turns before a request is aborted
ALLOWED_EVERY = 8  # one of this many rounds has requests with `allowed_token_ids`
SCHEMA = {"enum": ["even", "odd", {"sure": True}, {"sure": False}, [1, 2, 3]]}
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"json": SCHEMA},
    {"regex": "[a-c]{2,6}[0-9]"},
    {"choice": ["yes", "no", "perhaps"]},
)
FEATURES = (  # features of requests besides a prompt, at most three each
    "aborted",
    "bad_words",
    "ignore_eos",
    "image",
    "logit_bias",
    "lora",
    "min_tokens",
    "penalties",
    "prompt_logprobs",
    "sampled",
    "stop",
    "stop_token_ids",
    "structured",
    "tiny",
)
UNSTRUCTURED = {"bad_words", "logit_bias", "min_tokens", "stop", "stop_token_ids", "penalties"}
"""Features that could leave a structured answer without any token to continue with."""


def draw_round(abilities: Abilities, number: int, size: int, run_seed: int, pauses: bool = False) -> Round:
    """Return round *number*, which does not depend on other rounds.

    Args:
        abilities: abilities of the model.
        number: number of the round, from 0.
        size: number of requests.
        run_seed: seed of all rounds.
        pauses: whether the round has a pause.
    """
    name = f"{run_seed}/{number}"
    with_allowed = number % ALLOWED_EVERY == ALLOWED_EVERY - 1
    strategy = _pooling(abilities) if abilities.tasks else _requests(abilities, with_allowed)
    drawn: list[Request] = []

    @seed(name)
    @settings(
        max_examples=DRAWN * size,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(request: Request) -> None:
        drawn.append(request)

    keep()
    pause = random.Random(f"{name}/pause").choice(PAUSES) if pauses else None
    return Round(number, name, dict(enumerate(_choose(drawn, size))), pause)


def _choose(drawn: list[Request], size: int) -> list[Request]:
    """Return the first *size* requests with their own prompts, and a few that repeat another request's prompt.

    More than half of hypothesis's draws copy earlier ones with small changes.
    """
    kept: list[Request] = []
    others: list[Request] = []
    prompts: set[int] = set()
    for request in drawn:
        may_repeat = len(kept) - len(prompts) < size // REPEATED
        if request.prompt.seed not in prompts or may_repeat:
            kept.append(request)
        else:
            others.append(request)
        prompts.add(request.prompt.seed)
    return (kept + others)[:size]


@st.composite
def _pooling(draw: st.DrawFn, abilities: Abilities) -> Request:
    pooling: dict[str, Any] = {"task": draw(st.sampled_from(abilities.tasks))}
    if draw(st.booleans()):
        pooling["use_activation"] = draw(st.booleans())
    features = draw(
        st.sets(st.sampled_from(["aborted", *(["lora"] if abilities.loras else []), "nothing"]), max_size=1)
    )
    return Request(
        _draw_prompt(draw, abilities, 1, set()),
        {},
        arrives=draw(st.integers(0, TURNS)),
        leaves=draw(st.integers(0, PATIENCE)) if "aborted" in features else None,
        lora=draw(st.integers(0, abilities.loras - 1)) if "lora" in features else None,
        pooling=pooling,
    )


@st.composite
def _requests(draw: st.DrawFn, abilities: Abilities, with_allowed: bool) -> Request:
    features = draw(st.sets(st.sampled_from(_list_features(abilities)), max_size=3))
    structure = draw(st.sampled_from(STRUCTURES)) if "structured" in features else None
    if structure is not None:
        features -= UNSTRUCTURED
    elif with_allowed and draw(st.integers(0, 2)) == 0:
        features = (features - UNSTRUCTURED) | {"allowed"}
    sampling = _draw_sampling(draw, abilities, features)
    prompt = _draw_prompt(draw, abilities, sampling["max_tokens"], features)
    if prompt.image is None and "prompt_logprobs" in features:
        sampling["prompt_logprobs"] = draw(st.integers(1, LOG_PROBS))
    return Request(
        prompt,
        sampling,
        structure,
        draw(st.integers(TURNS // 4 if "tiny" in features else 0, TURNS)),
        draw(st.integers(0, PATIENCE)) if "aborted" in features else None,
        draw(st.integers(0, abilities.loras - 1)) if "lora" in features else None,
    )


def _list_features(abilities: Abilities) -> list[str]:
    lacking = set(abilities.lacking)
    if not abilities.words:
        lacking |= {"bad_words", "stop", "structured"}
    if abilities.image_prompt is None:
        lacking.add("image")
    if not abilities.loras:
        lacking.add("lora")
    return [feature for feature in FEATURES if feature not in lacking]


def _draw_sampling(draw: st.DrawFn, abilities: Abilities, features: set[str]) -> dict[str, Any]:
    """Draw the arguments that do not depend on the prompt. Greedy, unless features say otherwise."""
    token = st.integers(0, abilities.vocabulary - 1).filter(lambda number: number not in abilities.special)
    words = st.sampled_from(abilities.words or ("",))
    longest = draw(st.one_of(st.integers(1, SHORT), st.integers(SHORT, ANSWER), st.integers(SHORT, ANSWER)))
    sampling: dict[str, Any] = {
        "temperature": GREEDY,
        "max_tokens": longest,
        "logprobs": draw(st.integers(1, LOG_PROBS)),
    }
    if "sampled" in features:
        sampling |= _draw_copies(draw, abilities)
    if "ignore_eos" in features:
        sampling["ignore_eos"] = True
    if "min_tokens" in features:
        sampling["min_tokens"] = draw(st.integers(1, longest))
    if "penalties" in features:
        sampling["presence_penalty"] = draw(st.sampled_from([0.0, 0.75, -0.5]))
        sampling["frequency_penalty"] = draw(st.sampled_from([0.25, 1.0]))
    if "logit_bias" in features:
        sampling["logit_bias"] = draw(st.dictionaries(token, st.sampled_from([-4.0, 1.5, 3.0]), min_size=1, max_size=4))
    if "bad_words" in features:
        sampling["bad_words"] = draw(st.lists(words, min_size=1, max_size=3, unique=True))
    if "stop" in features:
        sampling["stop"] = draw(st.lists(words, min_size=1, max_size=4, unique=True))
    if "stop_token_ids" in features:
        sampling["stop_token_ids"] = draw(st.lists(token, min_size=1, max_size=8, unique=True))
    if "allowed" in features:
        sampling["allowed_token_ids"] = draw(st.lists(token, min_size=2, max_size=12, unique=True))
    return sampling


def _draw_copies(draw: st.DrawFn, abilities: Abilities) -> dict[str, Any]:
    """Draw several answers, which vLLM does not give to greedy requests: with a seed, or of the most likely tokens."""
    sampling = {"temperature": draw(st.sampled_from([0.5, 1.0])), "n": draw(st.integers(1, COPIES)), "top_k": 1}
    if "seed" not in abilities.lacking and draw(st.booleans()):
        sampling |= {"seed": draw(st.integers(0, 2**31)), "top_k": draw(st.sampled_from([0, 5, 40]))}
    return sampling


def _draw_prompt(draw: st.DrawFn, abilities: Abilities, answer: int, features: set[str]) -> Prompt:
    number = draw(st.integers(0, 2**31))
    if "image" in features:
        side = st.sampled_from(IMAGE_SIDES)
        return Prompt(0, number, image=(draw(side), draw(side)))
    if "tiny" in features:  # while others decode: ranks may or may not treat it as a decode
        return Prompt(draw(st.integers(1, TINY)), number)
    room = abilities.longest - answer
    prefix = draw(st.sampled_from([None, None, *range(PREFIXES)]))
    shared = 0 if prefix is None else draw(st.integers(room // 4, room - 1))
    most = room - shared
    short = st.integers(1, min(SHORT, most))
    own = draw(st.one_of(short, st.integers(min(SHORT, most), most), st.integers(max(1, most // 2), most)))
    return Prompt(own, number, prefix, shared)
