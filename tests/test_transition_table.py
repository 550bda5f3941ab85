"""Every state by every command by every kind of token, before, at and after expiry: no cell undefined.

The table is written from the design, not from the code. A cell says what becomes of the item: a state it moves to,
``same`` (accepted again, nothing changes), or why it is refused: ``stale``, ``expired``, ``unknown``, ``no`` (not
applicable). ``a>b``: a before the moment T at which the lease runs out or the delay ends, b at T and after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product

import pytest

from lease_core.machine import (
    Claim,
    Command,
    Complete,
    Drain,
    Ended,
    Expire,
    Fail,
    Grant,
    Heartbeat,
    Moved,
    Outcome,
    Purge,
    Refused,
    Release,
    Repeated,
    Requeue,
    Restore,
    Retry,
    Span,
    State,
    decide,
    join,
)

T = 1_000_000
TIMES = {"before": T - 1, "at": T, "after": T + 1}
FIRST, LAST, ATTEMPT, LEASE, FENCE = 10, 12, 2, "lease", 700
RETRY, USED_UP = Retry(5, 50, 400), Retry(ATTEMPT, 50, 400)

BY_TOKEN = """
                 | heartbeat      complete          fail            fail-dead     fail-last     release
absent           | unknown        unknown           unknown         unknown       unknown       unknown
pending          | stale          stale             stale           stale         stale         stale
delayed          | stale          stale             stale           stale         stale         stale
pending-failed   | stale          stale             same            same          same          stale
delayed-failed   | stale          stale             same            same          same          stale
pending-released | stale          stale             stale           stale         stale         same
pending-expired  | expired        expired           expired         expired       expired       expired
pending-restored | stale          stale             stale           stale         stale         stale
leased           | leased>expired completed>expired pending>expired dead>expired  dead>expired  pending>expired
completed        | stale          same              stale           stale         stale         stale
dead-failed      | stale          stale             same            same          same          stale
dead-expired     | expired        expired           expired         expired       expired       expired
dead-restored    | stale          stale             stale           stale         stale         stale
drained          | stale          stale             stale           stale         stale         stale
drained-failed   | stale          stale             same            same          same          stale
drained-released | stale          stale             stale           stale         stale         same
drained-expired  | expired        expired           expired         expired       expired       expired
drained-restored | stale          stale             stale           stale         stale         stale
"""

BY_THE_QUEUE = """
                 | grant      expire      expire-last   drain    restore  requeue  purge
