"""Grouped-query attention in config.json."""

from typing import Literal

from jaxmoe.errors import ConfigError
from jaxmoe.models.family import REQUIRED, ConfigReader
from jaxmoe.models.rope_config import read_rope
from jaxmoe.nn.config import AttentionConfig


def read_attention(
    reader: ConfigReader,
    *,
    kv_required: bool = True,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: Literal["none", "before_rope", "after_rope", "flat"] = "none",
    sinks: bool = False,
    windows: tuple[int, ...] = (),
    partial_default: float = 1.0,
    alpha: bool = False,
    interleaved: bool = False,
    head_dim_key: str = "head_dim",
) -> AttentionConfig:
    """Heads and rotary embedding as the file says, the rest as the family does.

    Args:
        reader: the config.
        kv_required: whether the file must name its key-value heads; otherwise there are as many as query heads.
        bias: of the q, k and v projections.
        out_bias: of the output projection.
        qk_norm: where queries and keys are normalised.
        sinks: whether heads have a sink.
        windows: keys a token of each layer sees; empty: all see all.
        partial_default: rotated share of a head when the file does not say.
        alpha: whether the family knows the static NTK correction.
        interleaved: whether neighbouring dims form a rotary pair.
        head_dim_key: the file's word for the dims of a head.

    Raises:
        ConfigError: a key is missing or makes no sense.
        UnsupportedError: a kind of rotary embedding that this version cannot do.
    """
    heads = reader.positive("num_attention_heads")
    head_dim = reader.positive(head_dim_key, reader.positive("hidden_size") // heads)
    return AttentionConfig(
        heads=heads,
        kv_heads=reader.positive("num_key_value_heads", REQUIRED if kv_required else heads),
        head_dim=head_dim,
        rope=read_rope(reader, head_dim, partial_default=partial_default, alpha=alpha, interleaved=interleaved),
        bias=bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        sinks=sinks,
        windows=windows,
    )


def read_windows(reader: ConfigReader, default: tuple[str, ...]) -> tuple[int, ...]:
    """Keys that each layer sees, from `layer_types` and `sliding_window`; empty when all layers see all.

    Args:
        reader: the config.
        default: kinds of the layers when the file does not list them.

    Raises:
        ConfigError: a list of another length, or sliding layers without a window.
        UnsupportedError: another kind of layer.
    """
    kinds = reader.kinds("layer_types", "full_attention", "sliding_attention", layers=len(default)) or default
    window = reader.take("sliding_window", int, None)
    if "sliding_attention" not in kinds:
        return ()
    if window is None or window < 1:
        raise ConfigError(f"{reader.where}: layer_types has sliding_attention, but sliding_window is {window}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
