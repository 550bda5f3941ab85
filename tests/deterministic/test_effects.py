"""Effects: one recorded outcome under an id, whoever asks, however often, whatever crashes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lease_core.deterministic import (
    EffectStore,
    RecordConflict,
    RecordedFailure,
    StateStore,
    VersionGate,
    WrongKind,
    effect_id,
)
from lease_core.deterministic.errors import RecordUnreadable
from lease_core.errors import InvalidInput, StoreUnavailable
from tests.deterministic import workers
from tests.kills.forks import KILLED, apart, start


def never() -> Any:
    raise AssertionError("this effect is recorded and must not run")


def test_it_runs_once_and_is_answered_from_the_record(effects: EffectStore, name: str) -> None:
    assert effects.run_once(name, lambda: {"rows": 3}) == {"rows": 3}
    assert effects.run_once(name, never) == {"rows": 3}
    assert EffectStore(effects.store).run_once(name, never) == {"rows": 3}


def test_an_effect_without_an_answer_is_recorded_too(effects: EffectStore, name: str) -> None:
    assert effects.run_once(name, lambda: None) is None
    assert effects.run_once(name, never) is None


def test_the_first_answer_is_what_replays_get(effects: EffectStore, name: str) -> None:
    first = effects.run_once(name, lambda: {"pair": (1, 2), 3: "three"})
    assert first == effects.run_once(name, never) == {"pair": [1, 2], "3": "three"}


def test_an_outcome_that_is_no_json_is_refused_and_not_recorded(effects: EffectStore, name: str) -> None:
    for outcome in (object(), float("nan"), {"deep": {1.5: float("inf")}}):
        with pytest.raises(InvalidInput, match=f"outcome of effect '{name}'"):
            effects.run_once(name, lambda outcome=outcome: outcome)
    assert effects.recorded(name) is None


def test_a_failure_is_no_outcome_unless_asked(effects: EffectStore, name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        effects.run_once(name, lambda: 1 / 0)
    assert effects.recorded(name) is None
    assert effects.run_once(name, lambda: "second time") == "second time"


def test_a_failure_is_recorded_if_asked(effects: EffectStore, name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        effects.run_once(name, lambda: 1 / 0, record_failures=True)
    for _ in range(2):
        with pytest.raises(RecordedFailure, match="division by zero") as caught:
            effects.run_once(name, never)
        assert (caught.value.effect_id, caught.value.kind) == (name, "ZeroDivisionError")


def test_only_failures_that_were_named_are_recorded(effects: EffectStore, name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        effects.run_once(name, lambda: 1 / 0, record_failures=(KeyError, ValueError))
    assert effects.recorded(name) is None
    with pytest.raises(KeyError):
        effects.run_once(name, lambda: {}["absent"], record_failures=(KeyError, ValueError))
    with pytest.raises(RecordedFailure, match="KeyError"):
        effects.run_once(name, never)


@pytest.mark.parametrize("crash", [KeyboardInterrupt, SystemExit, StoreUnavailable])
def test_a_crash_is_never_an_outcome(effects: EffectStore, name: str, crash: type[BaseException]) -> None:
    def effect() -> None:
        raise crash("not an answer")

    with pytest.raises(crash):
        effects.run_once(name, effect, record_failures=True)
    assert effects.recorded(name) is None


def test_an_id_is_either_a_version_or_an_effect(effects: EffectStore, name: str) -> None:
    gate = VersionGate(effects.store)
    gate.version(f"{name}/version", 1, 2)
    effects.run_once(f"{name}/effect", lambda: 1)
    with pytest.raises(WrongKind, match="recorded as a version, and asked for as an effect"):
        effects.run_once(f"{name}/version", never)
    with pytest.raises(WrongKind, match="recorded as an effect, and asked for as a version"):
        gate.version(f"{name}/effect", 1, 2)
    with pytest.raises(WrongKind):
        effects.forget(f"{name}/version")
    assert gate.pinned(f"{name}/version") == 2


def test_what_another_program_wrote_is_not_taken_for_a_record(effects: EffectStore, name: str) -> None:
    for strange in ("text", [1], {"kind": "effect"}):
        effects.store.put(name, strange)
        with pytest.raises(RecordUnreadable, match=name):
            effects.run_once(name, never)


def test_records_are_versioned_json_and_newer_ones_are_read(effects: EffectStore, name: str) -> None:
    effects.run_once(name, lambda: 7, about="row 7")
    stored = effects.store.get(name)
    assert (stored["schemaVersion"], stored["kind"], stored["status"], stored["value"]) == (1, "effect", "succeeded", 7)
    effects.store.put(name, stored | {"schemaVersion": 2, "novelty": {"from": "the future"}})
    assert effects.run_once(name, never, about="row 7") == 7


def test_one_id_for_two_things_is_noticed(effects: EffectStore, name: str) -> None:
    effects.run_once(name, lambda: 1, about="invoice 17")
    with pytest.raises(RecordConflict, match="'invoice 17', and asked for about 'invoice 18'"):
        effects.run_once(name, never, about="invoice 18")
    assert effects.run_once(name, never) == 1
    with pytest.raises(InvalidInput, match="about"):
        effects.run_once(f"{name}/2", never, about=18)  # type: ignore[arg-type]


def test_what_was_forgotten_runs_again(effects: EffectStore, name: str) -> None:
    effects.run_once(name, lambda: 1)
    assert effects.forget(name) is True
    assert effects.forget(name) is False
    assert effects.run_once(name, lambda: 2) == 2


def test_default_ids() -> None:
    assert effect_id("orders", 17) == "orders/seq/17"
    assert effect_id("orders", 17, version=2) == "orders/v2/seq/17"
    for wrong in (-1, True, "17", None):
        with pytest.raises(InvalidInput, match="sequence_number"):
            effect_id("orders", wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="change_id"):
        effect_id(" ", 1)


def test_threads_that_race_get_one_outcome(effects: EffectStore, name: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        for turn in range(4):
            answers = pool.map(
                lambda number, turn=turn: effects.run_once(f"{name}/seq/{turn}", lambda: number), range(4)
            )
            assert len(set(answers)) == 1


def test_processes_that_race_get_one_outcome(url: str, name: str) -> None:
    answers = workers.race(workers.run_each, url, name, 12)
    assert all(len(set(of_one_effect)) == 1 for of_one_effect in zip(*answers, strict=True))
    with StateStore.open(url) as store:
        assert [store.get(f"{name}/seq/{n}")["value"] for n in range(12)] == answers[0]


def test_the_second_to_record_gets_the_first_ones_outcome(effects: EffectStore, name: str) -> None:
    def overtaken() -> str:
        assert effects.run_once(name, lambda: "the other's") == "the other's"
        return "mine"

    assert effects.run_once(name, overtaken) == "the other's"


def test_a_failure_that_comes_second_gives_way(effects: EffectStore, name: str) -> None:
    def overtaken() -> str:
        effects.run_once(name, lambda: "the other's")
        raise ValueError("mine")

    assert effects.run_once(name, overtaken, record_failures=True) == "the other's"


@pytest.mark.parametrize(
    ("at", "journal_after_the_kill", "journal_in_the_end"),
    [
        ("before", [], ["begun", "done"]),
        ("during", ["begun"], ["begun", "begun", "done"]),
        ("after", ["begun", "done"], ["begun", "done", "begun", "done"]),
        ("recorded", ["begun", "done"], ["begun", "done"]),
    ],
)
def test_a_kill_leaves_an_outcome_or_none(
    url: str, name: str, tmp_path: Path, at: str, journal_after_the_kill: list[str], journal_in_the_end: list[str]
) -> None:
    journal = tmp_path / "journal"
    process = start(workers.run_and_die, url, name, journal, at)
    process.join(30)
    assert process.exitcode == KILLED
    assert (journal.read_text().split() if journal.exists() else []) == journal_after_the_kill
    with StateStore.open(url) as store:
        assert (EffectStore(store).recorded(name) is not None) == (at == "recorded")
        for _ in range(2):
            assert workers.run_and_die(url, name, journal, "never") == "done"
    assert journal.read_text().split() == journal_in_the_end


# Renaming: the same effects under new ids, while workers of both releases run


def test_while_ids_are_renamed_both_have_the_outcome(effects: EffectStore, name: str) -> None:
    old, new = f"{name}/old", f"{name}/new"
    assert effects.run_once(new, lambda: "dual", formerly=old) == "dual"
    assert effects.run_once(old, never) == effects.run_once(new, never) == "dual"
    assert effects.store.get(new)["copiedFrom"] == old


def test_what_older_workers_recorded_is_found_and_copied(effects: EffectStore, name: str) -> None:
    old, new = f"{name}/old", f"{name}/new"
    effects.run_once(old, lambda: "by the old")
    assert effects.run_once(new, never, formerly=old) == "by the old"
    assert effects.run_once(new, never) == "by the old"


def test_what_newer_workers_recorded_is_found_and_copied_back(effects: EffectStore, name: str) -> None:
    old, new = f"{name}/old", f"{name}/new"
    effects.run_once(new, lambda: "by the new")
    assert effects.run_once(new, never, formerly=old) == "by the new"
    assert effects.run_once(old, never) == "by the new"


def test_a_crash_between_the_two_writes_is_made_good(effects: EffectStore, name: str) -> None:
    old, new = f"{name}/old", f"{name}/new"
    effects.run_once(new, lambda: "dual", formerly=old)
    effects.store.remove(new)
    assert effects.run_once(new, never, formerly=old) == "dual"
    assert effects.run_once(new, never) == "dual"


def test_outcomes_that_disagree_are_reported(effects: EffectStore, name: str) -> None:
    old, new = f"{name}/old", f"{name}/new"
    effects.run_once(old, lambda: 1)
    effects.run_once(new, lambda: 2)
    with pytest.raises(RecordConflict, match="should have the same record"):
        effects.run_once(new, never, formerly=old)


def test_a_renamed_failure_stays_a_failure(effects: EffectStore, name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        effects.run_once(f"{name}/new", lambda: 1 / 0, formerly=f"{name}/old", record_failures=True)
    for each in ("old", "new"):
        with pytest.raises(RecordedFailure):
            effects.run_once(f"{name}/{each}", never)


def test_an_id_is_not_renamed_to_itself(effects: EffectStore, name: str) -> None:
    with pytest.raises(InvalidInput, match="formerly"):
        effects.run_once(name, never, formerly=name)


def test_old_and_new_workers_that_race_agree(url: str, name: str) -> None:
    answers = workers.race(workers.run_renamed, url, name, 10)
    assert all(len(set(of_one_effect)) == 1 for of_one_effect in zip(*answers, strict=True))


# In one transaction with what the effect writes


def test_effect_and_record_are_committed_together_or_not_at_all(tmp_path: Path, deterministic_postgres: str) -> None:
    import sqlalchemy as sa

    for url in (f"sqlite:///{tmp_path / 'state.db'}", deterministic_postgres):
        engine = sa.create_engine(url)
        with StateStore.open(url) as store, engine.connect() as connection:
            effects = EffectStore(store)
            connection.execute(sa.text("CREATE TABLE paid (id TEXT)"))
            connection.commit()

            def pay(connection: sa.Connection = connection) -> str:
                connection.execute(sa.text("INSERT INTO paid VALUES ('x')"))
                return "paid"

            for end in (connection.rollback, connection.commit, connection.commit):
                assert effects.within(connection).run_once("pay/together", pay) == "paid"
                end()
            assert connection.execute(sa.text("SELECT count(*) FROM paid")).scalar() == 1
        engine.dispose()


def test_a_transaction_that_lost_the_race_must_roll_back(tmp_path: Path) -> None:
    import sqlalchemy as sa

    url = f"sqlite:///{tmp_path / 'state.db'}"
    engine = sa.create_engine(url)
    with StateStore.open(url) as store, engine.connect() as connection:
        effects = EffectStore(store)

        def overtaken() -> str:
            effects.run_once("pay", lambda: "the other's")
            return "mine"

        with pytest.raises(RecordConflict, match="roll back"):
            effects.within(connection).run_once("pay", overtaken)
        connection.rollback()
        assert effects.within(connection).run_once("pay", never) == "the other's"
    engine.dispose()


def test_a_store_without_transactions_says_so(tmp_path: Path) -> None:
    with StateStore.open(f"file://{tmp_path}") as store, pytest.raises(InvalidInput, match="has no transactions"):
        EffectStore(store).within(object())


def test_other_processes_find_what_was_recorded(url: str, name: str, tmp_path: Path) -> None:
    assert apart(workers.run_and_die, url, name, tmp_path / "journal", "never") == "done"
    with StateStore.open(url) as store:
        assert EffectStore(store).run_once(name, never) == "done"
