"""What holds for all tests: eight CPU devices, strict promotion, no network, reproducible examples.

Nothing of jaxmoe is imported here, so that the jaxtyping hook (see pyproject.toml) sees every module first.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# A shell starts what it runs in the background with SIGINT ignored, and processes of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import hypothesis
import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile("jaxmoe", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("jaxmoe")


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_dropped() -> Iterator[None]:
    """Each program keeps memory mappings, of which a process may have 65,530: without this the run ends in a crash.

    Programs of tests.running's shared runners are compiled ahead of time and stay.
    """
    yield
    jax.clear_caches()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how near the run came to that limit."""
    try:
        mappings = len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    except OSError:
        return
    terminalreporter.write_line(f"memory mappings of this process: {mappings}")
