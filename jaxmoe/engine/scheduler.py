"""schedule: which sequences run in the next step, and in which shape. A pure function."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jaxmoe.engine.config import EngineConfig
from jaxmoe.engine.request import Sequence
from jaxmoe.nn.step import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a step: `count` new tokens of a sequence, from `sequence.computed` on."""

    sequence: Sequence
    shard: int
    row: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the row ends at the sequence's last token, so that its logits give the next one."""
        return self.count == self.sequence.pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The next step."""

    layout: Layout
    rows: tuple[Row, ...]


def schedule(running: Seq[Sequence], config: EngineConfig, shards: int) -> Decision | None:
    """The next step of the running sequences, None when there are none.

    Prefill comes first, one chunk a device, in order of arrival; then all decode rows together.
    """
    by_shard: list[list[Sequence]] = [[] for _ in range(shards)]
    for sequence in running:
        by_shard[sequence.shard].append(sequence)
    prefill = [next((s for s in group if s.pending > 1), None) for group in by_shard]
    if any(prefill):
        most = max(s.pending for s in prefill if s is not None)
        chunk = next((size for size in config.prefill_tokens if size >= most), config.prefill_tokens[-1])
        rows = tuple(
            Row(sequence=s, shard=shard, row=0, count=min(s.pending, chunk))
            for shard, s in enumerate(prefill)
            if s is not None
        )
        return Decision(layout=Layout(rows=1, chunk=chunk), rows=rows)
    most_rows = max(map(len, by_shard), default=0)
    if most_rows == 0:
        return None
    width = next((size for size in config.decode_rows if size >= most_rows), config.decode_rows[-1])
    rows = tuple(
        Row(sequence=s, shard=shard, row=row, count=1)
        for shard, group in enumerate(by_shard)
        for row, s in enumerate(group[:width])
    )
    return Decision(layout=Layout(rows=width, chunk=1), rows=rows)


def place(sequence: Sequence, available_pages: Seq[int], counts: Seq[int], config: EngineConfig) -> int | None:
    """The device for a waiting sequence: enough pages, a free decode row, the fewest sequences; None when none fits."""
    need = -(-sequence.most_tokens // config.page_size)
    fits = [
        (count, shard)
        for shard, (pages, count) in enumerate(zip(available_pages, counts, strict=True))
        if pages >= need and count < config.decode_rows[-1]
    ]
    return min(fits)[1] if fits else None
