"""The quick look at a batch and the slow one, which says what is wrong with it, agree on every batch."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lease_core.replication.digest import digest_of
from lease_core.replication.hub.admission import Offer, Verdict, check
from tests.replication_hub.batches import batch

GOOD = batch(9, 12).lines
NOTHING_FOUND = "lines: not events"

places = st.integers(0, len(GOOD))
pieces = st.binary(max_size=3) | st.sampled_from([
    b"\n", b"\n\n", b" ", b"\r", b"\x00", b"}", b"{", b"{}", b'"', b",", b"1", b"0", b"-", b"null", b"\\", b"\xff",
    b'"namespace":"m",', b'"namespace":"n",', b'"sequenceNumber":9,',
])  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    lines = GOOD
    for _ in range(draw(st.integers(1, 3))):
        start, end = sorted((draw(places), draw(places)))
        if draw(st.booleans()):
            end = min(end, start + 2)
        lines = lines[:start] + draw(pieces) + lines[end:]
    return lines


@settings(max_examples=2_000, deadline=None)
@given(damaged())
def test_what_is_refused_is_told_and_what_is_taken_is_good(lines: bytes) -> None:
    found = check("a", batch(9, 12), lines)
    if isinstance(found, Verdict):
        assert found.outcome == "INVALID"
        assert found.reason != NOTHING_FOUND
    else:
        each = lines.split(b"\n")
        assert each.pop() == b""
        for number, line in enumerate(each, 9):  # one by one they are as good as together
            assert isinstance(check("a", batch(number, number), line + b"\n"), Offer)


def test_a_good_batch_is_an_offer() -> None:
    assert check("a", batch(9, 12), GOOD) == Offer("a", "n", 9, 12, GOOD, digest_of(GOOD))
