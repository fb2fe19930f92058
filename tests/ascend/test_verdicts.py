"""The doctor's verdict on a command is what a tiny model of its form does when it is loaded.

By default a sample of the forms in which the tutorials' commands serve; with `--all-forms` (`make verdicts`) all that
the stand-in for CANN can serve, which takes over an hour on two cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dbo_runtime.lab.doctor.probe_process import run_probe
from dbo_runtime.vllm_plugin.api.known import LATEST_ASCEND
from dbo_runtime.vllm_plugin.api.versions import Standing, classify_version
from tests.ascend.count_recipes import NOT_DEFAULT, RELEASE, make_environment
from tests.support.ascend.engines import start
from tests.support.ascend.jobs import find_decider, make_prompts
from tests.support.ascend.recipes import read_recipes
from tests.support.ascend.served_forms import Form, Server, list_forms, make_server
from tests.support.vllm.engine import Engine

UNSPLIT, NANO, MICRO = "unsplit", "split into nano-batches", "split"
PROMPTS = make_prompts(96, 64, 160, 128)
SAMPLE = (  # of each verdict one, and of each layout
    "DeepseekV3ForCausalLM W8A8_DYNAMIC deepseek_mtp TP2 DP2 EP eplb16 shdp",
    "DeepseekV41ForCausalLM W8A8_DYNAMIC TP2 DP2 EP",
    "Glm5NextForConditionalGeneration W8A8_DYNAMIC deepseek_mtp TP2 EP",
    "GlmMoeDsaForCausalLM W8A8_DYNAMIC deepseek_mtp TP2 PP2 EP fc1 dsacp fmc2 li_c8",
    "KimiK25ForConditionalGeneration W4A8_DYNAMIC TP2 DP2 EP",
    "Qwen3ForCausalLM TP2",
    "Qwen3_5MoeForConditionalGeneration W8A8_DYNAMIC qwen3_5_mtp TP2 EP",
)


class Verdict(NamedTuple):
    """How steps of a server are split, and whether the first ones are compared."""

    kind: str
    compared: bool = False


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over forms."""
    if "form" in metafunc.fixturenames:
        forms = [form for form in list_forms(read_recipes(RELEASE)) if not form.obstacle]
        if not metafunc.config.getoption("--all-forms", default=False):
            forms = [form for form in forms if form.name in SAMPLE]
        metafunc.parametrize("form", forms, ids=[form.name for form in forms])


@pytest.mark.slow
def test_the_doctors_verdict_is_what_a_server_does(form: Form, tmp_path: Path) -> None:
    server = make_server(form, tmp_path)
    told = ask_doctor(form, server)
    for npus in start(form.ranks, server.model, server.environment, **server.options):
        found = npus.run(prefill, timeout=400)
        assert {verdict for of_rank in found for verdict in of_rank} == {told}


def test_the_sample_is_of_the_tutorials() -> None:
    assert set(SAMPLE) <= {form.name for form in list_forms(read_recipes(LATEST_ASCEND)) if not form.obstacle}


def ask_doctor(form: Form, server: Server) -> Verdict:
    """Return what `dbo doctor -- vllm serve ...` would say, by default settings."""
    own = {name: value for name, value in os.environ.items() if name not in NOT_DEFAULT}
    variables = {**own, **make_environment(), **server.environment}
    facts = run_probe("serve", variables, *server.list_arguments(form))
    assert "error" not in facts, facts["error"]
    assert not facts["unknown_arguments"]
    if facts["declines"] or facts["hides_nothing"]:
        return Verdict(UNSPLIT)
    has_nano, is_untested = bool(facts["no_micro_batches"]), classify_version(facts["vllm"]) is Standing.UNTESTED
    return Verdict(NANO if has_nano else MICRO, bool(facts["compared"]) or has_nano or is_untested)


def prefill(engine: Engine, rank: int) -> list[Verdict]:
    """Prefill a batch, and return what has become of it on each worker."""
    if not any(engine.statistics()):  # nothing is set up
        return [Verdict(UNSPLIT)]
    engine.configure(DBO_MODE="always")
    engine.generate(PROMPTS)
    kinds = [MICRO if of_rank["split"] else NANO if of_rank["nano"] else UNSPLIT for of_rank in engine.statistics()]
    compared = engine.llm.collective_rpc(_compares_first_steps)
    return [Verdict(kind, kind != UNSPLIT and is_true) for kind, is_true in zip(kinds, compared, strict=True)]


def _compares_first_steps(worker: Any) -> bool:
    return find_decider(worker).first_steps is not None