absent           | unknown    unknown     unknown       unknown  unknown  unknown  unknown
pending          | leased     no          no            drained  no       no       no
delayed          | no>leased  no          no            drained  no       no       no
pending-failed   | leased     no          no            drained  no       no       no
delayed-failed   | no>leased  no          no            drained  no       no       no
pending-released | leased     no          no            drained  no       no       no
pending-expired  | leased     no          no            drained  no       no       no
pending-restored | leased     no          no            drained  no       no       no
leased           | no         no>pending  no>dead       no       no       no       no
completed        | no         no          no            no       no       no       no
dead-failed      | no         no          no            no       no       pending  gone
dead-expired     | no         no          no            no       no       pending  gone
dead-restored    | no         no          no            no       no       pending  gone
drained          | no         no          no            no       pending  no       no
drained-failed   | no         no          no            no       pending  no       no
drained-released | no         no          no            no       pending  no       no
drained-expired  | no         no          no            no       pending  no       no
drained-restored | no         no          no            no       pending  no       no
"""

EVENTS = {
    ("grant", "leased"): ("LeaseGranted",),
    ("heartbeat", "leased"): ("Heartbeat",),
    ("complete", "completed"): ("Completed",),
    ("fail", "pending"): ("Failed",),
    ("fail-dead", "dead"): ("Failed", "DeadLettered"),
    ("fail-last", "dead"): ("Failed", "DeadLettered"),
    ("release", "pending"): ("Released",),
    ("expire", "pending"): ("Expired",),
    ("expire-last", "dead"): ("Expired", "DeadLettered"),
    ("drain", "drained"): ("Drained",),
    ("restore", "pending"): ("Restored",),
    ("requeue", "pending"): ("Restored",),
    ("purge", "gone"): ("Purged",),
}

CODES = {
    "resourcelease.stale_token": "stale",
    "resourcelease.lease_expired": "expired",
    "resourcelease.unknown_item": "unknown",
    "resourcelease.not_applicable": "no",
}

ACKNOWLEDGEMENTS = ("heartbeat", "complete", "fail", "fail-dead", "fail-last", "release")

BAD_TOKENS = {
    "stale lease id": Claim(ATTEMPT, "another", FENCE),
    "stale attempt": Claim(ATTEMPT - 1, LEASE, FENCE),
    "future attempt": Claim(ATTEMPT + 1, LEASE, FENCE),
    "wrong fence": Claim(ATTEMPT, LEASE, FENCE - 1),
    "absent": Claim(0, "", 0),
}
CURRENT = Claim(ATTEMPT, LEASE, FENCE)


def parse(table: str) -> dict[tuple[str, str], dict[str, str]]:
    """(state, command) to the expected answer at each time."""
    header, *rows = [line.split("|") for line in table.splitlines() if line.strip()]
    commands = header[1].split()
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for state, answers in rows:
        for command, cell in zip(commands, answers.split(), strict=True):
            before, _, later = cell.partition(">")
            cells[state.strip(), command] = {"before": before, "at": later or before, "after": later or before}
    return cells


CELLS = parse(BY_TOKEN) | parse(BY_THE_QUEUE)
STATES = list(dict.fromkeys(state for state, _ in CELLS))
COMMANDS = list(dict.fromkeys(command for _, command in CELLS))


def make_state(name: str) -> Span | None:
    """Three items in the state, whose last or current token is CURRENT where they ever had one."""
    if name == "absent":
        return None
    state, _, ended = name.partition("-")
    leased = bool(ended) or state in ("leased", "completed")
    return Span(
        FIRST,
        LAST,
        State.PENDING if state == "delayed" else State[state.upper()],
        priority=3,
        available_at=T if state == "delayed" else T - 500,
        attempt=ATTEMPT - (ended == "released") if leased else 0,
        lease_id=LEASE if leased else None,
        owner="owner" if leased else None,
        fence=FENCE if leased else 0,
        expires_at=T if state == "leased" else None,
        ended=Ended[ended.upper()] if ended in ("failed", "released", "expired") else None,
        result=b"1" if state == "completed" else None,
        has_errors=ended in ("failed", "expired"),
    )


def make_command(name: str, claim: Claim, fence: int = 900) -> Command:
    match name:
        case "grant":
            return Grant("new lease", "new owner", fence, T + 300)
        case "heartbeat":
            return Heartbeat(claim, T + 300)
        case "complete":
            return Complete(claim, b"2")
        case "fail":
            return Fail(claim, RETRY)
        case "fail-dead":
            return Fail(claim, RETRY, requeue=False)
        case "fail-last":
            return Fail(claim, USED_UP)
        case "release":
            return Release(claim)
        case "expire":
            return Expire(RETRY)
        case "expire-last":
            return Expire(USED_UP)
        case "drain":
            return Drain()
        case "restore":
            return Restore(T + 7)
        case "requeue":
            return Requeue()
        case "purge":
            return Purge()
    raise AssertionError(name)


def answer(outcome: Outcome) -> str:
    match outcome:
        case Moved(None, _):
            return "gone"
        case Moved(to, _) if to is not None:
            return to.state.name.lower()
        case Repeated():
            return "same"
        case Refused(code, reason):
            assert reason, "a refusal says why"
            return CODES[code]
    raise AssertionError(outcome)


def every_cell(check: Callable[[str, str, str], None]) -> Callable[[str], None]:
    """A test for each state, of all its cells: a test for each cell takes far longer to report than to run."""

    @pytest.mark.parametrize("state", STATES)
    def of_a_state(state: str) -> None:
        for command, time in product(COMMANDS, TIMES):
            with naming(state, command, time):
                check(state, command, time)

    return of_a_state


@contextmanager
def naming(*cell: str) -> Iterator[None]:
    """Whatever fails says in which cell."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the cell: {', '.join(cell)}")
        raise


def test_the_table_covers_every_state_every_ending_and_every_command() -> None:
    spans = [span for name in STATES if (span := make_state(name))]
    assert {span.state for span in spans} == set(State)
    for reachable in (
        *((State.PENDING, ended) for ended in (None, *Ended)),
        *((State.DRAINED, ended) for ended in (None, *Ended)),
        *((State.DEAD, ended) for ended in (None, Ended.FAILED, Ended.EXPIRED)),
        (State.LEASED, None),
        (State.COMPLETED, None),
    ):
        assert reachable in {(span.state, span.ended) for span in spans}
    kinds = {type(make_command(name, CURRENT)) for name in COMMANDS}
    assert kinds == set(Command.__args__)  # type: ignore[attr-defined]
    assert set(CELLS) == set(product(STATES, COMMANDS))


@every_cell
def test_with_the_current_token_each_cell_is_as_the_table_says(state: str, command: str, time: str) -> None:
    outcome = decide(make_state(state), make_command(command, CURRENT), TIMES[time])
    assert answer(outcome) == CELLS[state, command][time]
    if isinstance(outcome, Moved):
        assert outcome.events == EVENTS[command, answer(outcome)]


@pytest.mark.parametrize("state", STATES)
def test_with_any_other_token_no_acknowledgement_ever_changes_anything(state: str) -> None:
    for command, token, time in product(ACKNOWLEDGEMENTS, BAD_TOKENS, TIMES):
        with naming(state, command, token, time):
            outcome = decide(make_state(state), make_command(command, BAD_TOKENS[token]), TIMES[time])
            assert answer(outcome) == ("unknown" if state == "absent" else "stale")


