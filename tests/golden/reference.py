"""What a golden holds, and transformers' own logits, where torch is installed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

POSITIONS = (0, 1, 17, 36)
"""Positions whose logits a golden holds in full; the others are there as two numbers each."""


def path(family: str) -> Path:
    """The golden of a family."""
    return Path(__file__).with_name(f"logits_{family}.npz")


def summary(logits: np.ndarray, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of a golden from logits [rows, length, vocab] and token ids [rows, length].

    `logits` [rows, positions, vocab]; `logsumexp` [rows, length]; `next_token` [rows, length - 1], the logit of the
    token that follows.
    """
    wide = logits.astype(np.float64)
    peak = wide.max(-1, keepdims=True)
    following = np.take_along_axis(wide[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
    return {
        "logits": logits[:, POSITIONS].astype(np.float32),
        "logsumexp": (peak[..., 0] + np.log(np.exp(wide - peak).sum(-1))).astype(np.float32),
        "next_token": following.astype(np.float32),
    }


def torch_logits(folder: Path, ids: np.ndarray, *, as_deployed: bool = True, **config: Any) -> np.ndarray:
    """Logits [rows, length, vocab] of transformers in float32 with eager attention.

    Args:
        folder: checkpoint.
        ids: [rows, length] token ids.
        as_deployed: corrects what `_as_deployed` names; False: transformers as it is.
        config: keys of config.json to replace before loading.
    """
    import torch
    import transformers

    settings = transformers.AutoConfig.from_pretrained(folder, **config)
    expected = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model = (
        getattr(transformers, expected)
        .from_pretrained(folder, config=settings, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    with _as_deployed(model) if as_deployed else nullcontext(), torch.no_grad():
        return model(torch.from_numpy(ids)).logits.float().numpy()


@contextmanager
def _as_deployed(model: Any) -> Iterator[None]:
    """Two places in which transformers 5.24.0 differs from the deployments that the released models run on.

    Norms on latents: transformers takes its class default of 1e-6, vLLM and SGLang the config's rms_norm_eps.
    hy_v4 rotation: transformers pairs halves of the dims, vLLM and SGLang neighbours; with the released weights the
    former has a perplexity of 151, the latter of 6.39.
    """
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.get_text_config().rms_norm_eps
    if model.config.model_type != "hy_v4":
        yield
        return
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave
    from transformers.models.hy_v4 import modeling_hy_v4

    halves = modeling_hy_v4.apply_rotary_pos_emb
    modeling_hy_v4.apply_rotary_pos_emb = apply_rotary_pos_emb_interleave
    try:
        yield
    finally:
        modeling_hy_v4.apply_rotary_pos_emb = halves
