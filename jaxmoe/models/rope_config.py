"""The dialects of rotary settings in config.json: flat (transformers 4) and nested (transformers 5)."""

import math
from typing import Any

from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.models.family import ConfigReader
from jaxmoe.nn.config import RopeConfig, YarnConfig

_YARN_LEFTOVERS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys that Hunyuan writes beside alpha; its 'dynamic' kind does not read them."""


def read_rope(
    reader: ConfigReader,
    head_dim: int,
    *,
    partial_default: float = 1.0,
    alpha: bool = False,
    interleaved: bool = False,
) -> RopeConfig:
    """Base, rotated dims and scaling from `rope_parameters`, or from `rope_theta`, `rope_scaling` and their like.

    `rope_scaling` of null, {} and {"rope_type": "default"} all mean: unscaled. `type` is an older word for
    `rope_type`. The theta is never defaulted, and a setting that is given twice must be given alike.

    Args:
        reader: the config.
        head_dim: dims of a head.
        partial_default: rotated share of a head when the file does not say (class default of the family).
        alpha: whether the family knows the static NTK correction theta * alpha ** (d / (d - 2)) under 'dynamic'.
        interleaved: whether neighbouring dims form a pair.

    Raises:
        ConfigError: no theta, a setting with two values or of a wrong type, or an unknown key.
        UnsupportedError: another kind of scaling, or settings that differ by layer type.
    """
    rope, _ = _read(reader, head_dim, partial_default, alpha, interleaved)
    return rope


def read_latent_rope(reader: ConfigReader, rope_dim: int, *, interleaved: bool) -> tuple[RopeConfig, float]:
    """Rotary settings of latent attention, and the factor that yarn puts on its scores.

    The factor is m(f, mscale_all_dim) ** 2 where the file gives mscale_all_dim, else 1. Source: `yarn_apply_mscale` of
    transformers' modeling_deepseek_v3.py, which deepseek_v2, deepseek_v32, glm4_moe_lite, glm_moe_dsa and hy_v4 share.

    Args:
        reader: the config.
        rope_dim: dims of a head that rotate, all of them.
        interleaved: whether neighbouring dims form a pair.

    Raises:
        ConfigError: see `read_rope`.
        UnsupportedError: see `read_rope`; or only a part of the rotary dims rotates.
    """
    rope, all_dim = _read(reader, rope_dim, 1.0, False, interleaved)
    if rope.rotary_dim != rope_dim:
        raise UnsupportedError(f"{reader.where}: {rope.rotary_dim} of the {rope_dim} rotary dims rotate, only all can")
    return rope, 1.0 if rope.yarn is None or not all_dim else yarn_mscale(rope.yarn.factor, all_dim) ** 2


def yarn_mscale(factor: float, weight: float) -> float:
    """m(f, a) = 0.1 a ln f + 1 for a stretching factor. Source: Peng et al. 2023 (arXiv 2309.00071), section 3.4."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _read(
    reader: ConfigReader, head_dim: int, partial_default: float, alpha: bool, interleaved: bool
) -> tuple[RopeConfig, float | None]:
    """The settings and mscale_all_dim."""
    where = reader.where
    tables = [_table(reader, key) for key in ("rope_parameters", "rope_scaling")]
    theta = _agreed("rope_theta", [table.take("rope_theta", float, None) for table in (reader, *tables)], where)
    if theta is None:
        raise ConfigError(f"{where}: rope_theta is missing")
    shares = [table.take("partial_rotary_factor", float, None) for table in (reader, *tables)]
    partial = _agreed("partial_rotary_factor", shares, where)
    partial = partial_default if partial is None else partial
    kinds = [table.take(key, str, None) for table in tables for key in ("rope_type", "type")]
    kind = _agreed("rope type", kinds, where) or "default"
    factor = _setting(tables, "factor", where)
    yarn, all_dim = None, None
    if kind == "dynamic" and alpha:
        theta *= _ntk(tables, factor, head_dim, where)
    elif kind == "yarn":
        yarn, all_dim = _yarn(reader, tables, factor)
    elif kind != "default":
        raise UnsupportedError(f"{where}: rope type {kind!r} is not supported for this family by this version")
    elif factor not in (None, 1.0):
        raise ConfigError(f"{where}: rope factor {factor} without a rope type that uses it")
    for table in tables:
        table.finish()
    # Yarn divides by the base's logarithm.
    least = 0 if yarn is None else 1
    if not least < theta < math.inf:
        raise ConfigError(f"{where}: rope_theta {theta} is not above {least} and finite")
    rotary_dim = int(head_dim * partial) if math.isfinite(partial) else 0
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(f"{where}: partial_rotary_factor {partial} of head_dim {head_dim} gives {rotary_dim} dims")
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, interleaved=interleaved, yarn=yarn), all_dim


