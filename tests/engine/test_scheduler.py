"""schedule and place as pure functions: prefill first, buckets, and who gets a device."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.engine.config import EngineConfig
from jaxmoe.engine.request import SamplingParams, Sequence
from jaxmoe.engine.scheduler import Decision, place, schedule
from jaxmoe.nn.step import Layout

CONFIG = EngineConfig(
    page_size=4, pages=65, max_context_tokens=256, decode_rows=(1, 2, 4), prefill_tokens=(8, 32), kv_cache="int8"
)


def sequence_of(request_id: int, *, shard: int = 0, pending: int = 1, computed: int = 0) -> Sequence:
    return Sequence(
        request_id=request_id,
        tokens=[1] * (computed + pending),
        prompt_length=computed + pending,
        params=SamplingParams(max_tokens=5),
        shard=shard,
        computed=computed,
    )


def shape(decision: Decision | None) -> tuple[Layout, list[tuple[int, int, int, int]]]:
    """The layout, and (request, device, row, tokens) of each row."""
    assert decision is not None
    return decision.layout, [(r.sequence.request_id, r.shard, r.row, r.count) for r in decision.rows]


def test_nothing_runs_without_sequences() -> None:
    assert schedule([], CONFIG, 2) is None


def test_prefill_comes_before_decode_on_all_devices() -> None:
    running = [
        sequence_of(0, computed=9),
        sequence_of(1, shard=1, computed=3),
        sequence_of(2, pending=5),
        sequence_of(3, pending=7),
    ]
    assert shape(schedule(running, CONFIG, 2)) == (Layout(rows=1, chunk=8), [(2, 0, 0, 5)])


def test_one_prefill_a_device_in_order_of_arrival() -> None:
    running = [
        sequence_of(0, shard=1, pending=6),
        sequence_of(1, shard=2, pending=3),
        sequence_of(2, shard=1, pending=2),
        sequence_of(3, shard=0, pending=20),
    ]
    layout, rows = shape(schedule(running, CONFIG, 4))
    assert layout == Layout(rows=1, chunk=32)
    assert rows == [(3, 0, 0, 20), (0, 1, 0, 6), (1, 2, 0, 3)]


def test_the_smallest_chunk_that_holds_the_longest_prefill() -> None:
    for pending, chunk in ((2, 8), (8, 8), (9, 32), (32, 32), (33, 32), (200, 32)):
        decision = schedule([sequence_of(0, pending=pending)], CONFIG, 1)
        assert shape(decision) == (Layout(rows=1, chunk=chunk), [(0, 0, 0, min(pending, chunk))])
        assert decision is not None and decision.rows[0].samples == (pending <= 32)


def test_a_chunk_continues_where_the_last_one_ended() -> None:
    sequence = sequence_of(0, pending=70)
    chunks = []
    while sequence.pending:
        _, rows = shape(schedule([sequence], CONFIG, 1))
        sequence.computed += rows[0][3]
        chunks.append(rows[0][3])
    assert chunks == [32, 32, 6]


def test_a_prompt_of_one_token_is_a_decode_row() -> None:
    assert shape(schedule([sequence_of(0)], CONFIG, 1)) == (Layout(rows=1, chunk=1), [(0, 0, 0, 1)])


def test_the_smallest_row_bucket_that_holds_the_fullest_device() -> None:
    for count, rows in ((1, 1), (2, 2), (3, 4), (4, 4)):
        running = [sequence_of(index, shard=1, computed=3) for index in range(count)]
        running.append(sequence_of(99, shard=0, computed=3))
        layout, placed = shape(schedule(running, CONFIG, 2))
        assert layout == Layout(rows=rows, chunk=1)
        assert placed == [(99, 0, 0, 1), *((index, 1, index, 1) for index in range(count))]


def test_no_more_decode_rows_than_the_largest_bucket() -> None:
    layout, rows = shape(schedule([sequence_of(index, computed=3) for index in range(6)], CONFIG, 1))
    assert layout.rows == 4 and [row[0] for row in rows] == [0, 1, 2, 3]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), max_size=12),
)
def test_every_decision_fits_a_layout_of_the_config(sequences: list[tuple[int, int]]) -> None:
    running = [sequence_of(index, shard=shard, pending=pending) for index, (shard, pending) in enumerate(sequences)]
    before = [replace(sequence) for sequence in running]
    decision = schedule(running, CONFIG, 4)
    assert running == before, "schedule is pure"
    if not running:
        assert decision is None
        return
    layout, rows = shape(decision)
    assert layout in CONFIG.layouts() and rows
    assert len({(shard, row) for _, shard, row, _ in rows}) == len({request for request, *_ in rows}) == len(rows)
    for request, shard, row, count in rows:
        assert running[request].shard == shard and 0 <= row < layout.rows
        assert 1 <= count <= min(layout.chunk, running[request].pending)


def test_place_takes_the_emptiest_device_and_the_first_among_equals() -> None:
    sequence = sequence_of(0, pending=7)
    assert place(sequence, [64, 64, 64], [1, 0, 0], CONFIG) == 1
    assert place(sequence, [64, 64, 64], [2, 1, 3], CONFIG) == 1
    assert place(sequence, [64], [0], CONFIG) == 0


def test_place_needs_pages_for_prompt_and_answer() -> None:
    sequence = sequence_of(0, pending=7)
    assert sequence.most_tokens == 12
    assert place(sequence, [2, 3], [0, 3], CONFIG) == 1
    assert place(sequence, [2, 2], [0, 0], CONFIG) is None
    longer = replace(sequence, prompt_length=8)
    assert place(longer, [3], [0], CONFIG) is None and place(longer, [4], [0], CONFIG) == 0


def test_place_needs_a_free_row() -> None:
    sequence = sequence_of(0, pending=7)
    assert place(sequence, [64, 3], [4, 3], CONFIG) == 1
    assert place(sequence, [64, 64], [4, 4], CONFIG) is None
