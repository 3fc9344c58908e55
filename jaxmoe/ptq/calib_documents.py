"""Calibration data: JSON, JSONL and text files into documents, and these into token ids."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from jaxmoe.decode import decode
from jaxmoe.errors import ConfigError, RequestError

_TEXT_SUFFIXES = (".txt", ".md")
_KINDS = (("text",), ("inputs_pretokenized",), ("messages",), ("prompt", "response"))
"""What a record may hold, one of these."""


@runtime_checkable
class Encoder(Protocol):
    """What calibration asks of a tokenizer; that of the engine, a sibling that is not imported here, has it."""

    def encode_long(self, text: str) -> list[int]:
        """Token ids of a text of any length, without special tokens."""
        ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]], *, ready: bool) -> list[int]:
        """Token ids of a conversation through the checkpoint's chat template; `ready`: up to where an answer begins."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text or conversation."""

    domain: str
    """What it is about: samples are spread evenly over the domains."""
    where: str
    """File and line or index, for messages."""
    content: str | tuple[Mapping[str, str], ...]
    """A text, or the messages of a conversation (role, content)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizedDocument:
    """Token ids of one document; at least one."""

    domain: str
    where: str
    ids: Int32[np.ndarray, " tokens"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    text: str | None = None
    inputs_pretokenized: str | None = None
    messages: tuple[_Message, ...] | None = None
    prompt: str | None = None
    response: str | None = None
    domain: str | None = None
    id: str | int | None = None
    """Taken, not used: msModelSlim's files have it."""
    token_count: int | None = None
    """Likewise; it was counted by another tokenizer."""


def read_documents(path: Path) -> tuple[Document, ...]:
    """The documents of a file: .json (a list), .jsonl (a record a line), .txt or .md (one text).

    A record is a string, or an object with "text", "inputs_pretokenized" (a text too, in spite of its name),
    "messages" or "prompt" and "response" (a conversation of two messages); "domain" is the file's stem unless given.

    Raises:
        ConfigError: the file cannot be read, has another suffix, holds no record, or a record is not one of these or
            holds an empty text; the file and the line or index are named.
    """
    text = _read_utf8(path)
    if path.suffix in _TEXT_SUFFIXES:
        return (Document(domain=path.stem, where=str(path), content=_checked(text, str(path), "the text")),)
    if path.suffix == ".jsonl":
        lines = text.removesuffix("\n").split("\n") if text else []
        places = [f"{path}:{number}" for number in range(1, len(lines) + 1)]
        values = [_parse(line, place) for line, place in zip(lines, places, strict=True)]
    elif path.suffix == ".json":
        values = _parse(text, str(path))
        if not isinstance(values, list):
            raise ConfigError(f"{path} holds a {type(values).__name__} where a list of records was expected")
        places = [f"{path}[{index}]" for index in range(len(values))]
    else:
        raise ConfigError(f"{path}: {path.suffix or 'no suffix'} is not one of .json, .jsonl, .txt, .md")
    if not values:
        raise ConfigError(f"{path} holds no records")
    return tuple(_document(value, place, path.stem) for value, place in zip(values, places, strict=True))


def tokenize_documents(documents: Sequence[Document], encoder: Encoder) -> tuple[TokenizedDocument, ...]:
    """Token ids of each document: texts without special tokens, conversations through the chat template.

    Raises:
        ConfigError: a document has no tokens.
        RequestError: the checkpoint has no chat template, or it refuses a conversation.
    """
    return tuple(_tokenize(document, encoder) for document in documents)


def documents_sha256(documents: Sequence[TokenizedDocument]) -> str:
    """A name for the data: of domains and token ids, in order; not of files or lines."""
    digest = hashlib.sha256()
    for document in documents:
        name = document.domain.encode("utf-8", "surrogatepass")
        for part in (name, document.ids.astype("<i4").tobytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _tokenize(document: Document, encoder: Encoder) -> TokenizedDocument:
    if isinstance(document.content, str):
        ids = encoder.encode_long(document.content)
    else:
        try:
            # A conversation that ends in an answer has no header of another one after it.
            ids = encoder.encode_chat(document.content, ready=document.content[-1]["role"] != "assistant")
        except RequestError as error:
            raise RequestError(f"{document.where}: {error}") from error
    if not ids:
        raise ConfigError(f"{document.where}: the tokenizer makes no tokens of this document; remove it")
    return TokenizedDocument(domain=document.domain, where=document.where, ids=np.asarray(ids, np.int32))


def _read_utf8(path: Path) -> str:
    try:
        # Not read_text: it would turn CRLF into LF, and a model knows the difference.
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable as UTF-8 text: {error}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a key that is there twice would otherwise lose its first value."""
    keys = [key for key, _ in pairs]
    twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if twice:
        raise ValueError(f"key {', '.join(twice)} is there twice")
    return dict(pairs)


def _document(value: object, where: str, stem: str) -> Document:
    record = _Record(text=value) if isinstance(value, str) else decode(_Record, value, where=where)
    domain = stem if record.domain is None else _checked(record.domain, where, "domain")
    return Document(domain=domain, where=where, content=_content(record, where))


def _content(record: _Record, where: str) -> str | tuple[Mapping[str, str], ...]:
    found = [kind for kind in _KINDS if any(getattr(record, key) is not None for key in kind)]
    if len(found) != 1:
        kinds = ", ".join("/".join(kind) for kind in found or _KINDS)
        raise ConfigError(f"{where}: {'more than one' if found else 'none'} of {kinds}; a record has one")
    if record.messages is not None:
        return _conversation(record.messages, where)
    for key in found[0]:
        if getattr(record, key) is None:
            raise ConfigError(f"{where}: missing key {key}; prompt and response go together")
    values = [_checked(getattr(record, key), where, key) for key in found[0]]
    if len(values) == 1:
        return values[0]
    return tuple({"role": role, "content": text} for role, text in zip(("user", "assistant"), values, strict=True))


def _conversation(messages: tuple[_Message, ...], where: str) -> tuple[Mapping[str, str], ...]:
    if not messages:
        raise ConfigError(f"{where}: messages is empty")
    return tuple(
        {
            "role": _checked(message.role, where, f"messages[{index}].role"),
            "content": _checked(message.content, where, f"messages[{index}].content"),
        }
        for index, message in enumerate(messages)
    )


def _checked(text: str, where: str, name: str) -> str:
    """A text that says something and that a tokenizer can take."""
    if not text.strip():
        raise ConfigError(f"{where}: {name} is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: {name} is not valid Unicode: {error}") from error
    return text
