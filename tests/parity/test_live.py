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
from tests.running import run_logits, scratch, tiny_folder
from tests.tolerances import TOLERANCES

torch = pytest.importorskip("torch", reason="parity compares with transformers, which needs torch")

pytestmark = [
    pytest.mark.parity,
    # transformers warns about its own keys: rope 'alpha' of Hunyuan is one that it does not list.
    pytest.mark.filterwarnings("default"),
]

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
}


def variant_folder(name: str) -> Path:
    family, changes = VARIANTS[name]
    return tiny.write_checkpoint(scratch() / name.replace(" ", "-"), {**tiny.CONFIGS[family], **changes})


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, record_property: Any) -> None:
    ids, folder = tiny.token_ids(), variant_folder(name)
    ours, theirs = run_logits(folder, ids), torch_logits(folder, ids)
    error = float(np.abs(ours - theirs).max())
    print(f"{name}: {error:.1e}")
    assert error <= TOLERANCES["golden_logits"].value
    base = run_logits(tiny_folder(VARIANTS[name][0]), ids)
    assert np.abs(ours - base).max() > TOLERANCES["leaf_matters"].value, "the option changes nothing"


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


@pytest.mark.parametrize("top_k", [6, 8])
def test_demo_model(top_k: int) -> None:
    folder, ids = demo_folder(top_k), demo_ids()
    ours, theirs = run_logits(folder, ids, chunks=(64,)), torch_logits(folder, ids)
    error = float(np.abs(ours - theirs).max())
    print(f"demo top-{top_k}: {error:.1e}, largest logit {np.abs(theirs).max():.1f}")
    assert error <= TOLERANCES["demo_logits"].value
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))


def test_demo_with_all_experts_equals_the_dense_model() -> None:
    """All 8 routed experts with weight 1: the carved layers compute what the dense ones did."""
    ours, dense = run_logits(demo_folder(8), demo_ids(), chunks=(64,)), dense_logits()
    error = float(np.abs(ours - dense).max())
    print(f"demo top-8 against dense: {error:.1e}")
    assert error <= TOLERANCES["demo_dense"].value
