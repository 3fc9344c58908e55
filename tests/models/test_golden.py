"""Logits of the tiny checkpoints equal transformers' (tests/golden), however they are split over devices and steps."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.golden.reference import path, summary
from tests.running import run_logits, tiny_folder
from tests.tolerances import TOLERANCES

FAMILIES = tuple(tiny.CONFIGS)
SINGLE_TOKENS = (20, *(1,) * 17)
QUICK = ("glm4_moe", "hunyuan_v1_moe", "hy_v4")
"""Families that the default run spreads over eight devices; the others are marked slow."""


@cache
def logits(family: str, **settings: Any) -> np.ndarray:
    return run_logits(tiny_folder(family), tiny.token_ids(), **settings)


@pytest.mark.parametrize(
    ("family", "devices"),
    [
        pytest.param(family, devices, marks=pytest.mark.slow if devices > 1 and family not in QUICK else [])
        for family in FAMILIES
        for devices in (1, 8)
    ],
)
def test_logits_equal_transformers(family: str, devices: int) -> None:
    ours = summary(logits(family, devices=devices), tiny.token_ids())
    with np.load(path(family)) as golden:
        assert set(golden) == set(ours)
        for name, array in ours.items():
            assert golden[name].dtype == np.float32
            np.testing.assert_allclose(array, golden[name], rtol=0, atol=TOLERANCES["golden_logits"].value)


@pytest.mark.parametrize("family", FAMILIES)
def test_goldens_are_small(family: str) -> None:
    assert path(family).stat().st_size < 100_000


@pytest.mark.parametrize("kv_cache", ["float32", "int8"])
@pytest.mark.parametrize("chunks", [(20, 17), SINGLE_TOKENS], ids=["two chunks", "chunk and single tokens"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_do_not_matter(family: str, chunks: tuple[int, ...], kv_cache: str) -> None:
    """Keys and values are stored before they are read, so that INT8 storage obeys the same rule as float32."""
    whole = logits(family, kv_cache=kv_cache)
    parts = logits(family, kv_cache=kv_cache, chunks=chunks)
    unit = max(1.0, float(whole.std()))
    np.testing.assert_allclose(parts, whole, rtol=0, atol=TOLERANCES["same_logits"].value * unit)
    np.testing.assert_array_equal(parts.argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_cache_is_another_cache(family: str) -> None:
    """The INT8 runs above did store INT8."""
    assert np.abs(logits(family, kv_cache="int8") - logits(family)).max() > TOLERANCES["leaf_matters"].value
