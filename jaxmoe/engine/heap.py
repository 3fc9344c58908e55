"""Gives freed memory of the C heap back to the system."""

import ctypes
import sys


def trim_heap() -> bool:
    """Returns pages that the C library keeps although nothing uses them; whether there were any.

    XLA's compiler frees hundreds of megabytes from its threads' heaps, and glibc keeps them: without this they count
    against the memory that the ledger promised. Other C libraries have no such call, and need none here.
    """
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(ctypes.c_size_t(0)))
