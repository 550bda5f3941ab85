"""Reading a copy by pages without reading it anew for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice

from lease_core.errors import InvalidInput
from lease_core.model import LeaseEvent


class Paged:
    """Turns ``read(after)``, which goes through a copy from there on, into ``events(after, limit)``.

    Who pages forward continues the same pass; anybody else begins a new one. At the end of the copy the pass is given
    up, so that what is added later is found.
    """

    def __init__(self, read: Callable[[int], Iterator[LeaseEvent]]) -> None:
        self._read = read
        self._pass: Iterator[LeaseEvent] | None = None
        self._at = -1
        self._lock = threading.Lock()

    def events(self, after: int, limit: int) -> list[LeaseEvent]:
        if after < 0:
            raise InvalidInput("after", f"must be 0 or more (got {after})")
        if limit < 1:
            raise InvalidInput("limit", f"must be 1 or more (got {limit})")
        with self._lock:
            if self._pass is None or self._at != after:
                self._pass = self._read(after)
            pass_, self._pass = self._pass, None  # an error below ends the pass
            found = list(islice(pass_, limit))
            if len(found) == limit:
                self._pass, self._at = pass_, found[-1].sequence_number
            return found
