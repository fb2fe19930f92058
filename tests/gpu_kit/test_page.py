"""The page on hardware and the list of evidence: what is committed is what the command writes, and only GPUs prove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_kit.gpu_results import CHIP, make_engine, make_part, make_results
from tools.gpu_kit import page as program
from tools.gpu_kit.evidence import (
    FOLDER,
    ResultsError,
    list_evidence,
    make_slug,
    read_all,
    read_results,
    store_results,
)
from tools.gpu_kit.page import PAGE, compose, main
from tools.gpu_kit.plan import PARTS
from tools.gpu_kit.record import NOT_HERE
from tools.gpu_kit.tables import ROWS, write_page


def test_the_page_and_the_evidence_are_what_the_command_writes_from_the_stored_results() -> None:
    for path, text in compose().items():
        assert path.read_text() == text, "run `make hardware`"


def test_stored_results_are_of_gpus() -> None:
    for path in FOLDER.glob("*.json"):
        content = read_results(path)
        assert path.name == f"{content['machine']['date']}-{make_slug(content['machine']['chip'])}.json"


def test_without_results_the_page_says_that_no_gpu_has_run_it_and_what_is_ready() -> None:
    text = write_page([])
    assert "**No GPU has run it yet.**" in text
    for part in PARTS:
        assert f"| {part.name} | {part.shows} |" in text
    assert "not here: the stand-in's environment has no vLLM" in text
    assert list_evidence([]) == []


def test_every_part_has_rows_and_a_word_on_what_it_shows() -> None:
    assert ROWS.keys() == {part.name for part in PARTS}
    assert all(part.shows for part in PARTS)


def test_the_page_has_rows_of_every_part_with_date_chip_and_versions() -> None:
    text = write_page([make_results()])
    assert "No GPU has run it yet" not in text
    assert f"## {CHIP}, 2026-11-27" in text
    assert "driver 580.65.06, Python 3.12.3, torch 2.11.0+cu130, vLLM 0.30.0. " in text
    for row in (
        "| rms_norm against torch's | relative error 0.0016 |",
        "| 0.5 | 60.75 | 43.5 | 42.5 | 1.397 | 1.45 |",
        "| 0.5 | 40.5 | 20.25 | 4.5 |",
        "| tests of races | 9 passed, 0 failed, 2 skipped |",
        "| tests of graphs | not here: pytest is not installed |",
        "| llama | FLASH_ATTN | first | NONE | 0.0125 / 0.05 | 37 | yes |",
        "| mla | FLASH_ATTN_MLA | first | NONE | 2.5 / 0.05 | 0 | **no** |",
        "| mla-triton | - | - | - | - / - | - | - |",
        "| schedules as they are | compute-sanitizer | == ERROR SUMMARY: 0 errors |",
        "| 1x8000 | 100 | 104 | 77.5 | 1.29 | yes |",
        "| all-reduce of 1024 KiB | 2.5 ms, 0.42 GB/s |",
        "| a kernel concurrent with products | 8.5 | 1.5 | 5.67 |",
        "| a schedule | 1.1 | 1.2 | - |",
        "| 1x8000 | 99 / 101 | 80 / 78 | split | split |",
    ):
        assert row in text, row
    assert "**FAILED**: mla: by settings: differs by 2.5, 3 other tokens" in text
    assert text.count("bash tools/gpu_kit/run.sh .gpu_kit") == len(PARTS) + 1


def test_claims_say_what_they_are() -> None:
    text = write_page([make_results()])
    link = text.partition("### link")[2].partition("### ")[0]
    assert "prefill on one GPU with a link of 26.4 GB/s that takes no multiprocessor" in link
    assert "TP" not in link
    assert "tensor" not in link
    ranks = text.partition("### two-ranks")[2].partition("### ")[0]
    assert "times are not those of two" in ranks
    assert "Times: not here: nvidia-cuda-mps-control is not installed" in ranks


def test_times_of_two_ranks_are_told_with_what_divides_the_gpu() -> None:
    results = make_results()
    halves = {"engine": {}, "divided by": "MPS, half of the multiprocessors for each rank"}
    results["parts"]["two-ranks"]["results"]["halves"] = {**halves, "4x1000": results["parts"]["link"]["results"][
        "8 layers of 4096"]["1x8000"]}  # fmt: skip
    text = write_page([results])
    assert "Times, divided by MPS, half of the multiprocessors for each rank:" in text
    assert "| 4x1000 | 100 | 104 | 77.5 | 1.29 | yes |" in text


@pytest.mark.parametrize("part", [part.name for part in PARTS])
@pytest.mark.parametrize("results", [{}, f"{NOT_HERE}any", {"a": None}, {"a": "FAILED: any", "complete": True}, None])
def test_a_part_that_has_found_little_is_a_section_all_the_same(part: str, results: Any) -> None:
    content = make_results()
    content["parts"] = {part: {"exit": 1, "failed": "killed", "results": results, "jobs": {}}}
    text = write_page([content]).partition("## What is ready")[0]
    assert f"### {part}: " in text
    assert "**FAILED**: killed" in text
    assert "Not run: " in text


def test_engines_that_were_equal_are_evidence_and_others_are_not() -> None:
    shared = {"vllm": "0.30.0", "chip": CHIP, "date": "2026-11-27"}
    assert list_evidence([make_results()]) == [
        {**shared, "backend": "FLASH_ATTN", "runner": "first", "steps": 54},
        {**shared, "backend": "FLASH_ATTN", "runner": "second", "steps": 5},
    ]


def test_evidence_is_of_a_release_whatever_its_build() -> None:
    results = make_results()
    results["machine"]["vllm"] += "+cu130"
    assert {entry["vllm"] for entry in list_evidence([results])} == {"0.30.0"}


def test_evidence_of_several_days_has_the_last_one_and_all_steps() -> None:
    later = make_results()
    later["machine"]["date"] = "2026-12-01"
    (first, _) = list_evidence([make_results(), later])
    assert first["date"] == "2026-12-01"
    assert first["steps"] == 108


def test_an_engine_that_failed_after_it_was_equal_or_split_nothing_is_no_evidence() -> None:
    results = make_results()
    results["parts"]["equal"]["results"] = {"llama": make_engine("FLASH_ATTN"), "mla": make_engine("X", steps=0)}
    results["parts"]["equal"]["jobs"] = {"llama": {"failed": "killed at its limit of 170 s"}}
    assert list_evidence([results]) == []


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("device", ["cpu", "npu", None])
def test_results_of_a_rehearsal_are_refused(device: str | None, tmp_path: Path) -> None:
    content = make_results()
    content["machine"]["device"] = device
    with pytest.raises(ResultsError, match="is of a rehearsal"):
        read_results(write(tmp_path / "results.json", content))


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"machine": {}}', '{"machine": [], "parts": {}}'])
def test_what_are_no_results_is_refused(content: str, tmp_path: Path) -> None:
    with pytest.raises(ResultsError):
        read_results(write(tmp_path / "results.json", content))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("chip", None, "lacks chip"), ("driver", None, "lacks driver"), ("date", "today", "'today' for a date")],
)
def test_results_that_lack_what_the_page_needs_are_refused(name: str, value: Any, told: str, tmp_path: Path) -> None:
    content = make_results()
    content["machine"][name] = value
    with pytest.raises(ResultsError, match=told):
        read_results(write(tmp_path / "results.json", content))


def test_a_machine_without_a_device_that_works_is_refused_with_its_reason(tmp_path: Path) -> None:
    machine = {"device": "cuda", "problem": "no device can be used: the driver is too old"}
    with pytest.raises(ResultsError, match="the driver is too old"):
        read_results(write(tmp_path / "results.json", {"machine": machine, "parts": {}}))


def test_a_second_run_of_a_day_adds_what_it_ran_with_its_commit(tmp_path: Path) -> None:
    first, again = make_results(), make_results()
    stored = store_results(first, tmp_path)
    assert stored.name == "2026-11-27-nvidia-h100-80gb-hbm3.json"
    again["machine"]["commit"] = "fedcba9876543210"
    engines = make_part({"mla": make_engine("FLASH_ATTN_MLA"), "llama": {}})
    engines["jobs"]["llama"] |= {"exit": None, "failed": "no time left"}
    again["parts"] = {"equal": engines}
    assert store_results(again, tmp_path) == stored
    (content,) = read_all(tmp_path)
    assert content["parts"].keys() == {part.name for part in PARTS}
    equal = content["parts"]["equal"]
    assert equal["failed"] is None
    assert equal["results"]["mla"]["equal"] is True
    assert equal["results"]["llama"] == first["parts"]["equal"]["results"]["llama"]
    assert [equal["jobs"][name]["commit"][:3] for name in ("llama", "mla")] == ["012", "fed"]


def test_notes_on_results_are_on_the_page(tmp_path: Path) -> None:
    stored = store_results(make_results(), tmp_path)
    assert [results["notes"] for results in read_all(tmp_path)] == [""]
    stored.with_suffix(".md").write_text("### What failed\n\nNothing.\n")
    text = write_page(read_all(tmp_path))
    assert text.index(f"## {CHIP}") < text.index("### What failed") < text.index("### smoke")


def test_a_part_that_was_not_run_is_not_stored(tmp_path: Path) -> None:
    results = make_results()
    for ending in results["parts"]["auto"]["jobs"].values():
        ending["exit"] = None
    assert "auto" not in json.loads(store_results(results, tmp_path).read_text())["parts"]


def test_a_commit_is_told_only_if_its_sources_are_those_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.gpu_kit.evidence.digest_sources", lambda: "abc")
    results = make_results()
    results["machine"]["commit"] = None
    stored = json.loads(store_results(results, tmp_path).read_text())["machine"]["commit"]
    assert stored is None or len(stored) == 40
    monkeypatch.setattr("tools.gpu_kit.evidence.digest_sources", lambda: "other")
    assert json.loads(store_results(results, tmp_path).read_text())["machine"]["commit"] is None


def test_the_command_writes_both_files_and_refuses_a_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, evidence, folder = tmp_path / "hardware.md", tmp_path / "cuda_evidence.json", tmp_path / "results"
    for name, value in {"PAGE": page, "EVIDENCE": evidence, "ROOT": tmp_path}.items():
        monkeypatch.setattr(program, name, value)
    monkeypatch.setattr(program, "read_all", lambda: read_all(folder))
    monkeypatch.setattr(program, "store_results", lambda content: store_results(content, folder))
    assert main(["--check"]) == 1
    assert not page.exists()
    assert main([str(write(tmp_path / "results.json", make_results()))]) == 0
    assert CHIP in page.read_text()
    assert len(json.loads(evidence.read_text())["evidence"]) == 2
    assert main(["--check"]) == 0
    rehearsal = make_results()
    rehearsal["machine"]["device"] = "cpu"
    capsys.readouterr()
    assert main([str(write(tmp_path / "rehearsal.json", rehearsal))]) == 1
    assert "is of a rehearsal on 'cpu': only results of a GPU are evidence" in capsys.readouterr().err
    assert main(["--check"]) == 0


def test_the_page_is_in_the_documentation() -> None:
    assert PAGE.name in (PAGE.parents[1] / "mkdocs.yml").read_text()
