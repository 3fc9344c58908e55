"""The wire between the process that has the queue and the others: where it is, how long to wait, and the messages.

One DEALER socket a thread talks to one ROUTER socket; a message is one frame of JSON, never a pickle. Every request has
a number that its answer repeats, and may be sent again: all that a client asks for can be asked twice. Requests after
the first carry the run's secret, which only a client with the same tasks gets.

`jax.distributed` is not used on purpose: its coordinator ends all processes when one dies, and no task needs a
collective operation. Here a dead process costs the one task that it held.
"""

import json
import socket
from dataclasses import asdict, dataclass
from typing import Any

from jaxmoe import errors
from jaxmoe.errors import ConfigError, EngineError, JaxMoeError
from jaxmoe.ptq.tasks.queue import Failed, Finished, Totals, WorkerShare

PROTOCOL_VERSION = 1
MAX_REQUEST_BYTES = 1 << 20
"""A client's request is short; the answer to one that has other tasks may be long."""
_MAX_ERROR_CHARACTERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How the processes of one run find each other. All have the same, except for `serve`."""

    address: str
    """'tcp://host:port' of the process that has the queue (rank 0); it may use 'tcp://*:port' for itself."""
    serve: bool
    """Whether this is the process that has the queue; exactly one is."""
    processes: int | None = None
    """How many take part, this one included: at the end rank 0 waits `join_s` for those that have not come yet, so that
    a slow starter is told that all is done. None: nobody counts."""
    join_s: float = 120.0
    """How long a client waits for the server to be there."""
    timeout_s: float = 20.0
    """A server that has not answered for so long is gone."""


class ProtocolError(EngineError):
    """A message that is not one of ours: something else talks at this address."""


def encode(message: dict[str, Any]) -> bytes:
    """The frame of a message."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(frame: bytes) -> dict[str, Any]:
    """The message of a frame.

    Raises:
        ProtocolError: it is none.
    """
    try:
        message = json.loads(frame)
    except ValueError as error:  # UnicodeDecodeError is one
        raise ProtocolError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"a JSON {type(message).__name__} instead of an object")
    return message


def field(message: dict[str, Any], key: str, kind: type) -> Any:
    """A field of a message.

    Raises:
        ProtocolError: it is missing or of another type.
    """
    value = message.get(key)
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ProtocolError(f"field {key!r} is {value!r:.80}, not of type {kind.__name__}")
    return value


def failure_of(error: BaseException, process: str) -> Failed:
    """An error as the other processes get it: with the name of the process where it happened."""
    kind = type(error).__name__ if isinstance(error, JaxMoeError) else EngineError.__name__
    text = str(error)
    if len(text) > _MAX_ERROR_CHARACTERS:
        text = f"{text[:_MAX_ERROR_CHARACTERS]} ... ({len(text)} characters)"
    return Failed(error=f"{text} (in process {process})", kind=kind)


def error_of(failure: Failed) -> JaxMoeError:
    """The error of a failure that came from another process; its type is the original's if errors.py has it."""
    kind = getattr(errors, failure.kind, None)
    if isinstance(kind, type) and issubclass(kind, JaxMoeError):
        return kind(failure.error)
    return EngineError(failure.error)


def end_to_json(end: Finished | Failed) -> dict[str, Any]:
    """How a run ended, for a message."""
    return {"kind": "finished" if isinstance(end, Finished) else "failure", "end": asdict(end)}


def end_from_json(message: dict[str, Any]) -> Finished | Failed:
    """The inverse of `end_to_json`.

    Raises:
        ProtocolError: the message has no end.
    """
    end = field(message, "end", dict)
    if message["kind"] == "failure":
        return Failed(error=field(end, "error", str), kind=field(end, "kind", str))
    totals = field(end, "totals", dict)
    return Finished(
        totals=Totals(
            done_before=field(totals, "done_before", int),
            wall_s=field(totals, "wall_s", float),
            cpu_s=field(totals, "cpu_s", float),
            shares=tuple(
                WorkerShare(
                    worker=field(share, "worker", str),
                    tasks=field(share, "tasks", int),
                    exec_s=field(share, "exec_s", float),
                    present_s=field(share, "present_s", float),
                )
                for share in field(totals, "shares", list)
            ),
        )
    )


def bind_address(address: str) -> str:
    """The address to listen at: ZeroMQ listens at numbers or '*', so a host's name becomes its number.

    Raises:
        ConfigError: the address is none, or the name is unknown.
    """
    scheme, _, rest = address.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not host or not port.isdecimal():
        raise ConfigError(f"the address of the task queue is {address!r}; it must be 'tcp://host:port'")
    if host == "*":
        return address
    try:
        number = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"the host of {address!r} is unknown here ({error}); use 'tcp://*:{port}' on it") from error
    return f"tcp://{number}:{port}"
