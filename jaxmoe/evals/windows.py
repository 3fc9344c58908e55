"""Cuts evaluation text into windows of tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxmoe.assets import asset
from jaxmoe.errors import ConfigError


def bundled_texts() -> tuple[Path, ...]:
    """The evaluation texts that jaxmoe ships."""
    return tuple(sorted(asset("configs", "text", "eval").glob("*.txt")))


def read_text(path: Path) -> str:
    """An evaluation text.

    Raises:
        ConfigError: the file is absent, empty or not UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable as UTF-8 text: {error}") from error
    if not text.strip():
        raise ConfigError(f"{path} holds no text")
    return text


def cut_windows(documents: Mapping[str, Sequence[int]], *, length: int, count: int) -> np.ndarray:
    """[count, length + 1] int32 windows (the last column is only predicted), round robin over the documents.

    Args:
        documents: name -> token ids; windows of one document follow each other without overlap.
        length: tokens that are fed.
        count: windows in all.

    Raises:
        ConfigError: the documents hold fewer windows; the numbers are named.
    """
    available = {name: (len(ids) - 1) // length for name, ids in documents.items()}
    if sum(available.values()) < count:
        each = ", ".join(f"{name} {number}" for name, number in available.items())
        raise ConfigError(
            f"{count} windows of {length} tokens asked for, the text holds {sum(available.values())} ({each})"
        )
    windows: list[np.ndarray] = []
    position = 0
    while len(windows) < count:
        for name, ids in documents.items():
            if position < available[name] and len(windows) < count:
                start = position * length
                windows.append(np.asarray(ids[start : start + length + 1], np.int32))
        position += 1
    return np.stack(windows)
