"""The demo is an example that people run first, so it is run here as well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_proves_what_it_claims_without_a_terminal(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "COLUMNS": "100"}
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        environment.pop(name, None)
    demo = subprocess.run(
        [sys.executable, "-m", "definitions.demo", "--orders", "1000"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    assert "\x1b" not in demo.stdout, "no escape codes in a log file"
    for words in ("killed with SIGKILL", "orders done twice", "Nothing was lost, and nothing was done twice."):
        assert words in demo.stdout
    assert "FAILED" not in demo.stdout
