"""INT8 weights, INT4 experts and INT8 caches in every family: close to float, and the same however steps are cut."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.models.leaves import Schemes
from jaxmoe.ptq.job import prepare
from jaxmoe.ptq.quantize import quantize
from jaxmoe.ptq.recipe import load_recipe
from tests import tiny
from tests.running import run_logits, runner_of, scratch, tiny_folder, tiny_quantized
from tests.tolerances import TOLERANCES

FAMILIES = tuple(tiny.CONFIGS)
RECIPES = ("w8a8-g128", "w4a8-experts")
QUICK = ("hy_v4", "gpt_oss", "qwen3_moe")
"""Families of the default run; the others are marked slow."""
families = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow) for family in FAMILIES]
)


@cache
def folder_of(family: str, recipe: str | None) -> Path:
    """A checkpoint whose indexer, if it has one, chooses all keys: with random weights the eight best of 37 keys are
    as good as drawn, and another draw is another model."""
    if "index_topk" not in tiny.CONFIGS[family]:
        return tiny_folder(family) if recipe is None else tiny_quantized(family, recipe)
    if recipe is None:
        return tiny.write_checkpoint(scratch() / f"{family}-all", {**tiny.CONFIGS[family], "index_topk": 64})
    folder = scratch() / f"{family}-all-{recipe}"
    quantize(prepare(folder_of(family, None), load_recipe(recipe)), folder)
    return folder


@cache
def logits(family: str, recipe: str | None = None, **settings: object) -> np.ndarray:
    return run_logits(folder_of(family, recipe), tiny.token_ids(), **settings)  # type: ignore[arg-type]


def token_errors(family: str, recipe: str | None) -> np.ndarray:
    """[tokens] root mean square error of each token's logits, in standard deviations of all logits, INT8 cache."""
    exact = logits(family)
    error = logits(family, recipe, kv_cache="int8") - exact
    return np.sqrt(np.mean(np.square(error), axis=-1)).reshape(-1) / exact.std()


@families
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_close_to_float(family: str, recipe: str | None) -> None:
    """The middle token: one that takes another expert is far off."""
    name = {None: "int8_cache_logits", "w8a8-g128": "int8_token_logits", "w4a8-experts": "int4_token_logits"}[recipe]
    errors = token_errors(family, recipe)
    print(f"{family} {recipe}: median {np.median(errors):.4f}, 90 % {np.quantile(errors, 0.9):.4f}")
    assert 0 < np.median(errors) < TOLERANCES[name].value


@families
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_hardly_matter(family: str, recipe: str) -> None:
    """One prefill against a prefill and single tokens: float32 sums of another order put a few activations on the other
    side of a rounding tie, so that single tokens may differ; with float weights none does (test_golden)."""
    whole = logits(family, recipe, kv_cache="int8")
    parts = logits(family, recipe, kv_cache="int8", chunks=(20, *(1,) * 17))
    assert np.mean(parts.argmax(-1) == whole.argmax(-1)) >= 0.95
    middle = np.median(np.abs(parts - whole).max(-1))
    assert middle <= TOLERANCES["leaf_matters"].value


@families
def test_what_is_stored(family: str) -> None:
    """INT4 pairs for routed experts alone, INT8 beside them; the router, its biases and every norm stay float32."""
    runner = runner_of(tiny_quantized(family, "w4a8-experts"), dtype="bfloat16")
    schemes: Schemes = {leaf.entry.path: leaf.scheme for leaf in runner._leaves}
    for leaf, array in zip(runner._leaves, runner._arrays, strict=True):
        role, scheme = leaf.entry.role, schemes[leaf.entry.path]
        routed = role in ("experts.gate", "experts.up", "experts.down")
        assert (scheme is not None and scheme.weight_bits == 4) == routed, leaf.entry.path
        if routed and leaf.part == "weight":
            assert array.dtype == np.uint8 and array.nbytes * 2 == np.prod(leaf.entry.shape)
        if role in ("router", "router.bias"):
            assert array.dtype == np.float32
