"""Where calibration windows are cut: an endless sequence that the sizes of the documents and a seed define."""

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

STRATA = 4
"""Ranges of lengths, equal on a log scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How windows are cut: 1 <= min_tokens <= max_tokens, separator >= 0, seed >= 0."""

    min_tokens: int
    max_tokens: int
    separator: int
    """Token between joined documents: the end of text."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens start to stop of a document, stop not included."""

    document: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Tokens."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Pieces with a separator between two; with one behind the last where length = sum of sizes + number of pieces."""

    domain: str
    pieces: tuple[Piece, ...]
    length: int


def length_edges(sampling: Sampling) -> tuple[int, ...]:
    """Edges of the strata: stratum k holds edges[k] <= length < edges[k + 1]; narrow ranges have fewer strata."""
    low, ratio = sampling.min_tokens, (sampling.max_tokens + 1) / sampling.min_tokens
    return tuple(dict.fromkeys(round(low * ratio ** (k / STRATA)) for k in range(STRATA + 1)))


def tokens_when_joined(sizes: Sequence[int]) -> int:
    """Tokens of documents with a separator between two."""
    return sum(sizes) + len(sizes) - 1


def windows(domains: Sequence[str], sizes: Sequence[int], sampling: Sampling) -> Iterator[Window]:
    """Windows without end: domains in turn, each token once before any is used again.

    A domain that is used up waits until all are. Where max_tokens < 2 * min_tokens the last tokens of a domain may be
    too few for a window; then they wait for the next round too.

    Args:
        domains: of each document.
        sizes: of each document, in tokens; those of one domain, joined, make one window at least.
        sampling: lengths and seed.
    """
    members = {d: [i for i, domain in enumerate(domains) if domain == d] for d in dict.fromkeys(domains)}
    for round_number in itertools.count():
        running = [_domain_windows(d, members[d], sizes, sampling, round_number) for d in members]
        while running:
            ended = []
            for source in running:
                window = next(source, None)
                if window is None:
                    ended.append(source)
                else:
                    yield window
            running = [source for source in running if source not in ended]


def _domain_windows(
    domain: str, members: Sequence[int], sizes: Sequence[int], sampling: Sampling, round_number: int
) -> Iterator[Window]:
    """One round over a domain: documents in a random order, each window from the first in the queue."""
    # Keyed by the name: another domain more or less does not change how this one is cut.
    key = int.from_bytes(hashlib.sha256(domain.encode("utf-8", "surrogatepass")).digest()[:8], "little")
    rng = np.random.default_rng([sampling.seed, key, round_number])
    queue = deque(_pieces([members[i] for i in rng.permutation(len(members))], sizes, sampling, round_number, rng))
    lengths = _lengths(sampling, rng)
    left = tokens_when_joined([piece.size for piece in queue])
    while left >= sampling.min_tokens:
        length = _fitting(next(lengths), left, sampling)
        before = len(queue)
        taken = _take(queue, length)
        left -= sum(piece.size for piece in taken) + before - len(queue)
        yield Window(domain=domain, pieces=taken, length=length)


def _pieces(
    order: Sequence[int], sizes: Sequence[int], sampling: Sampling, round_number: int, rng: np.random.Generator
) -> Iterator[Piece]:
    """Whole documents; when they are used again, long ones start elsewhere, so that contexts differ."""
    for document in order:
        size = sizes[document]
        if round_number and size >= 2 * sampling.min_tokens:
            cut = int(rng.integers(sampling.min_tokens, size - sampling.min_tokens + 1))
            yield Piece(document=document, start=cut, stop=size)
            yield Piece(document=document, start=0, stop=cut)
        else:
            yield Piece(document=document, start=0, stop=size)


def _lengths(sampling: Sampling, rng: np.random.Generator) -> Iterator[int]:
    """Each stratum once, in a random order, then again; log-uniform within one."""
    edges = length_edges(sampling)
    while True:
        for stratum in rng.permutation(len(edges) - 1):
            low, high = edges[stratum], edges[stratum + 1]
            # The product may round up to `high`, which belongs to the next stratum.
            yield min(int(low * (high / low) ** rng.random()), high - 1)


def _fitting(length: int, left: int, sampling: Sampling) -> int:
    """A length near the one wanted that leaves nothing or one more window, where the range allows it."""
    if left - length - 1 >= sampling.min_tokens:
        return length
    if left <= sampling.max_tokens:
        return left
    shorter = left - sampling.min_tokens - 1
    return shorter if shorter >= sampling.min_tokens else length


def _take(queue: deque[Piece], length: int) -> tuple[Piece, ...]:
    """Pieces for one window; the rest of a document goes to the end, so that the others have their turn first."""
    taken = []
    while length > 0:
        piece = queue.popleft()
        size = min(length, piece.size)
        taken.append(replace(piece, stop=piece.start + size))
        if size < piece.size:
            queue.append(replace(piece, start=piece.start + size))
        length -= size + 1
    return tuple(taken)
