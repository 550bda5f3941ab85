"""How the hub stores lines: whatever was stored by whichever version comes back, or is found to be damaged."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from lease_core.replication.hub.packing import PLAIN, ZLIB, ZSTD, pack_all, unpack

LINES = b"".join(b'{"namespace":"main","sequenceNumber":%d,"type":"Enqueued"}\n' % number for number in range(1_000))


@pytest.mark.parametrize(
    ("lines", "how"), [(b"", PLAIN), (LINES[:100], PLAIN), (LINES, ZSTD), (os.urandom(100_000), PLAIN)]
)
def test_lines_come_back_as_they_were(lines: bytes, how: int) -> None:
    packing, stored = pack_all([lines])[0]
    assert packing == how
    assert len(stored) <= len(lines)
    assert unpack(packing, stored) == lines


def test_events_take_a_fraction_of_their_size() -> None:
    assert len(pack_all([LINES])[0][1]) < len(LINES) / 10


def test_what_the_first_hubs_stored_is_still_read() -> None:
    assert unpack(ZLIB, zlib.compress(LINES, 1)) == LINES


@pytest.mark.parametrize("packing", [ZLIB, ZSTD])
def test_damage_is_an_error_and_not_other_lines(packing: int) -> None:
    stored = zlib.compress(LINES, 1) if packing == ZLIB else pack_all([LINES])[0][1]
    for damaged in (stored[:-5], b"", b"\x00" + stored[1:]):
        with pytest.raises(ValueError, match=r"\w"):
            unpack(packing, damaged)


def test_many_are_packed_as_one_by_one() -> None:
    batches = [LINES, b"", LINES[:100], os.urandom(5_000), LINES[:5_000]]
    assert pack_all(batches) == [pack_all([each])[0] for each in batches]
    assert pack_all([]) == []


def test_a_library_that_is_not_compiled_packs_too() -> None:
    program = 'from tests.replication_hub.test_packing import *; test_many_are_packed_as_one_by_one(); print("packed")'
    environment = {**os.environ, "PYTHON_ZSTANDARD_IMPORT_POLICY": "cffi"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "packed\n", done.stderr


def test_many_threads_pack_at_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        packed = list(pool.map(lambda number: pack_all([LINES * number])[0], range(1, 20)))
    assert [unpack(*each) for each in packed] == [LINES * number for number in range(1, 20)]