def _table(reader: ConfigReader, key: str) -> ConfigReader:
    """The settings under a key; one table for each kind of layer is read as one when all are equal."""
    table = reader.take(key, dict, {})
    nested = {name: value for name, value in table.items() if isinstance(value, dict)}
    if nested:
        first, *others = nested.values()
        if len(nested) < sum(value is not None for value in table.values()):
            raise ConfigError(f"{reader.where}: {key} mixes settings with tables for kinds of layers")
        if any(other != first for other in others):
            raise UnsupportedError(
                f"{reader.where}: {key} differs between {' and '.join(nested)}; only equal settings are supported"
            )
        table = first
    return ConfigReader(table, f"{reader.where}: {key}")


def _ntk(tables: list[ConfigReader], factor: float | None, head_dim: int, where: str) -> float:
    """Factor on the base."""
    value = _setting(tables, "alpha", where)
    if value is None or factor not in (None, 1.0):
        raise UnsupportedError(f"{where}: dynamic rope with alpha {value} and factor {factor}; only alpha is supported")
    if not 0 < value < math.inf or head_dim <= 2:
        raise ConfigError(f"{where}: dynamic rope with alpha {value} and head_dim {head_dim} has no base")
    for table in tables:
        table.ignore(*_YARN_LEFTOVERS)
    return value ** (head_dim / (head_dim - 2))


def _yarn(reader: ConfigReader, tables: list[ConfigReader], factor: float | None) -> tuple[YarnConfig, float | None]:
    """Yarn, and mscale_all_dim. Source: `_compute_yarn_parameters` of transformers' modeling_rope_utils.py (5.24.0)."""
    where = reader.where
    if factor is None:
        raise ConfigError(f"{where}: yarn rope without a factor")
    # A file that stretches without saying from where was trained for what it names as its longest context.
    lengths = [table.take("original_max_position_embeddings", int, None) for table in (reader, *tables)]
    original = _agreed("original_max_position_embeddings", lengths, where)
    original = reader.positive("max_position_embeddings") if original is None else original
    fast, slow = _setting(tables, "beta_fast", where), _setting(tables, "beta_slow", where)
    scale, all_dim = _setting(tables, "mscale", where), _setting(tables, "mscale_all_dim", where)
    given = _setting(tables, "attention_factor", where)
    truncate = _agreed("truncate", [table.take("truncate", bool, None) for table in tables], where)
    named = {"factor": factor, "original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow}
    named |= {"attention_factor": given}
    for name, value in named.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{where}: yarn {name} {value} is not positive and finite")
    if given is None:
        given = (
            yarn_mscale(factor, scale) / yarn_mscale(factor, all_dim) if scale and all_dim else yarn_mscale(factor, 1.0)
        )
    yarn = YarnConfig(
        factor=factor,
        original_positions=original,
        beta_fast=32.0 if fast is None else fast,
        beta_slow=1.0 if slow is None else slow,
        truncate=True if truncate is None else truncate,
        attention_factor=given,
    )
    return yarn, all_dim


def _setting(tables: list[ConfigReader], key: str, where: str) -> float | None:
    return _agreed(f"rope {key}", [table.take(key, float, None) for table in tables], where)


def _agreed(name: str, values: list[Any], where: str) -> Any:
    """The one value among those that are given; None when none is."""
    given = {value for value in values if value is not None}
    if len(given) > 1:
        raise ConfigError(f"{where}: {name} is given as {' and '.join(map(repr, sorted(given)))}")
    return given.pop() if given else None
