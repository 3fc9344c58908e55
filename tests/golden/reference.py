"""What a golden holds, and transformers' own logits, where torch is installed."""

import json
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


def torch_logits(folder: Path, ids: np.ndarray, **config: Any) -> np.ndarray:
    """Logits [rows, length, vocab] of transformers in float32 with eager attention.

    Args:
        folder: checkpoint.
        ids: [rows, length] token ids.
        config: keys of config.json to replace before loading.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(folder, **config)
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=settings, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    assert type(model).__name__ == expected, (type(model).__name__, expected)
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()
