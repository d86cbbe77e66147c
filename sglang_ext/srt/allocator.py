"""Keeps freed temporaries in the process: a page given back is faulted in again."""

from __future__ import annotations

import ctypes

# Numbers of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# The largest threshold glibc takes; pools and weights stay above it and are mapped as before.
_LARGEST_KEPT = 32 << 20
_NEVER_TRIM = 2**31 - 1


def keep_temporaries() -> bool:
    """Serve blocks of up to 32 MiB from the heap and do not give the heap back.

    A forward allocates and frees the same few megabytes at each step, which glibc would map and
    unmap. Returns False where the C library has no `mallopt`.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM))
