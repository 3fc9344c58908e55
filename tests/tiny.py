"""Tiny checkpoints of each family: weights drawn by tensor name, so that goldens hold nothing but logits."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.models.manifest import Manifest, build_manifest
from jaxmoe.models.registry import read_config
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec

_COMMON = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_act": "silu"}

CONFIGS: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        **_COMMON,
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e6, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "hunyuan_v1_moe": {
        **_COMMON,
        "architectures": ["HunYuanMoEV1ForCausalLM"],
        "model_type": "hunyuan_v1_moe",
        "attention_bias": False,
        "head_dim": 16,
        "hidden_size": 64,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
        "moe_topk": 2,
        "num_attention_heads": 4,
        "num_experts": 8,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"alpha": 1000.0, "factor": 1.0, "rope_theta": 10000.0, "rope_type": "dynamic"},
        "tie_word_embeddings": False,
    },
}


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 tensor of a name: any program that knows names and shapes can draw it.

    Gains lie around 1, biases around 0, everything else has unit-variance products, so that no part can be missing
    without a visible change.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    normal = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return 1 + 0.2 * normal
    if name.endswith("bias"):
        return 0.2 * normal
    if "embed_tokens" in name:
        return normal
    return normal / np.float32(np.sqrt(shape[-1]))


def manifest_of(config: Mapping[str, Any]) -> Manifest:
    """The manifest of a config dict."""
    return build_manifest(*read_config(config, "config.json"))


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], *, dtype: Any = np.float32, max_shard_bytes: int = 1 << 20
) -> Path:
    """Writes a tiny checkpoint under its released names and returns its folder."""
    manifest = manifest_of(config)
    float32 = {name for entry in manifest.entries if entry.float32 for _, name in entry.tensors()}
    specs = [
        TensorSpec(name=name, dtype=np.dtype(np.float32 if name in float32 else dtype), shape=entry.tensor_shape)
        for entry in manifest.entries
        for _, name in entry.tensors()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with CheckpointWriter(folder, specs, max_shard_bytes=max_shard_bytes) as writer:
        for spec in specs:
            writer.write(spec.name, draw(spec.name, spec.shape).astype(spec.dtype))
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")
    return folder


def token_ids(rows: int = 2, length: int = 37, vocab: int = 256) -> np.ndarray:
    """[rows, length] int64 token ids of the goldens."""
    return np.random.default_rng(7).integers(3, vocab, (rows, length))
