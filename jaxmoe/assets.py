"""Finds the data folders `configs/` and `sharding/`: inside the wheel, or beside the package in a checkout."""

from pathlib import Path

from jaxmoe.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent


def asset(*parts: str) -> Path:
    """Path of a file or folder shipped as data, such as `asset("configs", "gates.toml")`.

    Raises:
        ConfigError: it is neither in the wheel's `_assets` folder nor in the checkout; both paths are named.
    """
    candidates = [_PACKAGE / "_assets" / Path(*parts), _PACKAGE.parent / Path(*parts)]
    for path in candidates:
        if path.exists():
            return path
    raise ConfigError(f"{'/'.join(parts)} is not shipped with jaxmoe: looked for {candidates[0]} and {candidates[1]}")
