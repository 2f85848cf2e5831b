"""What bulk asks of the C library's allocator."""

from __future__ import annotations

#: The thresholds rise to 32 MiB at most (`DEFAULT_MMAP_THRESHOLD_MAX` of glibc's `malloc.c`); a block larger than that,
#: its head and the rest of its last page included, would change nothing.
_SIZE_BYTES = 31 << 20


def keep_freed_memory() -> None:
    """Make glibc keep the memory of freed messages for the next ones.

    By default it maps each block of over 128 KiB afresh, or gives the end of the heap back as soon as twice that is
    free, and every page then costs a fault again: measured with messages of 256 KiB, 1.4 s of CPU a GB in the sender
    instead of 0.5. Its thresholds rise to the largest block that was ever freed, so one block that nobody writes to is
    enough. Another C library ignores it.
    """
    _ = bytes(_SIZE_BYTES)  # zeroed by the kernel, on first use: costs nothing
