"""Messages must not cost fresh pages each time. In a process of its own: what others freed before would hide it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource
from quartet.transfer.grpc.messages import keep_freed_memory

def num_page_faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def send():
    messages = [b"".join((b"head", bytes(1 << 18))) for _ in range(2)]
    del messages

before = num_page_faults(send)
to_keep = num_page_faults(keep_freed_memory)
num_page_faults(send)
print(before, to_keep, num_page_faults(send))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")
def test_the_memory_of_freed_messages_serves_the_next_ones() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=30, check=True)
    before, to_keep, after = map(int, done.stdout.split())
    assert before > 1000  # the test would show it
    assert to_keep < 100  # each puller and each server calls it
    assert after < 100
