"""What a decoder is made of, as frozen data. A family's config reader fills it from config.json."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of halves: dim i pairs with dim i + rotary_dim / 2."""

    theta: float
    """Base, after any static NTK correction."""
    rotary_dim: int
    """Leading dims of a head that rotate; the rest passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    bias: bool = False
    """Whether q, k and v projections add a bias (the output projection never does)."""
    qk_norm: Literal["none", "before_rope", "after_rope"] = "none"
    """Per-head RMSNorm of queries and keys, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How experts are chosen; all in float32.

    softmax (R1): top-k of softmax(logits). sigmoid (R2): top-k of sigmoid(logits) + correction bias, optionally within
    the best `topk_groups` of `groups` (a group's score is the sum of its two best); weights are the unbiased scores.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"]
    correction_bias: bool = False
    groups: int = 1
    topk_groups: int = 1
    renormalize: bool = True
    """Divide the chosen weights by their sum plus `epsilon`."""
    epsilon: float = 0.0
    scaling: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Routed experts and the shared expert beside them."""

    router: RouterConfig
    expert_ffn: int
    shared_ffn: int
    """Hidden width of the shared expert; 0: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only mixture-of-experts transformer."""

    family: str
    vocab: int
    embed: int
    layers: int
    dense_layers: int
    """Leading layers with a dense feed-forward instead of experts."""
    ffn: int
    """Hidden width of the dense layers; unused when there are none."""
    attention: AttentionConfig
    moe: MoEConfig
    norm_eps: float
    tied_head: bool
    max_positions: int

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers
