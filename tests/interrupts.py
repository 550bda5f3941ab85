"""An exception out of nowhere, at any step of some code: what Ctrl-C or a cancelled run is to whoever it hits."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


class Interrupted(BaseException):
    """Not an ``Exception``, just like ``KeyboardInterrupt``: nobody may take it for an error of theirs."""


@cache
def _where_signals_come(code: CodeType) -> frozenset[int]:
    """Instructions before which the interpreter looks for signals: where a function begins or goes back, after calls.

    A call that ends a block still belongs to it: what comes next is then not where its exception would come from.
    """
    handlers = {
        offset: entry.target
        for entry in dis._parse_exception_table(code)  # type: ignore[attr-defined]
        for offset in range(entry.start, entry.end, 2)
    }
    found = set()
    before: dis.Instruction | None = None
    for each in dis.get_instructions(code):
        called = before is not None and before.opname.startswith("CALL")
        if called and before is not None and handlers.get(each.offset) == handlers.get(before.offset):
            found.add(each.offset)
        if each.opname == "RESUME" or "BACKWARD" in each.opname:
            found.add(each.offset)
        before = each
    return frozenset(found)


class _InterruptAt:
    """Raises at one step of the code in some folders, counted in the interpreter's own instructions."""

    def __init__(self, step: int, within: tuple[str, ...], everywhere: bool) -> None:
        self._left, self._within, self._everywhere = step, within, everywhere
        self.place = ""

    def __call__(self, frame: FrameType, _event: str, _value: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._within):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, _value: Any) -> Any:
        if event == "opcode" and (self._everywhere or frame.f_lasti in _where_signals_come(frame.f_code)):
            self._left -= 1
            if self._left == 0:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
                raise Interrupted
        return self._step


def at_every_step(
    within: Sequence[Path], call: Callable[[], object], stride: int = 1, *, everywhere: bool = False, least: int = 20
) -> Iterator[str]:
    """Make the call again and again, interrupted at one step of ``within`` after another, until it is over before.

    Gives where it was interrupted. A step is where the interpreter looks for signals; ``everywhere``, any instruction.
    """
    for interrupts, steps in enumerate(count(1, stride)):
        interrupt, before = _InterruptAt(steps, tuple(map(str, within)), everywhere), sys.gettrace()
        sys.settrace(interrupt)
        try:
            call()
        except Interrupted:
            pass
        finally:
            sys.settrace(before)
        if not interrupt.place:
            assert interrupts >= least, "too little was interrupted to prove anything"
            return
        yield f"step {steps}, {interrupt.place}"
