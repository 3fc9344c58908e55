"""Calibration samples: windows of tokens, stratified by domain and length, without end and without chance."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from jaxmoe.errors import ConfigError
from jaxmoe.ptq.calib_documents import TokenizedDocument, documents_sha256
from jaxmoe.ptq.calib_windows import Sampling, Window, length_edges, tokens_when_joined, windows

VIRTUAL_SHARDS = 16
"""Sets of samples (by number, in turn) whose statistics are added up apart and then merged in a fixed order: no number
of devices or processes changes a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainCount:
    """What is sampled of a domain."""

    domain: str
    samples: int
    tokens: int
    available_tokens: int
    """In its documents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCount:
    """Samples of low_tokens to high_tokens tokens, both included."""

    low_tokens: int
    high_tokens: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleReport:
    """What was sampled: tokens = fresh_tokens + repeated_tokens + separators = sum over domains = over lengths."""

    samples: int
    tokens: int
    fresh_tokens: int
    """Tokens of the documents, each counted once."""
    repeated_tokens: int
    """Tokens that an earlier sample holds too: the data are too small."""
    repeats: int
    """Samples with such tokens."""
    separators: int
    domains: tuple[DomainCount, ...]
    lengths: tuple[LengthCount, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """Samples number first, first + 1, ... of the sequence that the data and the sampling define.

    tokens[i, j] >= 0 for j < lengths[i], else -1; width = max_tokens; min_tokens <= lengths <= max_tokens;
    fresh_tokens + repeated_tokens <= lengths (the rest are separators).
    """

    tokens: Int32[np.ndarray, "samples width"]
    lengths: Int32[np.ndarray, " samples"]
    domains: tuple[str, ...]
    """Of each sample."""
    fresh_tokens: Int32[np.ndarray, " samples"]
    repeated_tokens: Int32[np.ndarray, " samples"]
    first: int
    sampling: Sampling
    available_tokens: Mapping[str, int]
    """Domain -> tokens of its documents."""
    data_sha256: str
    """Of all documents' domains and tokens."""

    @property
    def report(self) -> SampleReport:
        """Counts by domain and by length, and repetitions."""
        tokens = {domain: self.lengths[[d == domain for d in self.domains]] for domain in self.available_tokens}
        edges = length_edges(self.sampling)
        buckets = [
            (low, high - 1, self.lengths[(self.lengths >= low) & (self.lengths < high)])
            for low, high in itertools.pairwise(edges)
        ]
        total, fresh, repeated = (int(a.sum()) for a in (self.lengths, self.fresh_tokens, self.repeated_tokens))
        return SampleReport(
            samples=len(self.lengths),
            tokens=total,
            fresh_tokens=fresh,
            repeated_tokens=repeated,
            repeats=int((self.repeated_tokens > 0).sum()),
            separators=total - fresh - repeated,
            domains=tuple(
                DomainCount(domain=d, samples=len(n), tokens=int(n.sum()), available_tokens=self.available_tokens[d])
                for d, n in tokens.items()
            ),
            lengths=tuple(
                LengthCount(low_tokens=low, high_tokens=high, samples=len(n), tokens=int(n.sum()))
                for low, high, n in buckets
            ),
        )


def sample_windows(
    documents: Sequence[TokenizedDocument],
    *,
    separator: int,
    samples: int = 512,
    min_tokens: int = 1024,
    max_tokens: int = 4096,
    seed: int = 0,
) -> Calibration:
    """The first samples: domains round robin, the lengths of each spread evenly over the range on a log scale.

    Documents that are shorter than a window are joined within their domain. A domain that is used up drops out of the
    turns; when all are, they start again, cut in other places, and the report counts the repetitions.

    Args:
        documents: in an order that the result depends on.
        separator: token between joined documents: the end of text.
        samples: how many; at least the number of domains.
        min_tokens: length of the shortest window.
        max_tokens: of the longest.
        seed: not negative; another one cuts and orders in another way.

    Raises:
        ConfigError: a number is out of range, there are fewer samples than domains, or a domain holds less than one
            window.
    """
    sampling = Sampling(min_tokens=min_tokens, max_tokens=max_tokens, separator=separator, seed=seed)
    _check(sampling, samples)
    domains = {document.domain for document in documents}
    if not domains:
        raise ConfigError("no calibration documents were given")
    if samples < len(domains):
        raise ConfigError(
            f"{samples} calibration samples leave out some of the {len(domains)} domains "
            f"({', '.join(sorted(domains))}); take at least {len(domains)}"
        )
    return _sample(documents, sampling, first=0, samples=samples)


