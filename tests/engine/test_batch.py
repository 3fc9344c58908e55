"""build_batch: the arrays of a known case, and every index out of range refused on the host (case 127)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxmoe.engine.batch import RowInput, build_batch
from jaxmoe.engine.config import EngineConfig
from jaxmoe.errors import EngineError
from jaxmoe.nn.step import Layout, StepBatch

CONFIG = EngineConfig(
    page_size=4, pages=9, max_context_tokens=20, decode_rows=(1, 2), prefill_tokens=(8,), kv_cache="int8"
)
PREFILL, DECODE = Layout(rows=1, chunk=8), Layout(rows=2, chunk=1)
VOCAB = 100
ROW = RowInput(shard=0, row=0, token_ids=[11, 12, 13], start=5, pages=[7, 2])


def build(layout: Layout, *rows: RowInput, zero: Any = ((), ())) -> StepBatch:
    return build_batch(layout, rows, zero, config=CONFIG, shards=2, vocab=VOCAB)


def refusal(layout: Layout, *rows: RowInput, zero: Any = ((), ())) -> str:
    with pytest.raises(EngineError) as error:
        build(layout, *rows, zero=zero)
    return str(error.value)


def assert_arrays(batch: StepBatch, **expected: list[Any]) -> None:
    for name, values in expected.items():
        array = getattr(batch, name)
        assert array.dtype == np.int32, name
        assert array.tolist() == values, name


def test_a_prefill_chunk_on_the_second_of_two_devices() -> None:
    batch = build(PREFILL, replace(ROW, shard=1), zero=([], [2]))
    assert_arrays(
        batch,
        token_ids=[0] * 8 + [11, 12, 13, 0, 0, 0, 0, 0],
        positions=[-1] * 8 + [5, 6, 7, -1, -1, -1, -1, -1],
        page_ids=[9] * 8 + [2, 2, 2, 9, 9, 9, 9, 9],
        slots=[0] * 8 + [1, 2, 3, 0, 0, 0, 0, 0],
        page_table=[[0] * 5, [7, 2, 0, 0, 0]],
        zero_pages=[9, 9, 2, 9],
        last_token=[0, 2],
    )


def test_decode_rows_of_two_devices() -> None:
    rows = [
        RowInput(shard=0, row=0, token_ids=[1], start=0, pages=[8]),
        RowInput(shard=0, row=1, token_ids=[2], start=4, pages=[3, 5]),
        RowInput(shard=1, row=1, token_ids=[99], start=19, pages=[1, 2, 3, 4, 5]),
    ]
    assert_arrays(
        build(DECODE, *rows, zero=([8, 5], [5])),
        token_ids=[1, 2, 0, 99],
        positions=[0, 4, -1, 19],
        page_ids=[8, 5, 9, 5],
        slots=[0, 0, 0, 3],
        page_table=[[8, 0, 0, 0, 0], [3, 5, 0, 0, 0], [0] * 5, [1, 2, 3, 4, 5]],
        zero_pages=[8, 5, 5, 9],
        last_token=[0, 1, 0, 1],
    )


def test_a_chunk_over_a_page_boundary() -> None:
    batch = build(PREFILL, replace(ROW, token_ids=[1, 2, 3, 4, 5], start=2, pages=[6, 1]))
    assert batch.page_ids[:5].tolist() == [6, 6, 1, 1, 1]
    assert batch.slots[:5].tolist() == [2, 3, 0, 1, 2]


@pytest.mark.parametrize("layout", CONFIG.layouts(), ids=str)
def test_an_empty_step_is_padding_only(layout: Layout) -> None:
    batch = build(layout)
    assert (batch.positions == -1).all() and (batch.page_ids == CONFIG.pages).all()
    assert (batch.page_table == 0).all() and (batch.zero_pages == CONFIG.pages).all()
    assert (batch.token_ids == 0).all() and (batch.last_token == 0).all()
    assert batch.token_ids.shape == (2 * layout.tokens,) and batch.last_token.shape == (2 * layout.rows,)
    assert batch.page_table.shape == (2 * layout.rows, CONFIG.table_width)


@pytest.mark.parametrize("change", [{"shard": 2}, {"shard": -1}, {"row": 1}, {"row": -1}], ids=str)
def test_case_127_a_row_that_does_not_exist_is_refused(change: dict[str, int]) -> None:
    row = replace(ROW, **change)
    assert refusal(PREFILL, row) == f"row {row.row} of device {row.shard} with 3 tokens does not fit {PREFILL}"


@pytest.mark.parametrize("count", [0, 9])
def test_case_127_a_row_without_tokens_or_with_too_many_is_refused(count: int) -> None:
    message = refusal(PREFILL, replace(ROW, token_ids=[1] * count, start=0, pages=[1, 2, 3]))
    assert message == f"row 0 of device 0 with {count} tokens does not fit {PREFILL}"


@pytest.mark.parametrize(
    ("start", "pages"),
    [(-1, [1, 2]), (6, [1, 2]), (0, []), (18, [1, 2, 3, 4, 5, 6])],
    ids=["-1", "past", "none", "end"],
)
def test_case_127_positions_out_of_range_are_refused(start: int, pages: list[int]) -> None:
    assert refusal(PREFILL, replace(ROW, start=start, pages=pages)) == (
        f"positions {start}..{start + 2} do not fit {len(pages)} pages of 4 and a context of 20"
    )


def test_more_pages_than_a_table_row_has_are_refused() -> None:
    assert refusal(PREFILL, replace(ROW, pages=[1, 2, 3, 4, 5, 6])) == (
        "positions 5..7 do not fit 6 pages of 4 and a context of 20"
    )


@pytest.mark.parametrize("page", [0, -1, 9, 2**40])
def test_case_127_pages_out_of_range_are_refused(page: int) -> None:
    assert refusal(PREFILL, replace(ROW, pages=[7, page])) == f"pages [7, {page}] are not all in 1..8"


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_case_127_token_ids_out_of_range_are_refused(token: int) -> None:
    assert refusal(PREFILL, replace(ROW, token_ids=[1, token])) == f"token ids [1, {token}]... are not all in 0..99"


@pytest.mark.parametrize("zero", [[0], [9], [-1], [1, 2, 3]], ids=str)
def test_case_127_pages_to_zero_out_of_range_are_refused(zero: list[int]) -> None:
    assert refusal(PREFILL, zero=([], zero)) == f"pages {zero} to zero do not fit 2 entries of a pool of 9"


@pytest.mark.parametrize("zero", [(), ([],), ([], [], [1])], ids=str)
def test_lists_of_pages_to_zero_are_one_a_device(zero: Any) -> None:
    assert refusal(PREFILL, zero=zero) == f"{len(zero)} lists of pages to zero for 2 devices"


def test_a_row_given_twice_is_refused() -> None:
    assert refusal(PREFILL, ROW, replace(ROW, pages=[3, 4])) == "row 0 of device 0 is given twice"
