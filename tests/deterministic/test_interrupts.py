"""A run that is cancelled while it records: whatever the step, the record is there or not, and everybody goes on."""

from __future__ import annotations

from pathlib import Path

import lease_core.deterministic
from lease_core.deterministic import EffectStore, StateStore
from tests.interrupts import at_every_step

CODE = [Path(lease_core.deterministic.__file__).parent]


def test_an_interrupt_at_any_step_leaves_a_record_or_none(url: str, name: str) -> None:
    with StateStore.open(url) as mine, StateStore.open(url) as others:
        interrupted, elsewhere = EffectStore(mine), EffectStore(others)
        runs: list[str] = []
        ids = [f"{name}/0"]

        def effect() -> str:
            runs.append(f"run {len(runs)}")
            return runs[-1]

        for place in at_every_step(CODE, lambda: interrupted.run_once(ids[-1], effect)):
            recorded = elsewhere.recorded(ids[-1])
            before = len(runs)
            outcome = elsewhere.run_once(ids[-1], effect)
            assert recorded is None or (recorded.value, len(runs)) == (outcome, before), place
            assert interrupted.run_once(ids[-1], effect) == outcome == runs[-1], place
            ids.append(f"{name}/{len(ids)}")
