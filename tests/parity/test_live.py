"""Logits against transformers itself, float32 and eager attention on both sides: needs torch."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmoe.demo.checkpoint import dense_reference, make_demo_model
from jaxmoe.demo.source import find_gguf, read_source
from tests import tiny
from tests.golden.reference import path, summary, torch_logits
from tests.running import run_logits, runner_of, scratch, step, step_with_experts, tiny_folder
from tests.tolerances import TOLERANCES

torch = pytest.importorskip("torch", reason="parity compares with transformers, which needs torch")

pytestmark = [
    pytest.mark.parity,
    # transformers warns about its own keys: rope 'alpha' of Hunyuan is one that it does not list.
    pytest.mark.filterwarnings("default"),
]

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no qk norm": ("glm4_moe", {"use_qk_norm": False}),
    "no bias": ("glm4_moe", {"attention_bias": False}),
    "no dense layer": ("glm4_moe", {"first_k_dense_replace": 0}),
    "two dense layers": ("glm4_moe", {"first_k_dense_replace": 2}),
    "two groups": ("glm4_moe", {"n_group": 2, "topk_group": 1}),
    "no renormalisation": ("glm4_moe", {"norm_topk_prob": False}),
    "tied head": ("glm4_moe", {"tie_word_embeddings": True}),
    "two shared experts": ("glm4_moe", {"n_shared_experts": 2}),
    "whole head rotates": (
        "glm4_moe",
        {"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 1e4, "rope_type": "default"}},
    ),
    "hunyuan tied": ("hunyuan_v1_moe", {"tie_word_embeddings": True}),
    "hunyuan lists": ("hunyuan_v1_moe", {"moe_topk": [3, 3, 3]}),
    "hunyuan heads of their own": ("hunyuan_v1_moe", {"num_key_value_heads": 4}),
    "hunyuan one key head": ("hunyuan_v1_moe", {"num_key_value_heads": 1}),
    "sliding windows everywhere": ("mixtral", {"sliding_window": 5}),
    "sliding windows here and there": (
        "dots1",
        {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "full attention everywhere": ("gpt_oss", {"layer_types": ["full_attention"] * 4}),
    "softmax without renormalisation": ("qwen3_moe", {"norm_topk_prob": False}),
    "softmax with renormalisation": ("olmoe", {"norm_topk_prob": True}),
    "minimax rotates whole heads": ("minimax_m2", {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}}),
    "queries without a latent": ("deepseek_v3", {"q_lora_rank": None}),
    "v2 queries without a latent": ("deepseek_v2", {"q_lora_rank": None}),
    "v2 one group": ("deepseek_v2", {"topk_group": 1}),
    "v2 greedy": ("deepseek_v2", {"topk_method": "greedy", "num_experts_per_tok": 3}),
    "pairs of halves": ("deepseek_v3", {"rope_interleave": False}),
    "case 73 mscales differ": ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 1.2}}),
    "case 73 mscales missing": ("deepseek_v3", {"rope_parameters": _YARN}),
    "case 73 mscales zero": ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 0.0, "mscale_all_dim": 0.0}}),
    "case 73 one mscale": ("deepseek_v32", {"rope_parameters": {**_YARN, "mscale_all_dim": 1.0}}),
    "lite with groups": ("glm4_moe_lite", {"n_group": 2, "topk_group": 1}),
    "every layer has an indexer": ("glm_moe_dsa", {"indexer_types": ["full"] * 6}),
    "one layer has an indexer": ("hy_v4", {"indexer_types": ["full", *["shared"] * 5]}),
    # 0 means none by its documentation, but transformers 5.24.0 clamps to it.
    "no clamp": ("hy_v4", {"swiglu_limit": 1e9}),
    "two streams": ("hy_v4", {"hc_mult": 2}),
}


def variant_folder(name: str) -> Path:
    family, changes = VARIANTS[name]
    return tiny.write_checkpoint(scratch() / name.replace(" ", "-"), {**tiny.CONFIGS[family], **changes})


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    """Errors count in standard deviations of the logits: 1, and 8 where the head is the embedding's unscaled table."""
    ids, folder = tiny.token_ids(), variant_folder(name)
    ours, theirs = run_logits(folder, ids), torch_logits(folder, ids)
    error = float(np.abs(ours - theirs).max()) / max(1.0, float(theirs.std()))
    print(f"{name}: {error:.1e}")
    assert error <= TOLERANCES["golden_logits"].value
    base = run_logits(tiny_folder(VARIANTS[name][0]), ids)
    assert np.abs(ours - base).max() > TOLERANCES["leaf_matters"].value, "the option changes nothing"


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "gpt_oss"])
def test_case_72_far_positions(family: str) -> None:
    """Yarn far beyond the original 64 positions: an error in a factor grows with the position."""
    ids = np.random.default_rng(3).integers(3, 256, (1, 320))
    runner = runner_of(tiny_folder(family), rows=1, context=320)
    ours, theirs = step(runner, ids, 0, 320, bucket=320), torch_logits(tiny_folder(family), ids)
    for position in (0, 1, 64, 200, 319):
        error = float(np.abs(ours[0, position] - theirs[0, position]).max())
        assert error <= TOLERANCES["golden_logits"].value, position