def next_windows(calibration: Calibration, documents: Sequence[TokenizedDocument], *, samples: int) -> Calibration:
    """The samples after those of a calibration, to go on until every expert has its minimum of tokens.

    Raises:
        ConfigError: the documents are not those of the calibration, or the number is not positive.
    """
    _check(calibration.sampling, samples)
    found = documents_sha256(documents)
    if found != calibration.data_sha256:
        raise ConfigError(
            f"the documents (sha256 {found[:12]}) are not those of the calibration "
            f"({calibration.data_sha256[:12]}); give the same files in the same order"
        )
    first = calibration.first + len(calibration.lengths)
    return _sample(documents, calibration.sampling, first=first, samples=samples)


def joined(calibration: Calibration, more: Calibration) -> Calibration:
    """A calibration and the samples that follow it, as one.

    Raises:
        ConfigError: they do not follow each other.
    """
    end = calibration.first + len(calibration.lengths)
    same = (calibration.sampling, calibration.data_sha256) == (more.sampling, more.data_sha256)
    if more.first != end or not same:
        reason = f"the next is number {end}" if same else "they are of other data or were cut in another way"
        raise ConfigError(f"samples from number {more.first} on do not follow: {reason}; take them from next_windows")
    return Calibration(
        tokens=np.concatenate([calibration.tokens, more.tokens]),
        lengths=np.concatenate([calibration.lengths, more.lengths]),
        domains=calibration.domains + more.domains,
        fresh_tokens=np.concatenate([calibration.fresh_tokens, more.fresh_tokens]),
        repeated_tokens=np.concatenate([calibration.repeated_tokens, more.repeated_tokens]),
        first=calibration.first,
        sampling=calibration.sampling,
        available_tokens=calibration.available_tokens,
        data_sha256=calibration.data_sha256,
    )


def _check(sampling: Sampling, samples: int) -> None:
    if samples < 1:
        raise ConfigError(f"{samples} calibration samples; take at least 1")
    if not 1 <= sampling.min_tokens <= sampling.max_tokens:
        raise ConfigError(
            f"calibration windows of {sampling.min_tokens} to {sampling.max_tokens} tokens; the shortest has at "
            "least 1 and not more than the longest"
        )
    if sampling.separator < 0 or sampling.seed < 0:
        raise ConfigError(
            f"calibration separator {sampling.separator} and seed {sampling.seed}: a negative number is neither"
        )


def _sample(documents: Sequence[TokenizedDocument], sampling: Sampling, *, first: int, samples: int) -> Calibration:
    domains, sizes = [d.domain for d in documents], [len(d.ids) for d in documents]
    available = {d: [size for e, size in zip(domains, sizes, strict=True) if e == d] for d in dict.fromkeys(domains)}
    for domain, own in available.items():
        if tokens_when_joined(own) < sampling.min_tokens:
            raise ConfigError(
                f"calibration domain {domain!r} holds {tokens_when_joined(own)} tokens in {len(own)} documents, a "
                f"window has at least {sampling.min_tokens}; add text or lower the minimum"
            )
    taken = list(itertools.islice(windows(domains, sizes, sampling), first + samples))
    used = [np.zeros(size, np.bool_) for size in sizes]
    fresh = np.asarray([_mark(window, used) for window in taken], np.int32)[first:]
    taken = taken[first:]
    return Calibration(
        tokens=np.stack([_materialise(window, documents, sampling) for window in taken]),
        lengths=np.asarray([window.length for window in taken], np.int32),
        domains=tuple(window.domain for window in taken),
        fresh_tokens=fresh,
        repeated_tokens=np.asarray([sum(p.size for p in w.pieces) for w in taken], np.int32) - fresh,
        first=first,
        sampling=sampling,
        available_tokens={domain: sum(own) for domain, own in available.items()},
        data_sha256=documents_sha256(documents),
    )


def _mark(window: Window, used: Sequence[np.ndarray]) -> int:
    """Marks the tokens of a window as used; how many were not."""
    fresh = 0
    for piece in window.pieces:
        tokens = used[piece.document][piece.start : piece.stop]
        fresh += int((~tokens).sum())
        tokens[:] = True
    return fresh


def _materialise(window: Window, documents: Sequence[TokenizedDocument], sampling: Sampling) -> np.ndarray:
    """[max_tokens] token ids, -1 behind the last."""
    row = np.full(sampling.max_tokens, -1, np.int32)
    # Pieces overwrite separators: there is one wherever no piece is.
    row[: window.length] = sampling.separator
    start = 0
    for piece in window.pieces:
        row[start : start + piece.size] = documents[piece.document].ids[piece.start : piece.stop]
        start += piece.size + 1
    return row
