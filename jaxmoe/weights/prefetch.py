"""Asks the system to read parts of files before they are needed."""

import os
from collections.abc import Iterable

from jaxmoe.weights.header import TensorMeta


def prefetch(tensors: Iterable[TensorMeta]) -> None:
    """Starts reading tensors into the system's file cache, and returns at once; does nothing where it cannot ask.

    It is advice: a file that is not there is somebody else's error to report.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    by_file: dict[str, list[TensorMeta]] = {}
    for tensor in tensors:
        by_file.setdefault(str(tensor.file), []).append(tensor)
    for file, wanted in by_file.items():
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:
            continue
        try:
            for tensor in wanted:
                os.posix_fadvise(descriptor, tensor.offset_bytes, tensor.nbytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
