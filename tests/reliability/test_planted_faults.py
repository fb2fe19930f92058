"""Faults that were planted from outside and that nothing caught are caught now, by name; what is right passes.

All kinds of fault are in docs/reliability.md, which `make planted-faults` writes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.reliability.planted_faults import classify
from tests.support.reliability.adapter_faults import ADAPTER_FAULTS
from tests.support.reliability.metadata_faults import METADATA_FAULTS
from tests.support.reliability.page import PAGE
from tests.support.reliability.probe import ENDED, VERIFY, Outcome, run_probe
from tests.support.vllm.families import make_family

CAUGHT = {  # by the verification, and by DBO_CHECK=races
    "leave_out_ordered": ("L0.attention differs first", "split and unsplit hidden states differ"),
    "change_residual_in_place": ("L0.mlp: it changed ", "op 'mlp', layer 0"),
    "change_attention_input_in_place": ("L0.attention: it changed ", "op 'attention', layer 0"),
    "leave_out_overwrites_of_reduce": ("L0.attn_reduce: its result ", "op 'attn_reduce', layer 0"),
    "attention_on_comm": ("L0.attention: it computes on communicator 'comm'", "op 'attention', layer 0"),
}
"""What was planted into an adapter and passed DBO_CHECK=1, or did not end."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("LlamaForCausalLM", tmp_path_factory.mktemp("model"))


@pytest.mark.vllm
@pytest.mark.slow
def test_what_passed_every_check_before_is_named_by_two(model: Path) -> None:
    said = {
        (outcome.fault, outcome.check): outcome.error for outcome in run_probe(model, list(CAUGHT), (VERIFY, "races"))
    }
    for fault, (verified, watched) in CAUGHT.items():
        assert verified in said[fault, VERIFY]
        assert watched in said[fault, "races"]


@pytest.mark.vllm
@pytest.mark.slow
def test_a_norm_on_comm_is_named_by_the_verification(model: Path) -> None:
    (outcome,) = run_probe(model, ["norm_on_comm"], (VERIFY,))
    assert "L0.mlp_norm: it computes on communicator 'comm'" in outcome.error


@pytest.mark.vllm
@pytest.mark.slow
def test_metadata_that_does_not_fit_is_refused_before_a_kernel_reads_it(model: Path) -> None:
    faults = ["swap_contexts", "start_late", "forget_a_token"]
    for outcome in run_probe(model, faults, ("1",)):
        assert "does not fit" in outcome.error, outcome


@pytest.mark.vllm
@pytest.mark.slow
def test_nothing_is_said_of_what_is_right(model: Path) -> None:
    assert [outcome.error for outcome in run_probe(model, ["none"])] == ["", "", ""]


def test_the_page_has_every_kind_of_fault_and_each_was_caught() -> None:
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition("<!-- planted-faults -->")[2].partition("<!-- /planted-faults -->")[0]
    kinds = int(re.search(r"(\d+) kinds of fault; by no check: none\.", section)[1])  # type: ignore[index]
    assert kinds >= 40
    for fault in (*ADAPTER_FAULTS, *METADATA_FAULTS):
        (row,) = re.findall(rf"^\| {fault.__name__.replace('_', ' ')} \|.*$", section, re.MULTILINE)
        assert (fault.__doc__ or "").strip().rstrip(".") in row
    assert not re.search(r"\b(\d+) of (?!\1\b)\d+", section)  # each unsafe schedule and plan was refused


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("", "–"),
        (ENDED, "the engine stops"),
        ("Worker failed with error 'op 'mlp': it changed %3:mlp, which", "changes what it only reads"),
        ("split and unsplit hidden states differ by 1.2", "results differ"),
        ("no such kernel", "the op's own error"),
    ],
)
def test_what_a_check_said_is_told_in_a_few_words(error: str, said: str) -> None:
    assert classify(Outcome("fault", "1", error)) == said
