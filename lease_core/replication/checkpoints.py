"""Checkpoints for sources that keep none themselves, such as a copy that is relayed onwards."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from lease_core.replication.durable_file import replace_file


class MemoryCheckpoints:
    """Kept as long as the process lives."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._lock = threading.Lock()

    def register_reader(self, name: str, after: int = 0) -> int:
        with self._lock:
            return self._places.setdefault(name, after)

    def advance_reader(self, name: str, to: int) -> None:
        with self._lock:
            self._places[name] = max(to, self._places.get(name, 0))

    def readers(self) -> dict[str, int]:
        return dict(self._places)


class FileCheckpoints:
    """Kept in one small JSON file, replaced as a whole each time, for one relay process at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._places: dict[str, int] = json.loads(self._path.read_bytes()) if self._path.exists() else {}

    def register_reader(self, name: str, after: int = 0) -> int:
        with self._lock:
            if name not in self._places:
                self._save({**self._places, name: after})
            return self._places[name]

    def advance_reader(self, name: str, to: int) -> None:
        with self._lock:
            if to > self._places.get(name, 0):
                self._save({**self._places, name: to})

    def readers(self) -> dict[str, int]:
        return dict(self._places)

    def _save(self, places: dict[str, int]) -> None:
        replace_file(self._path, json.dumps(places, indent=1).encode() + b"\n")
        self._places = places
