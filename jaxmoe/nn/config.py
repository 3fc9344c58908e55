"""What a decoder is made of, as frozen data. A family's config reader fills it from config.json."""

from dataclasses import dataclass
from typing import Literal

from jaxmoe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """Frequencies stretched for longer contexts. Source: Peng et al. 2023 (arXiv 2309.00071)."""

    factor: float
    original_positions: int
    """Context that the frequencies were trained for."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether the corrected dims are rounded outwards to whole dims (gpt-oss does not)."""
    attention_factor: float = 1.0
    """Factor on cosine and sine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of the first `rotary_dim` dims of what it is given."""

    theta: float
    """Base, after any static NTK correction."""
    rotary_dim: int
    """Dims that rotate; the rest passes."""
    interleaved: bool = False
    """Dims 2i and 2i + 1 form a pair; otherwise dims i and i + rotary_dim / 2."""
    yarn: YarnConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    bias: bool = False
    """Whether q, k and v projections add a bias."""
    out_bias: bool = False
    """Whether the output projection adds a bias."""
    qk_norm: Literal["none", "before_rope", "after_rope", "flat"] = "none"
    """RMSNorm of queries and keys: per head before or after the rotation, or over all heads at once before it."""
    sinks: bool = False
    """A learned logit a head in the softmax denominator."""
    windows: tuple[int, ...] = ()
    """Keys that a token of each layer sees, itself included; 0: all. Empty: all layers see all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Choice of keys by a small attention of its own. Source: DeepSeek-V3.2 technical report, section 2.1."""

    heads: int
    head_dim: int
    top_k: int
    """Keys that attention may see."""
    interleaved: bool
    """Pairing of its rotary dims."""
    rotates_last: bool = False
    """Whether the last dims of a head rotate instead of the first."""
    norm_eps: float = 1e-6
    full_layers: tuple[int, ...] = ()
    """Layers with an indexer of their own; the others reuse the choice of the nearest one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1."""

    heads: int
    q_lora: int
    """Width of the query latent; 0: queries are projected directly."""
    kv_lora: int
    nope_dim: int
    """Dims of a query and key head without rotation."""
    rope_dim: int
    v_dim: int
    rope: RopeConfig
    scale: float
    """Factor on the scores, yarn's correction included; the same for prefill and decode."""
    norm_eps: float
    """Of the norms on the latents."""
    gate: bool = False
    """A sigmoid gate on each head's output."""
    sinks: bool = False
    """A learned logit a head in the softmax denominator."""
    indexer: IndexerConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How experts are chosen; all in float32.

    softmax (R1, R3, R4): scores are softmax(logits). sigmoid (R2): scores are sigmoid(logits). logits (R6): the top-k
    logits are chosen and softmax runs over them alone. Chosen by score plus correction bias, where there is one, and
    optionally within the best `topk_groups` of `groups`; weights are the unbiased scores.
    """

    experts: int
    top_k: int
    score: Literal["softmax", "sigmoid", "logits"]
    correction_bias: bool = False
    logit_bias: bool = False
    """Whether the routing matrix has a bias of its own (gpt_oss)."""
    groups: int = 1
    topk_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    """A group's rank: the sum of its two best scores, or its best (deepseek_v2)."""
    renormalize: bool = True
    """Divide the chosen weights by their sum plus `epsilon`."""
    epsilon: float = 0.0
    least_sum: float = 0.0
    """Smallest divisor (ernie4_5_moe)."""
    scaling: float = 1.0

    def __post_init__(self) -> None:
        """Checks that no setting would be ignored.

        Raises:
            ConfigError: the score is 'logits' and something else is set that only scores have.
        """
        others = (self.correction_bias, self.groups, self.renormalize, self.scaling)
        if self.score == "logits" and others != (False, 1, False, 1.0):
            raise ConfigError(
                "a router that applies softmax to its top logits has no correction bias, groups, further scaling or "
                f"renormalisation; given are (bias, groups, renormalize, scaling) = {others}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Routed experts and the shared expert beside them."""

    router: RouterConfig
    expert_ffn: int
    shared_ffn: int
    """Hidden width of the shared expert; 0: there is none."""
    limit: float | None = None
    """Clamp of routed experts: gate at most, up within plus or minus this."""
    activation: Literal["swiglu", "gpt_oss"] = "swiglu"
    """silu(gate) * up, or (up + 1) * gate * sigmoid(1.702 * gate); both after the clamp."""
    expert_bias: bool = False
    """Whether the routed experts' projections add biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConfig:
    """Independent hyper-connections: several residual streams, read and written through learned gates (Hy4)."""

    streams: int
    magnitude: float
    epsilon: float


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
    attention: AttentionConfig | LatentAttentionConfig
    moe: MoEConfig
    norm_eps: float
    tied_head: bool
    max_positions: int
    hyper: HyperConfig | None = None
    mtp_layers: int = 0
    """Multi-token-prediction blocks after the last layer; 0 where the checkpoint does not carry them."""
    mtp_copies: bool = False
    """Whether those blocks carry an embedding and a head of their own."""

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return self.layers - self.dense_layers
