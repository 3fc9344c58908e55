"""What a model keeps of each token: the tables of its paged cache."""

from jaxmoe.nn.config import AttentionConfig, DecoderConfig
from jaxmoe.ops.pages import TableSpec


def cache_tables(config: DecoderConfig) -> tuple[TableSpec, ...]:
    """Tables of a decoder: keys and values, or latents and rotated keys, and index keys of layers with an indexer."""
    attention = config.attention
    if isinstance(attention, AttentionConfig):
        return tuple(
            TableSpec(
                name=name,
                layers=config.layers,
                heads=attention.kv_heads,
                width=attention.head_dim,
                heads_axis="kv_heads",
            )
            for name in ("k", "v")
        )

    def shared(name: str, layers: int, width: int) -> TableSpec:
        return TableSpec(name=name, layers=layers, heads=1, width=width, heads_axis="latent")

    tables = (
        shared("latent", config.layers, attention.kv_lora),
        shared("rope", config.layers, attention.rope_dim),
    )
    indexer = attention.indexer
    return tables if indexer is None else (*tables, shared("index", len(indexer.full_layers), indexer.head_dim))
