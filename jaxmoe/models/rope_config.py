"""The dialects of rotary settings in config.json: flat (transformers 4) and nested (transformers 5)."""

import math
from typing import Any

from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.models.family import ConfigReader
from jaxmoe.nn.config import RopeConfig

_YARN_LEFTOVERS = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""Keys that Hunyuan writes beside alpha; its 'dynamic' kind does not read them."""


def read_rope(reader: ConfigReader, head_dim: int, *, partial_default: float = 1.0, alpha: bool = False) -> RopeConfig:
    """Base and rotated dims from `rope_parameters`, or from `rope_theta`, `rope_scaling`, `partial_rotary_factor`.

    `rope_scaling` of null, {} and {"rope_type": "default"} all mean: unscaled. `type` is an older word for
    `rope_type`. The theta is never defaulted, and a setting that is given twice must be given alike.

    Args:
        reader: the config.
        head_dim: dims of a head.
        partial_default: rotated share of a head when the file does not say (class default of the family).
        alpha: whether the family knows the static NTK correction theta * alpha ** (d / (d - 2)) under 'dynamic'.

    Raises:
        ConfigError: no theta, a setting with two values or of a wrong type, or an unknown key.
        UnsupportedError: another kind of scaling.
    """
    where = reader.where
    tables = [
        ConfigReader(reader.take(key, dict, {}), f"{where}: {key}") for key in ("rope_parameters", "rope_scaling")
    ]
    theta = _agreed("rope_theta", [table.take("rope_theta", float, None) for table in (reader, *tables)], where)
    if theta is None:
        raise ConfigError(f"{where}: rope_theta is missing")
    shares = [table.take("partial_rotary_factor", float, None) for table in (reader, *tables)]
    partial = _agreed("partial_rotary_factor", shares, where)
    partial = partial_default if partial is None else partial
    kinds = [table.take(key, str, None) for table in tables for key in ("rope_type", "type")]
    kind = _agreed("rope type", kinds, where) or "default"
    factor = _agreed("rope factor", [table.take("factor", float, None) for table in tables], where)
    if kind == "dynamic" and alpha:
        value = _agreed("rope alpha", [table.take("alpha", float, None) for table in tables], where)
        if value is None or factor not in (None, 1.0):
            raise UnsupportedError(
                f"{where}: dynamic rope with alpha {value} and factor {factor}; only alpha is supported"
            )
        if not 0 < value < math.inf or head_dim <= 2:
            raise ConfigError(f"{where}: dynamic rope with alpha {value} and head_dim {head_dim} has no base")
        theta *= value ** (head_dim / (head_dim - 2))
        for table in tables:
            table.ignore(*_YARN_LEFTOVERS)
    elif kind != "default":
        raise UnsupportedError(f"{where}: rope type {kind!r} is not supported for this family by this version")
    elif factor not in (None, 1.0):
        raise ConfigError(f"{where}: rope factor {factor} without a rope type that uses it")
    for table in tables:
        table.finish()
    if not 0 < theta < math.inf:
        raise ConfigError(f"{where}: rope_theta {theta} is not positive and finite")
    rotary_dim = int(head_dim * partial) if math.isfinite(partial) else 0
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(f"{where}: partial_rotary_factor {partial} of head_dim {head_dim} gives {rotary_dim} dims")
    return RopeConfig(theta=theta, rotary_dim=rotary_dim)


def _agreed(name: str, values: list[Any], where: str) -> Any:
    """The one value among those that are given; None when none is."""
    given = {value for value in values if value is not None}
    if len(given) > 1:
        raise ConfigError(f"{where}: {name} is given as {' and '.join(map(repr, sorted(given)))}")
    return given.pop() if given else None
