"""Every setting of config.json that a family reads changes the logits: none can be read and then forgotten.

Weights have the shapes of the original config, so only settings that keep shapes are here; leaves have a test of their
own (tests/nn/test_decoder.py).
"""

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.running import run_logits, scratch, tiny_folder
from tests.tolerances import TOLERANCES

_ROPE = "rope_parameters"
_THETA = {_ROPE: {"rope_theta": 777.0}}
_YARN: dict[str, dict[str, Any]] = {
    "theta": _THETA,
    "factor": {_ROPE: {"factor": 8.0}},
    "original positions": {_ROPE: {"original_max_position_embeddings": 16}},
    "beta_fast": {_ROPE: {"beta_fast": 0.5}},
    "beta_slow": {_ROPE: {"beta_slow": 0.05}},
}
_MSCALE = {"mscale": {_ROPE: {"mscale": 0.5}}, "mscale_all_dim": {_ROPE: {"mscale_all_dim": 0.5}}}
_SIGMOID = {
    "scaling": {"routed_scaling_factor": 1.25},
    "top_k": {"num_experts_per_tok": 3},
    "renormalisation": {"norm_topk_prob": False},
}
_GROUPS = {"groups": {"n_group": 1, "topk_group": 1}, "kept groups": {"topk_group": 1}}
_EPS = {"eps": {"rms_norm_eps": 0.1}}
_INDEX = {"index_topk": {"index_topk": 5}}

MUTATIONS: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"theta": _THETA, "top_k": {"num_experts_per_tok": 3}, "renormalisation": {"norm_topk_prob": False}},
    "mixtral": {"theta": _THETA, "top_k": {"num_experts_per_tok": 3}, "window": {"sliding_window": 5}, **_EPS},
    "olmoe": {"theta": _THETA, "top_k": {"num_experts_per_tok": 3}, "renormalisation": {"norm_topk_prob": True}},
    "hunyuan_v1_moe": {"theta": _THETA, "alpha": {_ROPE: {"alpha": 10.0}}, "top_k": {"moe_topk": 3}, **_EPS},
    "hy_v3": {
        "theta": _THETA,
        "scaling": {"router_scaling_factor": 1.25},
        "top_k": {"num_experts_per_tok": 3},
        **_EPS,
    },
    "dots1": {
        "theta": _THETA,
        **_SIGMOID,
        "window": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    },
    "glm4_moe": {
        "theta": _THETA,
        "partial": {_ROPE: {"partial_rotary_factor": 1.0}},
        **_SIGMOID,
        "groups": {"n_group": 2},
        **_EPS,
    },
    "minimax_m2": {
        "theta": _THETA,
        "partial": {_ROPE: {"partial_rotary_factor": 1.0}},
        "top_k": {"num_experts_per_tok": 3},
        **_EPS,
    },
    "ernie4_5_moe": {"theta": _THETA, "top_k": {"moe_k": 3}, **_EPS},
    "gpt_oss": {
        **_YARN,
        "truncate": {_ROPE: {"truncate": True}},
        "top_k": {"num_experts_per_tok": 3},
        "window": {"sliding_window": 5},
        "limit": {"swiglu_limit": 2.0},
        "layer types": {"layer_types": ["full_attention", "sliding_attention"] * 2},
        **_EPS,
    },
    "deepseek_v2": {
        **_YARN,
        **_MSCALE,
        "scaling": {"routed_scaling_factor": 8.0},
        "top_k": {"num_experts_per_tok": 3},
        "kept groups": {"topk_group": 1},
        **_EPS,
    },
    "deepseek_v3": {**_YARN, **_MSCALE, **_SIGMOID, **_GROUPS, **_EPS, "pairs": {"rope_interleave": False}},
    "kimi_k25": {
        name: {"text_config": change}
        for name, change in {**_YARN, **_MSCALE, **_SIGMOID, "groups": {"n_group": 2}, **_EPS}.items()
    },
    "glm4_moe_lite": {"theta": _THETA, **_SIGMOID, "groups": {"n_group": 2}, **_EPS},
    "deepseek_v32": {**_YARN, **_MSCALE, **_SIGMOID, **_GROUPS, **_INDEX, **_EPS},
    "glm_moe_dsa": {"theta": _THETA, **_SIGMOID, "groups": {"n_group": 2}, **_INDEX, **_EPS},
    "hy_v4": {
        "theta": _THETA,
        **_SIGMOID,
        **_INDEX,
        **_EPS,
        "limit": {"swiglu_limit": 2.0},
        "no limit": {"swiglu_limit": 0.0},
        "magnitude": {"hc_magnitude": 1.0},
        "gate epsilon": {"hc_eps": 0.1},
    },
}


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The config with nested keys replaced."""
    nested = {key: merged(config[key], value) for key, value in change.items() if isinstance(value, dict)}
    return {**config, **change, **nested}


@cache
def original(family: str) -> np.ndarray:
    return run_logits(tiny_folder(family), tiny.token_ids())


def test_every_family_has_mutations() -> None:
    assert set(MUTATIONS) == set(tiny.CONFIGS)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), [(family, name) for family in MUTATIONS for name in MUTATIONS[family]])
def test_every_setting_matters(family: str, name: str) -> None:
    config = merged(tiny.CONFIGS[family], MUTATIONS[family][name])
    folder = tiny.write_checkpoint(scratch() / f"{family} {name}", config)
    changed = run_logits(folder, tiny.token_ids())
    assert np.isfinite(changed).all()
    assert np.abs(changed - original(family)).max() > TOLERANCES["leaf_matters"].value


@pytest.mark.slow
def test_the_group_limit_of_deepseek_v2_matters() -> None:
    """Two groups always hold the two best experts when a group ranks by its best; one group does not."""
    one_group = {**tiny.CONFIGS["deepseek_v2"], "topk_group": 1}
    limited = tiny.write_checkpoint(scratch() / "limited", one_group)
    greedy = tiny.write_checkpoint(scratch() / "greedy", {**one_group, "topk_method": "greedy"})
    difference = run_logits(limited, tiny.token_ids()) - run_logits(greedy, tiny.token_ids())
    assert np.abs(difference).max() > TOLERANCES["leaf_matters"].value
