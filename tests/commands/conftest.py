"""Commands leave this process as they found it."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # JAX runs already, with eight devices: a command must not ask for another number.
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    logger = logging.getLogger("jaxmoe")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    logger.setLevel(level)
