"""What handlers of signals raise."""

import signal
from types import CodeType
from typing import Any


def is_of_a_handler(error: BaseException) -> bool:
    """Whether a handler of a signal raised the error, which may come in the middle of any call."""
    codes = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while codes and trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code(handler: Any) -> CodeType | None:
    handler = getattr(handler, "__func__", getattr(handler, "func", handler))  # of a method, of a partial
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = type(handler).__call__
    code = getattr(handler, "__code__", None)
    return code if isinstance(code, CodeType) else None
