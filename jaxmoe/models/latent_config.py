"""Multi-head latent attention and its indexer in config.json."""

from jaxmoe.errors import ConfigError
from jaxmoe.models.family import ConfigReader
from jaxmoe.models.rope_config import read_latent_rope
from jaxmoe.nn.config import IndexerConfig, LatentAttentionConfig


def read_latent(
    reader: ConfigReader,
    *,
    interleaved: bool = True,
    gate: bool = False,
    sinks: bool = False,
    indexer: IndexerConfig | None = None,
) -> LatentAttentionConfig:
    """Latent attention as DeepSeek and its followers spell it.

    The norms on the latents take `rms_norm_eps`, as the released deployments do (vLLM, SGLang); transformers 5.24.0
    takes its class default 1e-6 whatever the file says, which differs where `rms_norm_eps` is 1e-5.

    Args:
        reader: the config.
        interleaved: whether neighbouring rotary dims form a pair.
        gate: whether a sigmoid gate is on the output.
        sinks: whether heads have a sink.
        indexer: choice of keys, read before.

    Raises:
        ConfigError: a key is missing or makes no sense.
        UnsupportedError: an option that this version cannot do.
    """
    heads = reader.positive("num_attention_heads")
    nope_dim = reader.positive("qk_nope_head_dim")
    rope_dim = reader.positive("qk_rope_head_dim")
    # Keys and values are made from one latent for each query head.
    reader.expect("num_key_value_heads", heads)
    reader.expect("qk_head_dim", nope_dim + rope_dim)
    reader.expect("attention_bias", False)
    reader.expect("mlp_bias", False)
    # transformers overwrites it by the rotary dims, whatever the file says.
    reader.ignore("head_dim")
    if not reader.has("q_lora_rank"):
        raise ConfigError(f"{reader.where}: missing key q_lora_rank (null: queries have no latent)")
    q_lora = reader.take("q_lora_rank", int, None)
    rope, factor = read_latent_rope(reader, rope_dim, interleaved=interleaved)
    return LatentAttentionConfig(
        heads=heads,
        q_lora=0 if q_lora is None else reader.positive("q_lora_rank"),
        kv_lora=reader.positive("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        v_dim=reader.positive("v_head_dim"),
        rope=rope,
        scale=(nope_dim + rope_dim) ** -0.5 * factor,
        norm_eps=reader.positive_number("rms_norm_eps"),
        gate=gate,
        sinks=sinks,
        indexer=indexer,
    )


def read_indexer(
    reader: ConfigReader, full_layers: tuple[int, ...], *, interleaved: bool, rotates_last: bool = False
) -> IndexerConfig:
    """The indexer of DeepSeek-V3.2 and its followers; its LayerNorm's epsilon is 1e-6 whatever `rms_norm_eps` says.

    Args:
        reader: the config.
        full_layers: layers with an indexer of their own.
        interleaved: whether neighbouring rotary dims form a pair.
        rotates_last: whether the last dims rotate instead of the first.

    Raises:
        ConfigError: a key is missing or makes no sense.
        UnsupportedError: layers of another kind.
    """
    layers = reader.positive("num_hidden_layers")
    # Two words for one thing: transformers' and the released files'.
    reader.kinds("layer_types", "indexed_attention", "deepseek_sparse_attention", layers=layers)
    # Concerns how drafts are made, not what a block computes.
    reader.ignore("index_share_for_mtp_iteration")
    return IndexerConfig(
        heads=reader.positive("index_n_heads"),
        head_dim=reader.positive("index_head_dim"),
        top_k=reader.positive("index_topk"),
        interleaved=interleaved,
        rotates_last=rotates_last,
        full_layers=full_layers,
    )


def read_full_layers(reader: ConfigReader, default: tuple[int, ...], *, scheduled: bool = False) -> tuple[int, ...]:
    """Layers with an indexer of their own, from `indexer_types`.

    Args:
        reader: the config.
        default: when the file does not list them.
        scheduled: whether the default is the file's own, said in other words.

    Raises:
        ConfigError: a list of another length, a list that contradicts the schedule, or a first layer that has no choice
            to reuse.
        UnsupportedError: another kind of indexer.
    """
    kinds = reader.kinds("indexer_types", "full", "shared", layers=reader.positive("num_hidden_layers"))
    full = default if kinds is None else tuple(layer for layer, kind in enumerate(kinds) if kind == "full")
    if scheduled and full != default:
        raise ConfigError(
            f"{reader.where}: indexer_types gives layers {list(full)} an indexer, the schedule (index_topk_*) gives it "
            f"to {list(default)}; remove the one that is wrong"
        )
    if full[:1] != (0,):
        raise ConfigError(f"{reader.where}: layer 0 shares an indexer, but there is no layer before it")
    return full
