"""What a worker knew for sure: a line before each call to the queue, and a line after it returned.

A line is one write to a file opened for appending, so it outlives the worker and is never torn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Call:
    """One call: what it was given, and its answer, or None if the worker died or met an error before it came."""

    operation: str
    given: list[Any]
    answer: list[Any] | None = None


class Journal:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._calls = 0

    def around(self, operation: str, given: list[Any], act: Callable[[], list[Any]]) -> list[Any]:
        """Do ``act``, with a line before and, if it returns, a line after."""
        self._calls += 1
        self._write({"call": self._calls, "operation": operation, "given": given})
        answer = act()
        self._write({"call": self._calls, "answer": answer})
        return answer

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        assert os.write(self._file, data) == len(data)


def calls(directory: Path) -> list[Call]:
    """Every call of every worker that kept its journal in ``directory``."""
    found: list[Call] = []
    for path in sorted(directory.glob("*.journal")):
        own: dict[int, Call] = {}
        for line in map(json.loads, path.read_text().splitlines()):
            if "answer" in line:
                own[line["call"]].answer = line["answer"]
            else:
                own[line["call"]] = Call(line["operation"], line["given"])
        found.extend(own.values())
    return found
