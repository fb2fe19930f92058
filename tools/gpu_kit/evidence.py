"""What results of GPUs prove: they are stored as they come, and of the engines that were equal a list is made.

The list, `cuda_evidence.json` of the plugin's platforms, has each vLLM, attention backend and model runner with which
split steps on a chip were compared with unsplit ones, and equal. Results of a rehearsal are refused: they prove nothing
about a GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .machine import ROOT, digest_sources
from .record import add_job

FOLDER = Path(__file__).parent / "results"
EVIDENCE = ROOT / "dbo_runtime" / "vllm_plugin" / "platforms" / "cuda_evidence.json"
NEEDED = ("chip", "driver", "torch", "vllm", "date")

Results = Mapping[str, Any]
"""The content of one results.json."""


class ResultsError(ValueError):
    """A file that holds no results of a GPU; the message says why."""


def read_results(path: Path) -> dict[str, Any]:
    """Return the results of a GPU in a file.

    Raises:
        ResultsError: if it cannot be read, is damaged, or is of a rehearsal.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from None
    machine = content.get("machine") if isinstance(content, dict) else None
    parts = content.get("parts") if isinstance(content, dict) else None
    if not isinstance(machine, dict) or not isinstance(parts, dict):
        raise ResultsError(f"{path} is no results.json of the kit: it has no `machine` and `parts`")
    if machine.get("device") != "cuda":
        raise ResultsError(f"{path} is of a rehearsal on {machine.get('device')!r}: only results of a GPU are evidence")
    missing = [name for name in NEEDED if not machine.get(name)]
    if missing or not parts:
        lacking = ", ".join([*missing, *([] if parts else ["any part"])])
        raise ResultsError(f"{path} has nothing of a GPU: it lacks {lacking}. {machine.get('problem') or ''}".rstrip())
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", machine["date"]):
        raise ResultsError(f"{path} has {machine['date']!r} for a date")
    return content


def store_results(content: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Store results under their date and chip; what another run on that day has shown, and these did not, stays."""
    machine = content["machine"]
    if not machine.get("commit"):
        machine = {**machine, "commit": find_commit(machine.get("source"))}
    path = folder / f"{machine['date']}-{make_slug(machine['chip'])}.json"
    parts = dict(read_results(path)["parts"]) if path.is_file() else {}
    for name, part in content["parts"].items():
        if any(ending["exit"] is not None for ending in part["jobs"].values()):
            parts[name] = add_part(parts.get(name, {}), name, part, machine["commit"])
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "parts": parts}, indent=1) + "\n")
    return path


def add_part(before: Mapping[str, Any], name: str, part: Mapping[str, Any], commit: str | None) -> dict[str, Any]:
    """Return a part as it was shown before, with the jobs that were run since, each with the commit that was run."""
    about = {key: value for key, value in part.items() if key not in ("exit", "failed", "results", "jobs")}
    found = {**before, **about}
    for job, ending in part["jobs"].items():
        if ending["exit"] is not None:  # it was run
            results = part["results"] if job == name else part["results"].get(job, {})
            found = add_job(found, name, job, {"commit": commit, **ending, "results": results})
    return found


def find_commit(source: str | None) -> str | None:
    """Return the commit that is checked out, if its sources are those that ran where there was no history."""
    if source != digest_sources():
        return None
    words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or None


def make_slug(text: str) -> str:
    """Return a chip's name as the part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def read_all(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return all stored results, the newest first, with what was written about them by hand, as `notes`."""
    return [{**read_results(path), "notes": read_notes(path)} for path in sorted(folder.glob("*.json"), reverse=True)]


def read_notes(path: Path) -> str:
    """Return the notes on the results in a file: those in a file of its name that ends in `.md`, if it is there."""
    notes = path.with_suffix(".md")
    return notes.read_text() if notes.is_file() else ""


def list_evidence(all_results: Iterable[Results]) -> list[dict[str, Any]]:
    """Return one entry for each vLLM, backend, runner and chip; the newest date, and the split steps of all runs."""
    entries: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for results in all_results:
        for entry in _list_equal(results):
            key = entry["vllm"], entry["backend"], entry["runner"], entry["chip"]
            known = entries.get(key, entry | {"steps": 0})
            entries[key] = known | {
                "date": max(known["date"], entry["date"]),
                "steps": known["steps"] + entry["steps"],
            }
    return [entries[key] for key in sorted(entries)]


def _list_equal(results: Results) -> Iterator[dict[str, Any]]:
    """Yield an entry for each engine of part `equal` all of whose answers were equal, and that split steps."""
    machine, part = results["machine"], results["parts"].get("equal", {})
    endings = part.get("jobs", {})
    for name, found in part.get("results", {}).items():
        if not isinstance(found, dict) or found.get("equal") is not True or not found.get("split steps"):
            continue
        if endings.get(name, {}).get("failed"):
            continue  # it was equal, but something else of it went wrong
        for backend in found["engine"]["backends"]:
            yield {
                "vllm": machine["vllm"].partition("+")[0],  # a release, as the plugin reads it, whatever its build
                "backend": backend,
                "runner": found["engine"]["runner"],
                "chip": machine["chip"],
                "date": machine["date"],
                "steps": found["split steps"],
            }