@every_cell
def test_a_move_changes_what_it_should_and_nothing_else(state: str, command: str, time: str) -> None:
    span, now = make_state(state), TIMES[time]
    outcome = decide(span, make_command(command, CURRENT), now)
    if not isinstance(outcome, Moved) or outcome.to is None:
        return
    to = outcome.to
    assert span is not None
    assert (to.first, to.last, to.priority) == (span.first, span.last, span.priority)
    assert (to.state is State.LEASED) == (to.expires_at is not None)
    assert to.has_errors == (span.has_errors or command.startswith(("fail", "expire")))
    assert to.result == (b"2" if command == "complete" else None)
    expected_attempt = {"grant": span.attempt + 1, "release": span.attempt - 1, "requeue": 0}
    assert to.attempt == expected_attempt.get(command, span.attempt)
    if command == "grant":
        assert (to.lease_id, to.owner, to.fence, to.expires_at) == ("new lease", "new owner", 900, T + 300)
    elif command == "requeue":
        assert (to.lease_id, to.owner, to.fence) == (None, None, 0)
    else:
        assert (to.lease_id, to.owner, to.fence) == (span.lease_id, span.owner, span.fence)
    ended = {"release": Ended.RELEASED, "grant": None, "requeue": None}
    if command.startswith("fail"):
        assert to.ended is Ended.FAILED
    elif command.startswith("expire"):
        assert to.ended is Ended.EXPIRED
    else:
        assert to.ended is ended.get(command, span.ended)
    if command not in ("fail", "restore", "expire", "heartbeat"):
        assert to.available_at == now


@every_cell
def test_a_decision_for_a_span_is_the_decision_for_each_of_its_items(state: str, command: str, time: str) -> None:
    span, now = make_state(state), TIMES[time]
    if span is None:
        return
    whole = decide(span, make_command(command, CURRENT), now)
    parts: list[Span] = []
    for item in range(FIRST, LAST + 1):
        offset = item - FIRST
        claim = Claim(ATTEMPT, LEASE, FENCE + offset)
        part = decide(span.cut(item, item), make_command(command, claim, 900 + offset), now)
        assert answer(part) == answer(whole)
        if isinstance(part, Moved) and part.to is not None:
            assert (part.to.first, part.to.last) == (item, item)
            parts.append(part.to)
    if isinstance(whole, Moved) and whole.to is not None:
        assert join(parts) == [whole.to]


def test_a_heartbeat_never_shortens_a_lease() -> None:
    for expires_at in (T - 5, T, T + 5):
        outcome = decide(make_state("leased"), Heartbeat(CURRENT, expires_at), T - 10)
        assert isinstance(outcome, Moved)
        assert outcome.to is not None
        assert outcome.to.expires_at == max(T, expires_at)


def test_an_expired_item_was_available_from_its_expiry_on() -> None:
    outcome = decide(make_state("leased"), Expire(RETRY), T + 99)
    assert isinstance(outcome, Moved)
    assert outcome.to is not None
    assert outcome.to.available_at == T


@pytest.mark.parametrize("delay", [0, 1, 10**9])
def test_a_delay_given_with_a_failure_is_kept_to_the_microsecond(delay: int) -> None:
    outcome = decide(make_state("leased"), Fail(CURRENT, RETRY, delay=delay), T - 10)
    assert isinstance(outcome, Moved)
    assert outcome.to is not None
    assert outcome.to.available_at == T - 10 + delay


@pytest.mark.parametrize("attempt", [0, 1, 2, 3, 10, 50, 1_000_000])
def test_the_pause_is_bounded_and_repeatable(attempt: int) -> None:
    retry = Retry(5, 1_000, 64_000)
    longest = min(1_000 * 2 ** min(max(attempt - 1, 0), 10), 64_000)
    pauses = [retry.wait(attempt, f"seed {n}") for n in range(200)]
    assert pauses == [retry.wait(attempt, f"seed {n}") for n in range(200)]
    assert all(longest * 3 // 4 <= pause <= longest for pause in pauses)
    assert len(set(pauses)) > 50
    assert Retry(5, 0, 0).wait(attempt, "seed") == 0


def test_joining_needs_neighbours_in_the_same_condition() -> None:
    span = make_state("leased")
    assert span is not None
    a, b, c = (span.cut(n, n) for n in (10, 11, 12))
    assert join([c, a, b]) == [span]
    assert join([a, c]) == [a, c]
    assert [a.fence, b.fence, c.fence] == [700, 701, 702]
    for odd in (
        Span(**{field: getattr(b, field) for field in b.__struct_fields__} | change)
        for change in ({"fence": 0}, {"attempt": 9}, {"owner": "x"}, {"expires_at": 1}, {"key": "k"}, {"result": b""})
    ):
        assert join([a, odd, c]) == [a, odd, c]
