"""Tiny checkpoints of each family: weights drawn by tensor name, so that goldens hold nothing but logits."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmoe.models.manifest import Manifest, build_manifest
from jaxmoe.models.registry import FAMILIES, read_config
from jaxmoe.nn.config import DecoderConfig
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec

_COMMON = {"vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_act": "silu"}
_BODY = {**_COMMON, "hidden_size": 64, "max_position_embeddings": 512, "tie_word_embeddings": False}
_GROUPED = {**_BODY, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
_LATENT = {
    **_BODY,
    "attention_bias": False,
    "kv_lora_rank": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_EXPERTS = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_TWO_OF_FOUR_GROUPS = {"n_group": 4, "topk_group": 2}
# With fewer heads many scores are exactly 0, and what is chosen hangs on ties.
_INDEXER = {"index_head_dim": 16, "index_n_heads": 32, "index_topk": 8}
_YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_type": "yarn",
}


def _rope(theta: float, **settings: float) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default", **settings}


_DEEPSEEK_V3 = {
    **_LATENT,
    **_EXPERTS,
    **_TWO_OF_FOUR_GROUPS,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": _YARN,
    "routed_scaling_factor": 2.5,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **_LATENT,
        **_EXPERTS,
        **_TWO_OF_FOUR_GROUPS,
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _YARN,
        "routed_scaling_factor": 16.0,
        "topk_method": "group_limited_greedy",
    },
    "deepseek_v3": {
        **_DEEPSEEK_V3,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_nextn_predict_layers": 1,
        "rope_interleave": True,
    },
    "deepseek_v32": {
        **_DEEPSEEK_V3,
        **_INDEXER,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "layer_types": ["indexed_attention"] * 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_nextn_predict_layers": 1,
    },
    "dots1": {
        **_GROUPED,
        **_EXPERTS,
        **_ONE_GROUP,
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "head_dim": 16,
        "layer_types": ["full_attention"] * 3,
        "max_window_layers": 62,
        "n_shared_experts": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _rope(1e7),
        "routed_scaling_factor": 2.5,
        "sliding_window": 4096,
    },
    "ernie4_5_moe": {
        **_GROUPED,
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "moe_k": 2,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "moe_layer_start_index": 1,
        "moe_norm_min": 1e-12,
        "moe_num_experts": 8,
        "moe_num_shared_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(500000.0),
        "tie_word_embeddings": True,
        "use_bias": False,
    },
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
    "glm4_moe_lite": {
        **_LATENT,
        **_EXPERTS,
        **_ONE_GROUP,
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": _rope(1e6),
        "routed_scaling_factor": 1.8,
    },
    "glm_moe_dsa": {
        **_LATENT,
        **_EXPERTS,
        **_ONE_GROUP,
        **_INDEXER,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "full", "shared", "shared", "full", "shared"],
        "layer_types": ["indexed_attention"] * 6,
        "mlp_layer_types": ["dense", *["sparse"] * 5],
        "num_hidden_layers": 6,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(8e6),
        "routed_scaling_factor": 2.5,
        "v_head_dim": 24,
    },
    "gpt_oss": {
        **_GROUPED,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 16,
        "intermediate_size": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "max_position_embeddings": 2048,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 150000.0,
            "rope_type": "yarn",
            "truncate": False,
        },
        "sliding_window": 8,
        "swiglu_limit": 0.5,
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
    "hy_v3": {
        **_GROUPED,
        "architectures": ["HYV3ForCausalLM"],
        "model_type": "hy_v3",
        "attention_bias": False,
        "enable_moe_fp32_combine": True,
        "head_dim": 16,
        "intermediate_size": 96,
        "mlp_bias": False,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 1,
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(11158840.0),
        "router_scaling_factor": 2.826,
    },
    "hy_v4": {
        **_LATENT,
        **_EXPERTS,
        **_ONE_GROUP,
        **_INDEXER,
        "architectures": ["HYV4ForCausalLM"],
        "model_type": "hy_v4",
        "hc_eps": 1e-6,
        "hc_magnitude": 2.0,
        "hc_mult": 4,
        "indexer_types": ["full", "full", "shared", "shared", "shared", "full"],
        "layer_types": ["indexed_attention"] * 6,
        "learnable_sink_init": 0.0,
        "mlp_layer_types": ["dense", *["sparse"] * 5],
        "num_hidden_layers": 6,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(1e7),
        "routed_scaling_factor": 2.827,
        "swiglu_limit": 0.5,
        "v_head_dim": 24,
    },
    "kimi_k25": {
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "image_token_id": 250,
        "projection_hidden_size": 32,
        "projection_layer_norm_eps": 1e-5,
        "text_config": {
            **_DEEPSEEK_V3,
            **_ONE_GROUP,
            "model_type": "deepseek_v3",
            "num_nextn_predict_layers": 0,
            "rope_interleave": True,
        },
        "tie_word_embeddings": False,
        "video_token_id": 251,
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "merge_kernel_size": [2, 2],
            "model_type": "kimi_k25_vision",
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 14,
            "pos_emb_height": 4,
            "pos_emb_time": 2,
            "pos_emb_width": 4,
        },
        "vision_end_token_id": 253,
        "vision_start_token_id": 252,
    },
    "minimax_m2": {
        **_GROUPED,
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "head_dim": 16,
        "intermediate_size": 32,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _rope(5e6, partial_rotary_factor=0.5),
    },
    "mixtral": {
        **_GROUPED,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 96,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(1e6),
        "sliding_window": None,
    },
    "olmoe": {
        **_GROUPED,
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "attention_bias": False,
        "clip_qkv": None,
        "intermediate_size": 32,
        "norm_topk_prob": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _rope(10000.0),
    },
    "qwen3_moe": {
        **_GROUPED,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 16,
        "intermediate_size": 96,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _rope(1e6),
        "use_sliding_window": False,
    },
}
"""Of each family."""


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 tensor of a name: any program that knows names and shapes can draw it.

    Gains lie around 1, biases around 0, everything else has unit-variance products, so that no part can be missing
    without a visible change. Hyper-connections stay where their sigmoids bend.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    normal = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if name.endswith("bias"):
        return 0.2 * normal
    if "norm" in name or name.endswith(("hc_scale", "hc_head_scale")):
        return 1 + 0.2 * normal
    if name.endswith(("hc_fn", "hc_head_fn")):
        return 0.05 * normal
    if "embed_tokens" in name:
        # As a tied head it multiplies 64 elements: logits stay small enough for an absolute tolerance.
        return 0.5 * normal
    if name.endswith(("sinks", "sink_param", "hc_base", "hc_head_base")):
        return normal
    return normal / np.float32(np.sqrt(shape[-1]))


DROP = object()
"""As a value in `changed`: the key is left out."""


def changed(family: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A family's config.json with changes, which lie in the text part of a wrapper."""
    data = CONFIGS[family]
    inner = {key: value for key, value in {**data.get("text_config", data), **changes}.items() if value is not DROP}
    return {**data, "text_config": inner} if "text_config" in data else inner