@pytest.mark.parametrize("family", ["hy_v4", "glm_moe_dsa", "glm4_moe_lite"])
def test_what_differs_from_transformers_is_small_or_known(family: str) -> None:
    """Norms on latents with the config's eps instead of 1e-6: 1e-4 at most; hy_v4 also pairs other dims."""
    ids = tiny.token_ids()
    ours = run_logits(tiny_folder(family), ids)
    difference = float(np.abs(ours - torch_logits(tiny_folder(family), ids, as_deployed=False)).max())
    print(f"{family}: {difference:.1e}")
    assert difference > 0.1 if family == "hy_v4" else difference < 1e-3


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_goldens_are_current(family: str) -> None:
    ids = tiny.token_ids()
    now = summary(torch_logits(tiny_folder(family), ids), ids)
    with np.load(path(family)) as golden:
        assert set(golden) == set(now)
        for name, array in now.items():
            np.testing.assert_allclose(golden[name], array, rtol=0, atol=TOLERANCES["golden_logits"].value)


@cache
def demo_folder(top_k: int) -> Path:
    return make_demo_model(scratch() / f"demo-{top_k}", top_k=top_k).folder


@cache
def demo_ids() -> np.ndarray:
    """[1, 64] ids of a plain text."""
    from transformers import AutoTokenizer

    text = (demo_folder(6) / "README.md").read_text(encoding="utf-8")
    return np.array(AutoTokenizer.from_pretrained(demo_folder(6))(text).input_ids[:64])[None, :]


def dense_logits() -> np.ndarray:
    """Logits of the dense original in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    source = read_source(find_gguf())
    shape = source.shape
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_tokens,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float().eval()
    weights = {name: torch.from_numpy(array.astype(np.float32)) for name, array in dense_reference(source).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.no_grad():
        return model(torch.from_numpy(demo_ids())).logits.numpy()


def torch_logits_with_choices(folder: Path, ids: np.ndarray, experts: np.ndarray) -> tuple[np.ndarray, float]:
    """Logits of transformers when every layer takes the given experts, and how far the worst choice is from the best.

    Args:
        folder: a demo checkpoint (one group, renormalised weights).
        ids: [1, length] token ids.
        experts: [layers, length, top_k] chosen experts.

    Returns:
        Logits [1, length, vocab], and the largest gap between the score of an expert that was left out and the score
        of one that was taken; at most 0 where all choices are transformers' own.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    gaps = []

    def take(layer: int, gate: Any, output: Any) -> Any:
        scores = output[0].sigmoid()
        chosen_by = scores + gate.e_score_correction_bias
        chosen = torch.from_numpy(experts[layer].astype(np.int64))
        left = chosen_by.scatter(1, chosen, float("-inf")).max(-1).values
        gaps.append(float((left - chosen_by.gather(1, chosen).min(-1).values).max()))
        weights = scores.gather(1, chosen)
        return output[0], weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor, chosen

    for number, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(lambda gate, _, output, number=number: take(number, gate, output))
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)).logits.numpy()
    assert len(gaps) == len(experts)
    return logits, max(gaps)


@pytest.mark.parametrize("top_k", [6, 8])
def test_demo_model(top_k: int) -> None:
    """Equal logits with equal choices, and every choice is transformers' own up to rounding.

    The demo's scores lie so close together that float32 rounding decides some choices, and one other choice moves the
    logits of all later tokens; free-running logits would compare rounding.
    """
    folder, ids = demo_folder(top_k), demo_ids()
    ours, experts = step_with_experts(runner_of(folder, rows=1), ids, 0, 64, bucket=64)
    theirs, gap = torch_logits_with_choices(folder, ids, experts[:, 0])
    error = float(np.abs(ours - theirs).max())
    print(f"demo top-{top_k}: {error:.1e}, largest logit {np.abs(theirs).max():.1f}, worst choice {gap:.1e}")
    assert gap <= TOLERANCES["router_tie"].value
    assert error <= TOLERANCES["demo_logits"].value
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))
    if top_k == 8:
        free = torch_logits(folder, ids)
        np.testing.assert_allclose(ours, free, rtol=0, atol=TOLERANCES["demo_logits"].value)


def test_demo_with_all_experts_equals_the_dense_model() -> None:
    """All 8 routed experts with weight 1: the carved layers compute what the dense ones did."""
    ours, dense = run_logits(demo_folder(8), demo_ids(), chunks=(64,)), dense_logits()
    error = float(np.abs(ours - dense).max())
    print(f"demo top-8 against dense: {error:.1e}")
    assert error <= TOLERANCES["demo_dense"].value
