"""Contract of attention, for every implementation and kind of page: the float64 oracle, padding, poison, chunking."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import UnsupportedError
from jaxmoe.ops import attention as op
from jaxmoe.ops.attention import attention, reference
from jaxmoe.ops.dispatch import choose
from jaxmoe.ops.kv_write import kv_write
from jaxmoe.ops.pages import NULL_PAGE, KVPages, abstract_pages
from tests.tolerances import TOLERANCES

LAYERS, LAYER = 2, 1
SCALE = 0.3

impls = pytest.mark.parametrize("impl", [entry.name for entry in op.IMPLS])
kinds = pytest.mark.parametrize("kind", ["int8", "float32"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a case looks like; `lengths` are tokens in the cache, the newest `chunk` of which are queries."""

    lengths: tuple[int, ...]
    chunk: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    page_size: int = 4
    spare_entries: int = 2
    """Page table entries beyond the longest sequence."""

    @property
    def width(self) -> int:
        return -(-max(self.lengths) // self.page_size) + self.spare_entries


SHAPES = {
    "gqa-decode": Shape(lengths=(1, 3, 4, 5, 0, 9)),
    "mha-decode": Shape(lengths=(3, 4, 5), kv_heads=4),
    "mqa-chunk": Shape(lengths=(3, 4, 5, 0, 9), chunk=6, kv_heads=1),
    "page-of-one": Shape(lengths=(1, 2, 0), chunk=2, page_size=1),
    "blocks-decode": Shape(lengths=(255, 256, 257, 15, 16, 17, 600, 0), page_size=16),
    "blocks-chunk": Shape(lengths=(300, 17, 0), chunk=20, page_size=16),
    "page-above-block": Shape(lengths=(299, 300, 301), chunk=3, page_size=300, spare_entries=1),
}
shapes = pytest.mark.parametrize("name", SHAPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arguments of the operator, and which slots hold a key that some query may see."""

    q: np.ndarray
    pages: KVPages
    page_table: np.ndarray
    positions: np.ndarray
    written: np.ndarray
    """[pages, page] bool."""


def case_of(name: str, kind: str) -> Case:
    """Random queries, keys and values; pages in random order; a free page at the end; all unwritten slots zero."""
    shape = SHAPES[name]
    generator = np.random.default_rng(len(name))
    rows = len(shape.lengths)
    needs = [-(-length // shape.page_size) for length in shape.lengths]
    num_pages = 1 + sum(needs) + 1
    order = iter(generator.permutation(np.arange(1, num_pages)).tolist())
    table = np.full((rows, shape.width), NULL_PAGE, np.int32)
    positions = np.full((rows, shape.chunk), -1, np.int32)
    written = np.zeros((num_pages, shape.page_size), bool)
    for row, (length, need) in enumerate(zip(shape.lengths, needs, strict=True)):
        table[row, :need] = [next(order) for _ in range(need)]
        count = min(length, shape.chunk)
        positions[row, :count] = np.arange(length - count, length)
        for position in range(length):
            written[table[row, position // shape.page_size], position % shape.page_size] = True
    data = (LAYERS, num_pages, shape.page_size, shape.kv_heads, shape.head_dim)
    q = generator.normal(size=(rows, shape.chunk, shape.heads, shape.head_dim)).astype(np.float32)
    mask = written[None, :, :, None]
    if kind == "int8":
        k, v = (generator.integers(-127, 128, size=data).astype(np.int8) * mask[..., None] for _ in range(2))
        ks, vs = (generator.uniform(0.005, 0.03, size=data[:-1]).astype(np.float32) * mask for _ in range(2))
        pages = KVPages(k=k, v=v, k_scale=ks, v_scale=vs)
    else:
        k, v = (generator.normal(size=data).astype(kind) * mask[..., None] for _ in range(2))
        pages = KVPages(k=k, v=v, k_scale=None, v_scale=None)
    return Case(q=q, pages=pages, page_table=table, positions=positions, written=written)


@partial(jax.jit, static_argnames="impl")
def run(q: jax.Array, pages: KVPages, table: jax.Array, positions: jax.Array, layer: jax.Array, impl: str) -> jax.Array:
    return attention(q, pages, table, positions, layer=layer, scale=SCALE, impl=impl)


write = jax.jit(kv_write)


def apply(case: Case, impl: str, **changes: Any) -> np.ndarray:
    """The jitted operator with a traced layer index; skips what the implementation refuses."""
    case = replace(case, **changes)
    args = (case.q, case.pages, case.page_table, case.positions)
    try:
        choose("attention", op.IMPLS, impl, *args, layer=np.int32(LAYER), scale=SCALE)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return np.asarray(run(*args, np.int32(LAYER), impl))


def dequantized(data: np.ndarray, scale: np.ndarray | None) -> np.ndarray:
    wide = np.asarray(data[LAYER]).astype(np.float64)
    return wide if scale is None else wide * np.asarray(scale[LAYER]).astype(np.float64)[..., None]


def oracle(case: Case) -> np.ndarray:
    k, v = dequantized(case.pages.k, case.pages.k_scale), dequantized(case.pages.v, case.pages.v_scale)
    return reference.attention(case.q.astype(np.float64), k, v, case.page_table, case.positions, scale=SCALE)


def poisoned(pages: KVPages, where: np.ndarray, parts: Seq[str] = ("k", "v")) -> KVPages:
    """The pages with NaN in the slots `where` [pages, page]: data 127 and scale NaN, or data NaN."""
    assert where.any(), "nothing to poison"

    def fill(array: np.ndarray | None, value: float, part: str) -> np.ndarray | None:
        if array is None or part not in parts:
            return array
        array = array.copy()
        array[:, where] = value
        return array

    data = 127 if pages.quantized else np.nan
    return KVPages(
        k=fill(pages.k, data, "k"),
        v=fill(pages.v, data, "v"),
        k_scale=fill(pages.k_scale, np.nan, "k"),
        v_scale=fill(pages.v_scale, np.nan, "v"),
    )


@impls
@kinds
@shapes
def test_equals_the_oracle_and_padding_gives_zeros(name: str, kind: str, impl: str) -> None:
    case = case_of(name, kind)
    out = apply(case, impl)
    assert out.dtype == np.float32 and out.shape == case.q.shape
    bound = TOLERANCES["attention"].value * np.abs(dequantized(case.pages.v, case.pages.v_scale)).max()
    np.testing.assert_allclose(out, oracle(case), rtol=0, atol=bound)
    assert (out[case.positions < 0] == 0).all()


@impls
@kinds
def test_case_129_fully_padded_rows_give_zeros(kind: str, impl: str) -> None:
    for name in ("mqa-chunk", "gqa-decode"):
        case = case_of(name, kind)
        nowhere = np.full_like(case.positions, -1)
        for table in (case.page_table, np.full_like(case.page_table, NULL_PAGE)):
            assert (apply(case, impl, positions=nowhere, page_table=table) == 0).all()


@impls
@kinds
@shapes
def test_case_29_poison_beyond_the_lengths_changes_nothing(name: str, kind: str, impl: str) -> None:
    case = case_of(name, kind)
    clean = apply(case, impl)
    assert np.isfinite(clean).all()
    out = apply(case, impl, pages=poisoned(case.pages, ~case.written))
    np.testing.assert_array_equal(out, clean)


@impls
@kinds
@pytest.mark.parametrize("part", ["k", "v"])
def test_case_30_poison_in_only_keys_or_values_changes_nothing(part: str, kind: str, impl: str) -> None:
    for name in ("mqa-chunk", "blocks-decode"):
        case = case_of(name, kind)
        out = apply(case, impl, pages=poisoned(case.pages, ~case.written, parts=(part,)))
        np.testing.assert_array_equal(out, apply(case, impl))


@impls
@kinds
@pytest.mark.parametrize("name", ["gqa-decode", "mqa-chunk"])
def test_case_31_the_null_page_does_not_matter(name: str, kind: str, impl: str) -> None:
    case = case_of(name, kind)
    null = np.zeros_like(case.written)
    null[NULL_PAGE] = True
    np.testing.assert_array_equal(apply(case, impl, pages=poisoned(case.pages, null)), apply(case, impl))


@impls
@kinds
def test_other_pages_after_the_end_of_a_table_row_do_not_matter(kind: str, impl: str) -> None:
    case = case_of("gqa-decode", kind)
    used = -(-(case.positions.max(axis=1) + 1) // case.pages.page_size)
    junk = np.random.default_rng(0).integers(1, case.pages.num_pages, case.page_table.shape).astype(np.int32)
    table = np.where(np.arange(junk.shape[1])[None] < used[:, None], case.page_table, junk)
    np.testing.assert_array_equal(apply(case, impl, page_table=table), apply(case, impl))


@impls
@kinds
def test_a_query_does_not_see_later_keys(kind: str, impl: str) -> None:
    case = case_of("mqa-chunk", kind)
    shape, clean = SHAPES["mqa-chunk"], apply(case, impl)
    row, length = 4, shape.lengths[4]
    page, slot = case.page_table[row, (length - 1) // shape.page_size], (length - 1) % shape.page_size
    k, v = case.pages.k.copy(), case.pages.v.copy()
    k[:, page, slot], v[:, page, slot] = 100, 100
    out = apply(case, impl, pages=replace(case.pages, k=k, v=v))
    last = case.positions == length - 1
    last[:row] = False
    assert (out[last] != clean[last]).all()
    np.testing.assert_array_equal(out[~last], clean[~last])


@impls
@kinds
def test_damage_stays_visible_and_in_its_row(kind: str, impl: str) -> None:
    case = case_of("mqa-chunk", kind)
    where = np.zeros_like(case.written)
    where[case.page_table[1, 0], 0] = True
    out, clean = apply(case, impl, pages=poisoned(case.pages, where)), apply(case, impl)
    assert np.isnan(out[1][case.positions[1] >= 0]).all()
    assert (out[1][case.positions[1] < 0] == 0).all()
    np.testing.assert_array_equal(np.delete(out, 1, axis=0), np.delete(clean, 1, axis=0))


@impls
@kinds
def test_chunked_prefill_equals_one_chunk_equals_token_by_token(kind: str, impl: str) -> None:
    tokens, heads, kv_heads, head_dim, page_size = 21, 4, 2, 8, 4
    generator = np.random.default_rng(5)
    q = generator.normal(size=(tokens, heads, head_dim)).astype(np.float32)
    k, v = generator.normal(size=(2, tokens, kv_heads, head_dim)).astype(np.float32)
    table = np.array([5, 2, 6, 1, 4, 3, 0], np.int32)
    abstract = abstract_pages(
        layers=LAYERS, pages=7, page_size=page_size, kv_heads=kv_heads, head_dim=head_dim, dtype=kind
    )

    def prefill(bucket: int) -> np.ndarray:
        """Writes and attends `bucket` tokens at a time; before that, all slots hold damage."""
        pages = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
        pages = poisoned(pages, np.ones((7, page_size), bool))
        out = []
        for start in range(0, tokens, bucket):
            count = min(bucket, tokens - start)
            span, padding = np.arange(start, start + count), bucket - count
            ids = np.pad(table[span // page_size], (0, padding), constant_values=7).astype(np.int32)
            slots = np.pad(span % page_size, (0, padding)).astype(np.int32)
            new_k, new_v = (np.pad(x[span], ((0, padding), (0, 0), (0, 0))) for x in (k, v))
            pages = write(pages, new_k, new_v, ids, slots, layer=np.int32(LAYER))
            case = Case(
                q=np.pad(q[span], ((0, padding), (0, 0), (0, 0)))[None],
                pages=pages,
                page_table=table[None],
                positions=np.pad(span, (0, padding), constant_values=-1).astype(np.int32)[None],
                written=np.zeros((7, page_size), bool),
            )
            out.append(apply(case, impl)[0, :count])
        return np.concatenate(out)

    whole = prefill(24)
    assert np.isfinite(whole).all()
    for bucket in (8, 1):
        np.testing.assert_allclose(prefill(bucket), whole, rtol=0, atol=TOLERANCES["attention"].value * np.abs(v).max())


@impls
@kinds
def test_bfloat16_queries_give_bfloat16(kind: str, impl: str) -> None:
    case = case_of("mqa-chunk", kind)
    case = replace(case, q=case.q.astype(jnp.bfloat16))
    out = apply(case, impl)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(np.float64), oracle(case), rtol=TOLERANCES["bfloat16_ulp"].value, atol=TOLERANCES["attention"].value
    )


@impls
def test_bfloat16_pages(impl: str) -> None:
    case = case_of("mqa-chunk", "bfloat16")
    bound = TOLERANCES["attention"].value * np.abs(case.pages.v.astype(np.float64)).max()
    np.testing.assert_allclose(apply(case, impl), oracle(case), rtol=0, atol=bound)


@impls
def test_large_scores_do_not_overflow(impl: str) -> None:
    case = case_of("blocks-chunk", "float32")
    case = replace(case, q=case.q * np.float32(1e4))
    out = apply(case, impl)
    assert np.isfinite(out).all()
    assert np.abs(out).max() <= np.abs(case.pages.v).max() * (1 + TOLERANCES["attention"].value)


def test_heads_that_do_not_fit_are_named() -> None:
    case, attend = case_of("gqa-decode", "float32"), partial(attention, layer=0, scale=1.0)
    for q in (np.ones((6, 1, 3, 8), np.float32), np.ones((6, 1, 4, 16), np.float32)):
        with pytest.raises(ValueError) as error:
            jax.eval_shape(attend, q, case.pages, case.page_table, case.positions)
        assert str(error.value) == f"attention: q {list(q.shape)} does not fit pages {list(case.pages.k.shape)}"


def test_an_unknown_implementation_is_refused() -> None:
    case, attend = case_of("gqa-decode", "float32"), partial(attention, layer=0, scale=1.0)
    with pytest.raises(UnsupportedError, match="attention has no implementation 'cuda'; it has "):
        jax.eval_shape(partial(attend, impl="cuda"), case.q, case.pages, case.page_table, case.positions)