def read(family: str, changes: Mapping[str, Any]) -> DecoderConfig:
    """The decoder of `changed`."""
    found, config = read_config(changed(family, changes), "config.json")
    assert found is FAMILIES[family]
    return config


def manifest_of(config: Mapping[str, Any]) -> Manifest:
    """The manifest of a config dict."""
    return build_manifest(*read_config(config, "config.json"))


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], *, dtype: Any = np.float32, max_shard_bytes: int = 1 << 20
) -> Path:
    """Writes a tiny checkpoint under its released names and returns its folder."""
    manifest = manifest_of(config)
    # Parameters that the hub fuses share their tensors.
    specs = {
        name: TensorSpec(name=name, dtype=np.dtype(np.float32 if entry.float32 else dtype), shape=entry.tensor_shape)
        for entry in manifest.entries
        for _, name in entry.tensors()
    }.values()
    folder.mkdir(parents=True, exist_ok=True)
    with CheckpointWriter(folder, list(specs), max_shard_bytes=max_shard_bytes) as writer:
        for spec in specs:
            writer.write(spec.name, draw(spec.name, spec.shape).astype(spec.dtype))
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")
    return folder


def token_ids(rows: int = 2, length: int = 37, vocab: int = 256) -> np.ndarray:
    """[rows, length] int64 token ids of the goldens."""
    return np.random.default_rng(7).integers(3, vocab, (rows, length))
