"""Runs that are killed on the way leave exact totals behind, at every stage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from definitions.bronze import MOST_BYTES
from definitions.fabric_demo import Fabric, kill_a_run, work_off
from definitions.findings import by_assets, by_iceberg
from definitions.orders import write_files
from definitions.tally import tally

ROOT = Path(__file__).parents[2]
STAGES = {
    "landing_files": ("landing", "load_bronze"),
    "bronze_batches": ("refine", "refine_silver"),
    "touched_days": ("days", "compute_gold"),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_of_each_stage_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    there = Fabric(tmp_path / "home")
    write_files(there.home / "landing", 50)
    for sensor, (queue, job) in STAGES.items():
        there.tick(sensor)
        assert kill_a_run(there, queue, job) > 0
        work_off(there, queue, job)
    there.finish(there.start("show_results"))
    expected = tally(there.home / "landing", MOST_BYTES)
    assert by_assets(there.queue(), there.value) == expected
    assert by_iceberg(there.queue(), there.resources) == expected


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_headless_demo_proves_what_it_claims(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "definitions.fabric_demo", "--files", "80"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("killed with SIGKILL", "the file is empty", "Every good record of every file was counted"):
        assert words in done.stdout
    assert "DIFFERS" not in done.stdout
