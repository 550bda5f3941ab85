"""Files that are no good end in quarantine or among the dead letters, and never in a queue that does not get on."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from definitions.orders import order_event
from definitions.quarantine import put_aside
from tests.fabric.driving import Driver

GOOD = json.dumps(order_event(1, 0), ensure_ascii=False).encode()
FILES = {
    "binary.json": bytes(range(128, 256)) * 20,
    "blank.json": b" \n\r\n\t\n",
    "corrupt.json": b'{"order_id": \n' + GOOD + b"\n",
    "empty.json": b"",
    "fine.json": GOOD + b"\n",
    "huge.json": (GOOD + b"\n") * 40,
    "not objects.json": b'5\nnull\n[]\n"text"\n' + GOOD + b" trailing\n" + GOOD + GOOD + b"\n",
    "truncated.json": GOOD + b"\n" + GOOD[:40],
}
MOST_BYTES = len(FILES["binary.json"])
WHOLE = {"blank.json", "empty.json", "huge.json", "gone.json", "folder.json"}


@pytest.fixture
def bad(driver: Driver) -> Driver:
    """All of these in the landing folder, and a folder and a file that has gone by the time it is leased."""
    (driver.landing / "folder.json").mkdir()
    (driver.landing / "gone.json").touch()
    for name, data in FILES.items():
        (driver.landing / name).write_bytes(data)
    driver.tick("landing_files")
    (driver.landing / "gone.json").unlink()
    return driver


def reasons(driver: Driver, bronze: Any) -> dict[str, set[str]]:
    aside = put_aside(bronze, driver.queue())
    return {file: set(rows["problems"]) for file, rows in aside.groupby("file")}


EXPECTED = {
    "binary.json": {"not UTF-8"},
    "blank.json": {"the file is empty"},
    "corrupt.json": {"not a JSON object"},
    "empty.json": {"the file is empty"},
    "huge.json": {f"the file is larger than {MOST_BYTES} bytes"},
    "not objects.json": {"not a JSON object"},
    "truncated.json": {"not a JSON object"},
    "gone.json": {"the file cannot be read (FileNotFoundError)"},
    "folder.json": {"the file cannot be read (IsADirectoryError)"},
}


@pytest.mark.parametrize("fate", ["quarantine", "dead_letter"])
def test_bad_files_are_put_aside_with_the_reason(bad: Driver, fate: str) -> None:
    fates = {f"{kind}_files": fate for kind in ("huge", "empty", "unreadable")}
    bronze = bad.bronze(most_bytes=MOST_BYTES, **fates)
    dead = {Path(letter.item.resource_id).name for letter in bad.queue().dead_letters()}
    assert bad.left() == {}
    assert reasons(bad, bronze) == EXPECTED
    assert dead == (WHOLE if fate == "dead_letter" else set())
    assert bad.queue().stats().completed == len(EXPECTED) + 1 - len(dead)
    good = bronze[bronze["problems"].isna()]
    assert sorted(good["file"]) == ["corrupt.json", "fine.json", "truncated.json"]
    assert bronze.loc[bronze["file"] == "truncated.json", "raw"].dropna().tolist() == [GOOD[:40].decode()]


def test_a_batch_without_a_single_file_of_use_is_no_failure(driver: Driver) -> None:
    assert driver.bronze({"a.json": b"", "b.json": b""}, empty_files="dead_letter").empty
    assert (driver.queue().stats().dead, driver.left()) == (2, {})
    assert driver.bronze({"c.json": b""}, empty_files="quarantine")["problems"].tolist() == ["the file is empty"]
    driver.refine()
    assert driver.silver().empty
    assert driver.left() == {}


def test_a_repaired_file_is_taken_when_it_is_requeued(driver: Driver) -> None:
    driver.bronze({"a.json": b""}, empty_files="dead_letter")
    (driver.landing / "a.json").write_bytes(GOOD)
    driver.queue().requeue_dead([letter.sequence_id for letter in driver.queue().dead_letters()])
    assert driver.bronze()["order_id"].tolist() == ["o-0000001"]
    assert driver.queue().stats().dead == 0


def changed(**values: Any) -> bytes:
    event = {key: value for key, value in (order_event(1, 0) | values).items() if value is not ...}
    return json.dumps(event, ensure_ascii=False).encode()


def test_every_wrong_value_is_named(driver: Driver) -> None:
    wrong = {
        "order_id is missing": changed(order_id=...),
        "status is missing": changed(status=None),
        "placed_at is not a time with a zone": changed(placed_at="2024-03-01T10:00:00"),
        "updated_at is not a time with a zone": changed(updated_at="2024-02-30T10:00:00Z"),
        "quantity is not a whole number": changed(quantity=1.5),
        "quantity is below 1": changed(quantity=0),
        "price is not an amount of money": changed(price="12.345"),
        "price is negative": changed(price="-0.01"),
        "price is missing; quantity is not a whole number": changed(price=None, quantity=[3]),
    }
    more = (changed(price=True), changed(price=1e300), changed(price="NaN"), changed(price={"eur": 5}))
    bronze = driver.bronze({"a.json": b"\n".join([*wrong.values(), *more])})
    assert sorted(bronze["problems"]) == sorted([*wrong, *["price is not an amount of money"] * len(more)])
    assert set(bronze["raw"].str.encode("utf-8")) == {*wrong.values(), *more}
    assert bronze["order_id"].isna().all()


def test_zones_decimals_and_unicode_come_through_as_they_are(driver: Driver) -> None:
    lines = [
        changed(order_id="a", placed_at="2024-03-01T01:30:00.123456+02:00", price="0.10", quantity=3, product=" 鍋🤖 "),
        changed(order_id="b", placed_at="2024-02-28T20:30:00-05:30", price=12345678.9, quantity="2", country=" fr"),
        changed(order_id="c", placed_at="1969-12-31T23:59:59.999999Z", price="999999999.99", category="KÜCHE "),
    ]
    odd_name = "a b+c%20ü[1]{x}*.json"
    driver.bronze({odd_name: b"\r\n".join(lines)})
    driver.refine()
    silver = driver.silver().set_index("order_id").sort_index()
    assert silver["file"].unique().tolist() == [odd_name]
    assert [day.isoformat() for day in silver["day"]] == ["2024-02-29", "2024-02-29", "1969-12-31"]
    assert silver["placed_at"]["a"].to_pydatetime() == datetime(2024, 2, 29, 23, 30, 0, 123456, tzinfo=UTC)
    assert silver["price"].tolist() == [Decimal("0.10"), Decimal("12345678.90"), Decimal("999999999.99")]
    assert silver["worth"]["b"] == Decimal("24691357.80")
    assert (silver["product"]["a"], silver["country"]["b"], silver["category"]["c"]) == ("鍋🤖", "FR", "küche")
