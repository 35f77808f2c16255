"""deploy/records.py: what the workers in containers wrote down is read, timed and added up right."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(__file__).parents[3] / "deploy" / "records.py"
_spec = importlib.util.spec_from_file_location("deploy_records", _PATH)
assert _spec is not None
assert _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


def write(folder: Path, host: str, *events: dict[str, Any], number: int = 1) -> None:
    with (folder / f"{host}-16-{number}.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def job(steps: int = 2) -> dict[str, Any]:
    return {"event": "job", "at": 0.0, "steps": steps, "samples": 4, "steps_per_epoch": 2}


def view(at: float, generation: int, rank: int, size: int = 2) -> dict[str, Any]:
    return {"event": "view", "at": at, "generation": generation, "rank": rank, "size": size}


def step(number: int, generation: int, *indices: int, applied: bool = True, at: float = 0.0) -> list[dict[str, Any]]:
    facts = {"at": at, "step": number, "generation": generation}
    return [{"event": "attempt", **facts, "indices": list(indices)}, *([{"event": "applied", **facts}] * applied)]


def committed(at: float, number: int) -> dict[str, Any]:
    return {"event": "committed", "at": at, "step": number}


@pytest.fixture
def records(tmp_path: Path) -> Any:
    return _module.Records(tmp_path)


def test_a_redone_step_counts_once(tmp_path: Path, records: Any) -> None:
    write(tmp_path, "a", job(), *step(1, 1, 0), *step(2, 1, 2, applied=False), *step(2, 2, 2, 3))
    write(tmp_path, "b", job(), *step(1, 1, 1), *step(2, 1, 3, applied=False))
    records.refresh()
    assert records.wrong() == []
    assert records.steps == 2


def test_missing_steps_and_wrong_sample_counts_are_reported(tmp_path: Path, records: Any) -> None:
    write(tmp_path, "a", job(4), *step(1, 1, 0), *step(2, 1, 2, 2), *step(3, 1, 0, 1, 2, 3))
    records.refresh()
    missing, first = records.wrong()
    assert missing == "steps that no worker applied: [4]"
    assert first == "epoch 1: 2 samples not used, 1 used more than once"


def test_records_without_a_job_are_wrong(records: Any) -> None:
    assert records.wrong() == ["no worker began"]


def test_an_incomplete_line_is_read_once_it_is_complete(tmp_path: Path, records: Any) -> None:
    path = tmp_path / "a-16-1.jsonl"
    text = json.dumps(committed(1.0, 1)) + "\n"
    path.write_text(text[:9])
    records.refresh()
    assert records.workers["a-16-1"] == []
    path.write_text(text)
    records.refresh()
    assert records.committed(["a"], 0.0) == 1.0


def test_recovery_counts_only_commits_of_steps_of_the_new_view(tmp_path: Path, records: Any) -> None:
    # Step 1 is committed under the view that came after the fault, but was applied before it: that proves little.
    write(tmp_path, "a", view(1.0, 1, 0), *step(1, 1, 0, at=1.5), view(3.0, 2, 0), committed(3.1, 1))
    records.refresh()
    assert records.back(["a"], 2.0) is None
    write(tmp_path, "a", *step(2, 2, 0, at=3.2), committed(3.3, 2))
    records.refresh()
    assert records.back(["a"], 2.0) == 3.3
    assert records.back(["a"], 2.0, size=3) is None
    assert records.back(["a", "b"], 2.0) is None  # all of them must
    write(tmp_path, "b", view(3.0, 2, 1), *step(2, 2, 1, at=3.2), committed(3.4, 2), number=7)
    records.refresh()
    assert records.back(["a", "b"], 2.0) == 3.4
    assert records.by_rank(["b", "a"]) == ["a", "b"]


def test_by_rank_uses_the_latest_file_of_a_restarted_container(tmp_path: Path, records: Any) -> None:
    write(tmp_path, "a", view(1.0, 1, 1), number=5)
    write(tmp_path, "a", view(2.0, 2, 0), number=12)
    write(tmp_path, "b", view(2.0, 2, 1))
    records.refresh()
    assert records.by_rank(["b", "a"]) == ["a", "b"]


def test_longest_gap_between_commits_and_a_wait_that_times_out(tmp_path: Path, records: Any) -> None:
    write(tmp_path, "a", *(committed(at, 1) for at in (1.0, 2.0, 5.0)))
    records.refresh()
    assert records.longest_gap(0.5, 6.0) == 3.0
    assert records.longest_gap(0.0, 9.0) == 4.0
    assert not records.ended
    with pytest.raises(TimeoutError, match="did not happen within 0 s: an end"):
        records.wait(lambda: records.ended, "an end", timeout=0.0)
