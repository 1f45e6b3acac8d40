"""Interrupts at every instruction: a call is run again and again, and ended by an exception at another each time."""

import dis
import gc
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType

# What Python code of ours runs, and what runs it in between: a `with` of a generator is of contextlib.
_TRACED = ("/shoal/", "contextlib.py")
# Of one instruction, so many of its runs in a call.
_RUNS = 2


@cache
def _never_interrupted(code: CodeType) -> frozenset[int]:
    """The instructions between the body of a `with` and the call of its `__exit__`, where Python looks for no signal:
    an exception there would skip the call, as none can. Nor does it at a NOP, such as that of a `try` right after a
    `with` has entered, which no handler covers."""
    found = {one.offset for one in dis.get_instructions(code) if one.opname == "NOP"}
    run: list[dis.Instruction] = []
    for one in dis.get_instructions(code):
        nones = sum(each.opname == "LOAD_CONST" for each in run)
        if (
            (nones < 3 and one.opname == "LOAD_CONST" and one.argval is None)
            or (not nones and one.opname in ("NOP", "SWAP", "COPY"))
            or (nones == 3 and one.opname == "PRECALL")
        ):
            run.append(one)
        else:
            if nones == 3 and one.opname == "CALL":
                found |= {each.offset for each in (*run, one)}
            run = [one] if one.opname in ("NOP", "SWAP", "COPY") else []
    return frozenset(found)


@dataclass(frozen=True)
class Instruction:
    """One of a call: its code, and which of its runs."""

    code: CodeType
    offset: int
    run: int


class _Tracer:
    """Looks at the instructions of a call, and raises before one of them."""

    def __init__(self, at=None, error=KeyboardInterrupt):
        self.seen = []
        self.where = ""
        self._runs = Counter()
        self._at, self._error = at, error

    def call(self, what):
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return what()
        finally:
            sys.settrace(before)

    def _enter(self, frame, event, _argument):
        if not any(part in frame.f_code.co_filename for part in _TRACED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._look

    def _look(self, frame, event, _argument):
        code, offset = frame.f_code, frame.f_lasti
        if event != "opcode" or offset in _never_interrupted(code):
            return self._look
        run = self._runs[code, offset] = self._runs[code, offset] + 1
        if run <= _RUNS:
            self.seen.append(Instruction(code, offset, run))
            if self.seen[-1] == self._at:
                self.where = f"{code.co_filename.split('/shoal/')[-1]}:{frame.f_lineno} {code.co_name}"
                raise self._error
        return self._look


def instructions_of(call, most=None):
    """A call's instructions, for `interrupted`: of each of its code the first runs. With `most`, about so many of them,
    evenly spread."""
    tracer = _Tracer()
    tracer.call(call)
    assert tracer.seen
    return tracer.seen[:: max(1, len(tracer.seen) // most)] if most else tracer.seen


def interrupted(call, at, error=KeyboardInterrupt):
    """Run a call, and have it raise before that instruction. Returns where that was, and the error's notes; None where
    the call came to its end without it."""
    tracer = _Tracer(at, error)
    try:
        tracer.call(call)
    except error as raised:
        return tracer.where, " ".join(getattr(raised, "__notes__", ()))
    assert not tracer.where, f"{tracer.where}: the interrupt got lost"
    return None


@contextmanager
def no_thread_is_left():
    """Every thread that begins in the body ends."""
    before = set(threading.enumerate())
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive(), thread
