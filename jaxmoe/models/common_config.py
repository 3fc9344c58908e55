"""Settings that most families spell alike."""

from typing import Any

from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.models.family import IGNORED_KEYS, REQUIRED, ConfigReader
from jaxmoe.nn.config import AttentionConfig, DecoderConfig, HyperConfig, LatentAttentionConfig, MoEConfig, RouterConfig


def expect_plain(reader: ConfigReader, *ignored: str, dropout: bool = False) -> None:
    """What every supported decoder has in common: SwiGLU by silu, no dropout, no cross attention.

    Args:
        reader: the config.
        ignored: keys of the family that do not change the forward pass.
        dropout: whether released files name a dropout, which does nothing at inference.
    """
    reader.expect("hidden_act", "silu")
    if dropout:
        reader.ignore("attention_dropout")
    else:
        reader.expect("attention_dropout", 0)
    reader.expect("add_cross_attention", False)
    reader.expect("is_encoder_decoder", False)
    reader.expect("cross_attention_hidden_size")
    reader.expect("pruned_heads", {})
    reader.expect("chunk_size_feed_forward", 0)
    reader.ignore(*IGNORED_KEYS, *_INHERITED, *ignored)


def read_decoder(
    reader: ConfigReader,
    *,
    family: str,
    attention: AttentionConfig | LatentAttentionConfig,
    moe: MoEConfig,
    dense_layers: int = 0,
    mtp_layers: int = 0,
    mtp_copies: bool = False,
    tied_default: bool = False,
    hyper: HyperConfig | None = None,
) -> DecoderConfig:
    """The decoder around its parts.

    Args:
        reader: the config.
        family: its name.
        attention: read before.
        moe: read before.
        dense_layers: leading dense layers; their width is `intermediate_size`.
        mtp_layers: multi-token-prediction blocks.
        mtp_copies: whether they carry an embedding and a head.
        tied_default: whether the head is the embedding when the file does not say.
        hyper: hyper-connections.

    Raises:
        ConfigError: a key is missing or has a value that makes no sense.
    """
    # Sparse-only files may name a dense width that nothing uses.
    ffn = reader.positive("intermediate_size") if dense_layers else 0
    reader.ignore("intermediate_size")
    return DecoderConfig(
        family=family,
        vocab=reader.positive("vocab_size"),
        embed=reader.positive("hidden_size"),
        layers=reader.positive("num_hidden_layers"),
        dense_layers=dense_layers,
        ffn=ffn,
        attention=attention,
        moe=moe,
        norm_eps=reader.positive_number("rms_norm_eps"),
        tied_head=reader.take("tie_word_embeddings", bool, tied_default),
        max_positions=reader.positive("max_position_embeddings"),
        hyper=hyper,
        mtp_layers=mtp_layers,
        mtp_copies=mtp_copies and mtp_layers > 0,
    )


def read_dense_layers(reader: ConfigReader, default: Any = REQUIRED) -> int:
    """Leading dense layers, from `mlp_layer_types`, `first_k_dense_replace`, or both.

    Raises:
        ConfigError: neither is there and there is no default, or they contradict each other.
        UnsupportedError: dense layers that do not lead.
    """
    layers = reader.positive("num_hidden_layers")
    kinds = reader.kinds("mlp_layer_types", "dense", "sparse", layers=layers)
    if kinds is None:
        return min(reader.count("first_k_dense_replace", default), layers)
    dense = kinds.count("dense")
    if "dense" in kinds[dense:]:
        raise UnsupportedError(
            f"{reader.where}: mlp_layer_types has dense layers after sparse ones; only leading ones are supported"
        )
    if min(reader.count("first_k_dense_replace", dense), layers) != dense:
        raise ConfigError(
            f"{reader.where}: mlp_layer_types has {dense} dense layers, first_k_dense_replace is "
            f"{reader.count('first_k_dense_replace')}"
        )
    return dense


def read_sigmoid_router(
    reader: ConfigReader,
    groups_default: Any = 1,
    scaling_default: Any = REQUIRED,
    scoring: tuple[str, ...] = ("sigmoid",),
) -> RouterConfig:
    """The router of DeepSeek-V3 and its followers (R2): sigmoid scores, a correction bias, groups, renormalised.

    Args:
        reader: the config.
        groups_default: of `n_group` and `topk_group`, when the file does not say.
        scaling_default: of `routed_scaling_factor`, when the file does not say.
        scoring: words of `scoring_func` that mean this router.
    """
    reader.expect("scoring_func", *scoring)
    reader.expect("topk_method", "noaux_tc")
    reader.expect("moe_layer_freq", 1)
    reader.expect("moe_router_dtype", "float32")
    return RouterConfig(
        experts=reader.positive(reader.spelling("n_routed_experts", "num_experts", "num_local_experts")),
        top_k=reader.positive("num_experts_per_tok"),
        score="sigmoid",
        correction_bias=True,
        groups=reader.positive("n_group", groups_default),
        topk_groups=reader.positive("topk_group", groups_default),
        renormalize=reader.take("norm_topk_prob", bool, True),
        epsilon=1e-20,
        scaling=reader.positive_number("routed_scaling_factor", scaling_default),
    )


def softmax_router(reader: ConfigReader) -> RouterConfig:
    """The router of Qwen3 and OLMoE: softmax scores over `num_experts`; `norm_topk_prob` must be in the file."""
    return RouterConfig(
        experts=reader.positive(reader.spelling("num_experts", "num_local_experts")),
        top_k=reader.positive("num_experts_per_tok"),
        score="softmax",
        renormalize=reader.take("norm_topk_prob", bool),
    )


def read_moe(reader: ConfigReader, router: RouterConfig, *, limit: float | None = None) -> MoEConfig:
    """Experts of width `moe_intermediate_size` and a shared one as wide as `n_shared_experts` of them."""
    width = reader.positive("moe_intermediate_size")
    return MoEConfig(router=router, expert_ffn=width, shared_ffn=width * reader.count("n_shared_experts"), limit=limit)


def read_mtp_layers(reader: ConfigReader) -> int:
    """Multi-token-prediction blocks; transformers 5 has a second word for them."""
    return reader.count(reader.spelling("num_nextn_predict_layers", "num_mtp_layers"), 0)


_INHERITED = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "typical_p",
    "use_bfloat16",
)
"""Keys that transformers 4 wrote into nested configs: sampling, classification, other kinds of model."""
