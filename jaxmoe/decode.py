"""Strict decoding of outside data (JSON, TOML) into frozen dataclasses.

Unknown keys, missing keys and wrong types are errors that name the file and the key path. Nothing is coerced except
int -> float, nothing is defaulted unless the dataclass has a default.
"""

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxmoe.errors import ConfigError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: the file is absent, is not JSON, or holds something else than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__} where an object was expected")
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The table in a TOML file.

    Raises:
        ConfigError: the file is absent or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not readable as TOML: {error}") from error


def decode(kind: type[T], value: object, *, where: str) -> T:
    """Turns plain data into `kind`: a dataclass, or any type its fields may have.

    Args:
        kind: a dataclass, a scalar type, `tuple[X, ...]`, `Mapping[str, X]`, `Literal[...]` or a union of these.
        value: what the JSON or TOML reader returned.
        where: file and key path, for the message.

    Raises:
        ConfigError: a key is unknown or missing, or a value has the wrong type.
    """
    return typing.cast(T, _decode(kind, value, where))


def _decode(kind: Any, value: object, where: str) -> object:
    origin = typing.get_origin(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(kind, value, where)
    if origin is typing.Literal:
        allowed = typing.get_args(kind)
        if value not in allowed:
            raise ConfigError(f"{where}: {value!r} is not one of {', '.join(map(repr, allowed))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: {value!r} is not a list")
        item = typing.get_args(kind)[0]
        return tuple(_decode(item, entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if origin in (dict, Mapping, typing.get_origin(Mapping[str, int])):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}: {value!r} is not a table")
        item = typing.get_args(kind)[1]
        return {str(key): _decode(item, entry, f"{where}.{key}") for key, entry in value.items()}
    return _decode_scalar(kind, value, where)


def _decode_scalar(kind: Any, value: object, where: str) -> object:
    if kind is type(None):
        if value is not None:
            raise ConfigError(f"{where}: {value!r} is not null")
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{where}: {value!r} is not a {kind.__name__}")
    return value


def _decode_union(kind: Any, value: object, where: str) -> object:
    problems = []
    for option in typing.get_args(kind):
        try:
            return _decode(option, value, where)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError(problems[0])


def _decode_dataclass(kind: Any, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}: {value!r} is not a table")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(value) - set(fields))
    if unknown:
        raise ConfigError(f"{where}: unknown key {', '.join(unknown)}; known are {', '.join(sorted(fields))}")
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(value))
    if missing:
        raise ConfigError(f"{where}: missing key {', '.join(missing)}")
    return kind(**{key: _decode(hints[key], entry, f"{where}.{key}") for key, entry in value.items()})
