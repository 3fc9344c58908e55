"""Contract of attention, for every implementation and kind of page: the float64 oracle, windows, sinks, poison."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmoe.errors import UnsupportedError
from jaxmoe.ops import attention as op
from jaxmoe.ops.attention import attention, reference
from jaxmoe.ops.attention.blocks import BLOCK_KEYS, PageBlocks
from jaxmoe.ops.dispatch import choose
from jaxmoe.ops.kv_write import kv_write
from jaxmoe.ops.pages import NULL_PAGE, Table, TableSpec, abstract_pages
from tests.ops.paged import LAYER, LAYERS, chunks, dequantized, padded, paging, poisoned, random_table, slot_of
from tests.tolerances import TOLERANCES

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


SHAPES = {
    "gqa-decode": Shape(lengths=(1, 3, 4, 5, 0, 9)),
    "mha-decode": Shape(lengths=(3, 4, 5), kv_heads=4),
    "mqa-chunk": Shape(lengths=(3, 4, 5, 0, 9), chunk=6, kv_heads=1),
    "page-of-one": Shape(lengths=(1, 2, 0), chunk=2, page_size=1),
    "blocks-decode": Shape(lengths=(255, 256, 257, 15, 16, 17, 600, 0), page_size=16),
    "blocks-chunk": Shape(lengths=(300, 17, 0), chunk=20, page_size=16),
    "blocks-late": Shape(lengths=(530, 600, 0, 790), chunk=3, page_size=16),
    "page-above-block": Shape(lengths=(299, 300, 301), chunk=3, page_size=300, spare_entries=1),
}
shapes = pytest.mark.parametrize("name", SHAPES)
WITH_OPTIONS = ("mqa-chunk", "blocks-decode", "blocks-chunk", "blocks-late", "page-above-block")
"""Shapes that are run with windows and sinks too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arguments of the operator, and which slots hold a key that some query may see."""

    q: np.ndarray
    k: Table
    v: Table
    page_table: np.ndarray
    positions: np.ndarray
    written: np.ndarray
    """[pages, page] bool."""
    window: Any = None
    sinks: np.ndarray | None = None


@cache
def case_of(name: str, kind: str) -> Case:
    """Random queries, keys and values; pages in random order; a free page at the end; all unwritten slots zero."""
    shape = SHAPES[name]
    generator = np.random.default_rng(len(name))
    where = paging(
        shape.lengths, generator, chunk=shape.chunk, page_size=shape.page_size, spare_entries=shape.spare_entries
    )
    q = generator.normal(size=(len(shape.lengths), shape.chunk, shape.heads, shape.head_dim)).astype(np.float32)
    k, v = (random_table(generator, where.written, shape.kv_heads, shape.head_dim, kind) for _ in range(2))
    return Case(q=q, k=k, v=v, page_table=where.page_table, positions=where.positions, written=where.written)


def sinks_of(name: str) -> np.ndarray:
    """A logit a head, of the size of scores."""
    return np.random.default_rng(3).normal(0.5, 1.5, size=SHAPES[name].heads).astype(np.float32)


@partial(jax.jit, static_argnames="impl")
def run(
    q: jax.Array,
    k: Table,
    v: Table,
    table: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    window: jax.Array | None,
    sinks: jax.Array | None,
    impl: str,
) -> jax.Array:
    options: dict[str, Any] = {"layer": layer, "scale": SCALE, "window": window, "sinks": sinks, "impl": impl}
    return attention(q, k, v, table, positions, **options)


write = jax.jit(kv_write)


def apply(case: Case, impl: str, **changes: Any) -> np.ndarray:
    """The jitted operator with traced layer index and window; skips what the implementation refuses."""
    case = replace(case, **changes)
    args = (case.q, case.k, case.v, case.page_table, case.positions)
    window = None if case.window is None else np.int32(case.window)
    try:
        choose("attention", op.IMPLS, impl, *args, layer=LAYER, scale=SCALE, window=window, sinks=case.sinks)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return np.asarray(run(*args, np.int32(LAYER), window, case.sinks, impl))


def oracle(case: Case, **changes: Any) -> np.ndarray:
    case = replace(case, **changes)
    return reference.attention(
        case.q.astype(np.float64),
        dequantized(case.k),
        dequantized(case.v),
        case.page_table,
        case.positions,
        scale=SCALE,
        window=case.window or 0,
        sinks=None if case.sinks is None else case.sinks.astype(np.float64),
    )


def assert_oracle(case: Case, impl: str, **changes: Any) -> np.ndarray:
    """Compares with the oracle, padding included; returns the result."""
    out = apply(case, impl, **changes)
    assert out.dtype == np.float32 and out.shape == case.q.shape
    bound = TOLERANCES["attention"].value * np.abs(dequantized(case.v)).max()
    np.testing.assert_allclose(out, oracle(case, **changes), rtol=0, atol=bound)
    assert (out[case.positions < 0] == 0).all()
    return out


def poison(case: Case, where: np.ndarray) -> dict[str, Table]:
    """Both tables with NaN in these slots, as changes of the case."""
    return {"k": poisoned(case.k, where), "v": poisoned(case.v, where)}


@impls
@kinds
@shapes
def test_equals_the_oracle_and_padding_gives_zeros(name: str, kind: str, impl: str) -> None:
    assert_oracle(case_of(name, kind), impl)


@impls
@kinds
@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_windows_and_sinks_together_equal_the_oracle(name: str, kind: str, impl: str) -> None:
    """One program for all windows: one key, a few, nearly two blocks, more than there are, and all."""
    for window in (1, 3, 2 * BLOCK_KEYS - 1, 5000, 0):
        assert_oracle(case_of(name, kind), impl, window=window, sinks=sinks_of(name))


@impls
@pytest.mark.parametrize(("name", "kind"), [("mqa-chunk", "int8"), ("mqa-chunk", "float32"), ("blocks-late", "int8")])
def test_windows_alone_equal_the_oracle(name: str, kind: str, impl: str) -> None:
    case = case_of(name, kind)
    for window in (1, 3, 260, 0):
        assert_oracle(case, impl, window=window)
    np.testing.assert_array_equal(apply(case, impl, window=5000), apply(case, impl, window=0))


@impls
@pytest.mark.parametrize(("name", "kind"), [("mqa-chunk", "int8"), ("mqa-chunk", "float32"), ("blocks-late", "int8")])
def test_sinks_alone_equal_the_oracle(name: str, kind: str, impl: str) -> None:
    assert_oracle(case_of(name, kind), impl, sinks=sinks_of(name))


@impls
def test_a_window_that_is_no_tracer_means_the_same(impl: str) -> None:
    case = case_of("mqa-chunk", "float32")
    bound = TOLERANCES["attention"].value * np.abs(case.v.data).max()
    for window in (3, 0):
        attend = jax.jit(partial(attention, layer=LAYER, scale=SCALE, window=window, impl=impl))
        out = attend(case.q, case.k, case.v, case.page_table, case.positions)
        np.testing.assert_allclose(out, oracle(case, window=window), rtol=0, atol=bound)


@impls
@kinds
def test_each_layer_of_a_scan_has_its_own_window_and_sinks(kind: str, impl: str) -> None:
    case = case_of("blocks-chunk", kind)
    windows, sinks = np.array([0, 7], np.int32), np.stack([sinks_of("blocks-chunk"), -sinks_of("blocks-chunk")])

    def layers(case_q: jax.Array, k: Table, v: Table) -> jax.Array:
        def body(carry: None, layer: jax.Array) -> tuple[None, jax.Array]:
            options: dict[str, Any] = {"window": jnp.asarray(windows)[layer], "sinks": jnp.asarray(sinks)[layer]}
            table, positions = jnp.asarray(case.page_table), jnp.asarray(case.positions)
            return None, attention(case_q, k, v, table, positions, layer=layer, scale=SCALE, impl=impl, **options)

        return lax.scan(body, None, jnp.arange(LAYERS, dtype=jnp.int32))[1]

    out = np.asarray(jax.jit(layers)(case.q, case.k, case.v))
    for layer in range(LAYERS):
        # The oracle reads layer LAYER: put this one there.
        k, v = (jax.tree.map(partial(np.roll, shift=LAYER - layer, axis=0), table) for table in (case.k, case.v))
        expected = oracle(case, k=k, v=v, window=int(windows[layer]), sinks=sinks[layer])
        bound = TOLERANCES["attention"].value * np.abs(dequantized(v)).max()
        np.testing.assert_allclose(out[layer], expected, rtol=0, atol=bound)
        assert (out[layer][case.positions < 0] == 0).all()


@impls
@kinds
def test_a_single_key_shares_with_the_sink(kind: str, impl: str) -> None:
    """Without a sink the one key takes all; with one it takes sigmoid(score - sink), whether it is the only key of the
    sequence or the only one in the window."""
    case, sinks = case_of("mqa-chunk", kind), sinks_of("mqa-chunk")
    keys, values = dequantized(case.k), dequantized(case.v)
    bound = TOLERANCES["attention"].value * np.abs(values).max()
    for row, chunk, window in ((0, 0, 0), (0, 0, 1), (4, 5, 1)):
        slot = slot_of(case.page_table, row, int(case.positions[row, chunk]), case.k.page_size)
        key, value = keys[slot], values[slot]
        score = SCALE * np.sum(case.q[row, chunk].astype(np.float64) * key, axis=-1)
        share = 1 / (1 + np.exp(sinks.astype(np.float64) - score))
        out = apply(case, impl, sinks=sinks, window=window)[row, chunk]
        np.testing.assert_allclose(out, share[:, None] * value, rtol=0, atol=bound)
        alone = apply(case, impl, window=window)[row, chunk]
        np.testing.assert_allclose(alone, np.broadcast_to(value, alone.shape), rtol=0, atol=bound)


@impls
@kinds
def test_a_sink_moves_its_own_head_only(kind: str, impl: str) -> None:
    case, sinks = case_of("mqa-chunk", kind), sinks_of("mqa-chunk")
    clean = apply(case, impl, sinks=sinks)
    for head in range(len(sinks)):
        out = apply(case, impl, sinks=np.where(np.arange(len(sinks)) == head, sinks + 1, sinks).astype(np.float32))
        real = case.positions >= 0
        assert (out[real][:, head] != clean[real][:, head]).any(axis=-1).all()
        np.testing.assert_array_equal(np.delete(out, head, axis=2), np.delete(clean, head, axis=2))


@impls
@kinds
def test_sinks_far_below_and_far_above_the_scores(kind: str, impl: str) -> None:
    """Far below: as without, bit for bit but for the order of rounding. Far above: nothing is left, and no NaN."""
    case = case_of("blocks-decode", kind)
    low, high = (np.full(SHAPES["blocks-decode"].heads, sink, np.float32) for sink in (-1e9, 1e9))
    bound = TOLERANCES["attention"].value * np.abs(dequantized(case.v)).max()
    np.testing.assert_allclose(apply(case, impl, sinks=low), apply(case, impl), rtol=0, atol=bound)
    assert (apply(case, impl, sinks=high) == 0).all()


@impls
@kinds
def test_case_129_fully_padded_rows_give_zeros(kind: str, impl: str) -> None:
    window, sinks = {"window": 3}, {"sinks": sinks_of("mqa-chunk")}
    for name, changes in (("gqa-decode", {}), *(("mqa-chunk", c) for c in ({}, window, sinks, {**window, **sinks}))):
        case = replace(case_of(name, kind), **changes)
        nowhere = np.full_like(case.positions, -1)
        for table in (case.page_table, np.full_like(case.page_table, NULL_PAGE)):
            assert (apply(case, impl, positions=nowhere, page_table=table) == 0).all()


@impls
@kinds
@shapes
def test_case_29_poison_beyond_the_lengths_changes_nothing(name: str, kind: str, impl: str) -> None:
    case = case_of(name, kind)
    for changes in ({}, {"window": 3, "sinks": sinks_of(name)}) if name in WITH_OPTIONS else ({},):
        clean = apply(case, impl, **changes)
        assert np.isfinite(clean).all()
        out = apply(case, impl, **poison(case, ~case.written), **changes)
        np.testing.assert_array_equal(out, clean)


@impls
@kinds
@pytest.mark.parametrize("window", [1, 20, 300])
@pytest.mark.parametrize("name", ["mqa-chunk", "blocks-decode", "blocks-late"])
def test_case_29_poison_before_the_windows_changes_nothing(name: str, window: int, kind: str, impl: str) -> None:
    """A page that the windows of all queries have left behind may be given away."""
    case, shape = case_of(name, kind), SHAPES[name]
    where = ~case.written
    for row, length in enumerate(shape.lengths):
        for position in range(max(0, length - shape.chunk + 1 - window)):
            where[slot_of(case.page_table, row, position, shape.page_size)] = True
    out = apply(case, impl, **poison(case, where), window=window, sinks=sinks_of(name))
    np.testing.assert_array_equal(out, apply(case, impl, window=window, sinks=sinks_of(name)))


@impls
@kinds
@pytest.mark.parametrize("part", ["k", "v"])
def test_case_30_poison_in_only_keys_or_values_changes_nothing(part: str, kind: str, impl: str) -> None:
    for name in ("mqa-chunk", "blocks-decode"):
        case = case_of(name, kind)
        out = apply(case, impl, **{part: poison(case, ~case.written)[part]})
        np.testing.assert_array_equal(out, apply(case, impl))


@impls
@kinds
@pytest.mark.parametrize("name", ["gqa-decode", "mqa-chunk"])
def test_case_31_the_null_page_does_not_matter(name: str, kind: str, impl: str) -> None:
    case = case_of(name, kind)
    null = np.zeros_like(case.written)
    null[NULL_PAGE] = True
    np.testing.assert_array_equal(apply(case, impl, **poison(case, null)), apply(case, impl))


@impls
@kinds
def test_other_pages_after_the_end_of_a_table_row_do_not_matter(kind: str, impl: str) -> None:
    case = case_of("gqa-decode", kind)
    used = -(-(case.positions.max(axis=1) + 1) // case.k.page_size)
    junk = np.random.default_rng(0).integers(1, case.k.num_pages, case.page_table.shape).astype(np.int32)
    table = np.where(np.arange(junk.shape[1])[None] < used[:, None], case.page_table, junk)
    np.testing.assert_array_equal(apply(case, impl, page_table=table), apply(case, impl))


@impls
@kinds
def test_other_rows_of_a_step_do_not_matter(kind: str, impl: str) -> None:
    """Bit for bit, although the others decide which blocks the loop runs over."""
    name = "blocks-late"
    case, sinks = case_of(name, kind), sinks_of(name)
    for changes in ({}, {"window": 30}, {"window": 30, "sinks": sinks}):
        together = apply(case, impl, **changes)
        for row in range(len(case.positions)):
            others = np.arange(len(case.positions)) != row
            alone = apply(case, impl, positions=np.where(others[:, None], -1, case.positions), **changes)
            np.testing.assert_array_equal(alone[row], together[row])


@impls
@kinds
def test_a_query_does_not_see_later_keys(kind: str, impl: str) -> None:
    case = case_of("mqa-chunk", kind)
    shape, clean = SHAPES["mqa-chunk"], apply(case, impl)
    row, length = 4, shape.lengths[4]
    page, slot = slot_of(case.page_table, row, length - 1, shape.page_size)
    k, v = case.k.data.copy(), case.v.data.copy()
    k[:, page, slot], v[:, page, slot] = 100, 100
    out = apply(case, impl, k=Table(data=k, scale=case.k.scale), v=Table(data=v, scale=case.v.scale))
    last = case.positions == length - 1
    last[:row] = False
    assert (out[last] != clean[last]).all()
    np.testing.assert_array_equal(out[~last], clean[~last])


@impls
@kinds
def test_damage_stays_visible_and_in_its_row(kind: str, impl: str) -> None:
    for changes in ({}, {"sinks": sinks_of("mqa-chunk")}):
        case = case_of("mqa-chunk", kind)
        where = np.zeros_like(case.written)
        where[case.page_table[1, 0], 0] = True
        out, clean = apply(case, impl, **poison(case, where), **changes), apply(case, impl, **changes)
        assert np.isnan(out[1][case.positions[1] >= 0]).all()
        assert (out[1][case.positions[1] < 0] == 0).all()
        np.testing.assert_array_equal(np.delete(out, 1, axis=0), np.delete(clean, 1, axis=0))


@impls
@pytest.mark.parametrize(("options", "kind"), [("plain", "int8"), ("plain", "float32"), ("window and sinks", "int8")])
def test_chunked_prefill_equals_one_chunk_equals_token_by_token(options: str, kind: Any, impl: str) -> None:
    tokens, heads, kv_heads, head_dim, page_size = 21, 4, 2, 8, 4
    generator = np.random.default_rng(5)
    q = generator.normal(size=(tokens, heads, head_dim)).astype(np.float32)
    k, v = generator.normal(size=(2, tokens, kv_heads, head_dim)).astype(np.float32)
    changes = {} if options == "plain" else {"window": 6, "sinks": sinks_of("mqa-chunk")}
    page_table = np.array([5, 2, 6, 1, 4, 3, 0], np.int32)
    specs = [
        TableSpec(name=name, layers=LAYERS, heads=kv_heads, width=head_dim, heads_axis="kv_heads") for name in "kv"
    ]
    abstract = abstract_pages(specs, pages=7, page_size=page_size, dtype=kind)

    def prefill(bucket: int) -> np.ndarray:
        """Writes and attends `bucket` tokens at a time; before that, all slots hold damage."""
        pages = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
        pages = {name: poisoned(table, np.ones((7, page_size), bool)) for name, table in pages.items()}
        out = []
        for span, padding in chunks(tokens, bucket):
            ids = padded(page_table[span // page_size], padding, 7)
            slots = padded((span % page_size).astype(np.int32), padding)
            for name, new in (("k", k), ("v", v)):
                pages[name] = write(pages[name], padded(new[span], padding), ids, slots, layer=np.int32(LAYER))
            case = Case(
                q=padded(q[span], padding)[None],
                k=pages["k"],
                v=pages["v"],
                page_table=page_table[None],
                positions=padded(span.astype(np.int32), padding, -1)[None],
                written=np.zeros((7, page_size), bool),
            )
            out.append(apply(case, impl, **changes)[0, : len(span)])
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
    for changes in ({},) if kind == "float32" else ({}, {"window": 3, "sinks": sinks_of("mqa-chunk")}):
        out = apply(case, impl, **changes)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            out.astype(np.float64),
            oracle(case, **changes),
            rtol=TOLERANCES["bfloat16_ulp"].value,
            atol=TOLERANCES["attention"].value,
        )


@impls
def test_bfloat16_pages(impl: str) -> None:
    case = case_of("mqa-chunk", "bfloat16")
    bound = TOLERANCES["attention"].value * np.abs(case.v.data.astype(np.float64)).max()
    np.testing.assert_allclose(apply(case, impl), oracle(case), rtol=0, atol=bound)


@impls
def test_large_scores_do_not_overflow(impl: str) -> None:
    case = case_of("blocks-chunk", "float32")
    case = replace(case, q=case.q * np.float32(1e4))
    for changes in ({}, {"window": 300, "sinks": sinks_of("blocks-chunk")}):
        out = apply(case, impl, **changes)
        assert np.isfinite(out).all()
        assert np.abs(out).max() <= np.abs(case.v.data).max() * (1 + TOLERANCES["attention"].value)


@pytest.mark.parametrize(
    ("page_size", "window", "expected"),
    [
        (16, None, (0, 4)),
        (16, 0, (0, 4)),
        (16, 1, (2, 4)),
        (16, 16, (2, 4)),
        (16, 17, (1, 4)),
        (16, 272, (1, 4)),
        (16, 273, (0, 4)),
        (16, 5000, (0, 4)),
        (300, 1, (1, 3)),
    ],
)
def test_blocks_that_no_window_reaches_are_skipped(page_size: int, window: int | None, expected: tuple) -> None:
    """The earliest query is at 527, the last key at 789; a block holds 16 pages of 16 keys, or one of 300."""
    positions = np.array([[527, 528, -1], [787, 788, 789], [-1, -1, -1]], np.int32)
    table = np.zeros((3, 60 if page_size == 16 else 4), np.int32)
    blocks = PageBlocks(jnp.asarray(table), jnp.asarray(positions), page_size, window)
    assert (int(blocks.start), int(blocks.stop)) == expected
    assert blocks.keys == (BLOCK_KEYS if page_size == 16 else 300)


@pytest.mark.parametrize("window", [None, 5])
def test_no_block_is_read_for_padding(window: int | None) -> None:
    table, positions = jnp.zeros((2, 4), jnp.int32), jnp.full((2, 3), -1, jnp.int32)
    blocks = PageBlocks(table, positions, 16, window)
    assert (int(blocks.start), int(blocks.stop)) == (0, 0)


def test_heads_that_do_not_fit_are_named() -> None:
    case, attend = case_of("gqa-decode", "float32"), partial(attention, layer=0, scale=1.0)
    for q in (np.ones((6, 1, 3, 8), np.float32), np.ones((6, 1, 4, 16), np.float32)):
        with pytest.raises(ValueError) as error:
            jax.eval_shape(attend, q, case.k, case.v, case.page_table, case.positions)
        assert str(error.value) == f"attention: q {list(q.shape)} does not fit keys {list(case.k.data.shape)}"


def test_values_that_do_not_fit_are_named() -> None:
    case, attend = case_of("gqa-decode", "float32"), partial(attention, layer=0, scale=1.0)
    v = Table(data=case.v.data[:, :-1], scale=None)
    with pytest.raises(ValueError, match=r"attention: values \[2, 9, 4, 2, 8\] do not fit keys \[2, 10, 4, 2, 8\]"):
        jax.eval_shape(attend, case.q, case.k, v, case.page_table, case.positions)


def test_an_unknown_implementation_is_refused() -> None:
    case, attend = case_of("gqa-decode", "float32"), partial(attention, layer=0, scale=1.0)
    with pytest.raises(UnsupportedError, match="attention has no implementation 'cuda'; it has "):
        jax.eval_shape(partial(attend, impl="cuda"), case.q, case.k, case.v, case.page_table, case.positions)
