"""The same tokens however a model is split: experts 1, 2, 4 and 8 ways, with and without split attention heads."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.assets import asset
from jaxmoe.errors import PlanError
from jaxmoe.models.leaves import model_leaves
from jaxmoe.parallel.plan import Plan, load_plan
from tests import tiny
from tests.running import greedy_tokens, runner_of, tiny_folder, tiny_quantized

FAMILIES = tuple(tiny.CONFIGS)
SPLITS = [(ways, heads) for heads in (1, 2) for ways in (1, 2, 4, 8) if ways >= heads and ways * heads > 1]
QUICK = (("hy_v4", 8, 2), ("gpt_oss", 4, 2), ("minimax_m2", 8, 1))
"""What the default run checks; the rest is marked slow."""


def plan_of(experts: int, heads: int) -> Plan:
    """Experts over all devices; heads over the inner ones."""
    plan = load_plan(asset("sharding", "default", "cpu8.toml" if heads == 1 else "cpu8_tp2.toml"))
    return plan if plan.num_devices == experts else plan.with_devices(experts)


@cache
def prompts() -> np.ndarray:
    return np.concatenate([tiny.token_ids()[:, start : start + 6] for start in (0, 8, 16, 24)])


def tokens(folder: Path, experts: int = 1, heads: int = 1, kv_cache: str = "float32") -> np.ndarray:
    plan = plan_of(experts, heads) if experts > 1 else None
    pools = 1 if plan is None else plan.ways("pages")
    runner = runner_of(folder, plan=plan, rows=-(-len(prompts()) // pools), kv_cache=kv_cache)
    return greedy_tokens(runner, prompts(), 12)


@cache
def whole(family: str) -> np.ndarray:
    return tokens(tiny_folder(family))


@pytest.mark.parametrize(
    ("family", "experts", "heads"),
    [
        pytest.param(family, experts, heads, marks=[] if (family, experts, heads) in QUICK else pytest.mark.slow)
        for family in FAMILIES
        for experts, heads in SPLITS
    ],
)
def test_same_tokens(family: str, experts: int, heads: int) -> None:
    assert len(np.unique(whole(family))) > 8
    np.testing.assert_array_equal(tokens(tiny_folder(family), experts, heads), whole(family))


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f == "hy_v4" else pytest.mark.slow) for f in ("hy_v4", "qwen3_moe")]
)
def test_same_tokens_quantized_with_split_heads(family: str) -> None:
    """INT8 weights in groups: the outputs of o_proj are split, never its groups."""
    folder = tiny_quantized(family, "w8a8-g128")
    np.testing.assert_array_equal(tokens(folder, 8, 2), tokens(folder))


def test_heads_that_do_not_divide_are_refused() -> None:
    manifest = tiny.manifest_of({**tiny.CONFIGS["qwen3_moe"], "num_attention_heads": 3, "num_key_value_heads": 3})
    with pytest.raises(PlanError, match="3 attention heads cannot be split 2 ways"):
        model_leaves(manifest, {}, plan_of(8, 2), np.float32)
