"""Counts the work of a call, where a time would depend on the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_operations(call: Callable[[], object]) -> int:
    """Operations of Python's bytecode that ``call`` takes, in this thread and in Python's code alone."""
    num_operations = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal num_operations
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        num_operations += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_operations
