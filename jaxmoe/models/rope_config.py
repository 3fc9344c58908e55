"""The dialects of rotary settings in config.json: flat (transformers 4) and nested (transformers 5)."""

from typing import Any

from jaxmoe.errors import ConfigError, UnsupportedError
from jaxmoe.models.family import ConfigReader
from jaxmoe.nn.config import RopeConfig

_YARN_LEFTOVERS = frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"})
"""Keys that Hunyuan writes beside alpha; its 'dynamic' kind does not read them."""


def read_rope(reader: ConfigReader, head_dim: int, *, partial_default: float = 1.0, alpha: bool = False) -> RopeConfig:
    """Base and rotated dims from `rope_parameters`, or from `rope_theta`, `rope_scaling`, `partial_rotary_factor`.

    `rope_scaling` of null, {} and {"rope_type": "default"} all mean: unscaled. `type` is an older word for
    `rope_type`. The theta is never defaulted.

    Args:
        reader: the config.
        head_dim: dims of a head.
        partial_default: rotated share of a head when the file does not say (class default of the family).
        alpha: whether the family knows the static NTK correction theta * alpha ** (d / (d - 2)) under 'dynamic'.

    Raises:
        ConfigError: no theta, or two that differ, or an unknown key.
        UnsupportedError: another kind of scaling.
    """
    where = reader.where
    nested: dict[str, Any] = dict(reader.take("rope_parameters", dict, {}))
    scaling: dict[str, Any] = dict(reader.take("rope_scaling", dict, {}))
    merged = {**scaling, **nested}
    thetas = {
        float(t) for t in (reader.take("rope_theta", float, None), merged.pop("rope_theta", None)) if t is not None
    }
    if len(thetas) != 1:
        raise ConfigError(f"{where}: rope_theta is {'missing' if not thetas else f'given as {sorted(thetas)}'}")
    theta = thetas.pop()
    flat_partial = reader.take("partial_rotary_factor", float, None)
    partial = float(merged.pop("partial_rotary_factor", partial_default if flat_partial is None else flat_partial))
    kind = merged.pop("rope_type", merged.pop("type", "default"))
    merged.pop("type", None)
    factor = merged.pop("factor", 1.0)
    if kind == "dynamic" and alpha:
        value = merged.pop("alpha", None)
        if value is None or factor not in (1, 1.0):
            raise UnsupportedError(
                f"{where}: dynamic rope with alpha {value} and factor {factor}; only alpha is supported"
            )
        theta *= float(value) ** (head_dim / (head_dim - 2))
        for key in _YARN_LEFTOVERS:
            merged.pop(key, None)
    elif kind != "default":
        raise UnsupportedError(f"{where}: rope type {kind!r} is not supported for this family by this version")
    if merged:
        raise ConfigError(f"{where}: unknown rope key {', '.join(sorted(merged))}")
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise ConfigError(f"{where}: partial_rotary_factor {partial} of head_dim {head_dim} gives {rotary_dim} dims")
    return RopeConfig(theta=theta, rotary_dim=rotary_dim)
