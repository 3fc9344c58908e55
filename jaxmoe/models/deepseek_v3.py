"""deepseek_v3: DeepSeek-V3, R1, V3.1, Kimi-K2 (kimi_k2). Source: transformers models/deepseek_v3 (5.24.0)."""

from jaxmoe.models.common_config import (
    expect_plain,
    read_decoder,
    read_dense_layers,
    read_moe,
    read_mtp_layers,
    read_sigmoid_router,
)
from jaxmoe.models.family import REQUIRED, ConfigReader, Family
from jaxmoe.models.latent_config import read_latent
from jaxmoe.models.names import COPYING, DENSE, LATENT, SPARSE, family_rules
from jaxmoe.nn.config import DecoderConfig


def read_latent_decoder(reader: ConfigReader, family: str) -> DecoderConfig:
    """The decoder of DeepSeek-V3, which other families use under another name.

    Args:
        reader: the config.
        family: its name.

    Raises:
        ConfigError: a key is missing or makes no sense.
        UnsupportedError: an option that this version cannot do.
    """
    expect_plain(reader)
    return read_decoder(
        reader,
        family=family,
        dense_layers=read_dense_layers(reader),
        attention=read_latent(reader, interleaved=reader.take("rope_interleave", bool, True)),
        moe=read_moe(reader, read_sigmoid_router(reader, groups_default=REQUIRED)),
        mtp_layers=read_mtp_layers(reader),
        mtp_copies=True,
    )


def _read_config(reader: ConfigReader) -> DecoderConfig:
    return read_latent_decoder(reader, "deepseek_v3")


FAMILY = Family(
    name="deepseek_v3",
    read_config=_read_config,
    tensors=family_rules(dense={**LATENT, **DENSE}, moe={**LATENT, **SPARSE}, prediction=COPYING),
)
