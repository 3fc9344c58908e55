"""Contract of kv_write and fill_pages: exactly the named slots change, quantised per token and head."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.ops import kv_write as op
from jaxmoe.ops.kv_write import kv_write
from jaxmoe.ops.linear.reference import quantize_tokens
from jaxmoe.ops.pages import NULL_PAGE, KVDtype, Pages, Table, TableSpec, abstract_pages, fill_pages, pages_bytes

LAYERS, PAGES, PAGE, KV_HEADS, HEAD_DIM = 3, 5, 4, 2, 8
SPECS = (
    TableSpec(name="k", layers=LAYERS, heads=KV_HEADS, width=HEAD_DIM, heads_axis="kv_heads"),
    TableSpec(name="v", layers=LAYERS, heads=KV_HEADS, width=HEAD_DIM, heads_axis="kv_heads"),
    TableSpec(name="index", layers=2, heads=1, width=5, heads_axis="latent"),
)
DTYPES: list[KVDtype] = ["int8", "float32", "bfloat16"]

impls = pytest.mark.parametrize("impl", [entry.name for entry in op.IMPLS])
dtypes = pytest.mark.parametrize("dtype", DTYPES)

write = jax.jit(kv_write, static_argnames="impl")
fill = jax.jit(fill_pages, static_argnums=(2, 3))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_pages(dtype: KVDtype) -> Pages:
    """A pool in which every element is something else than zero."""
    abstract = abstract_pages(SPECS, pages=PAGES, page_size=PAGE, dtype=dtype)
    generator = np.random.default_rng(7)
    return jax.tree.map(lambda leaf: (generator.integers(1, 100, leaf.shape)).astype(leaf.dtype), abstract)


def leaves(table: Table) -> dict[str, np.ndarray]:
    """Data and, when there are any, scales, by name."""
    return {
        name: np.array(array) for name, array in (("data", table.data), ("scale", table.scale)) if array is not None
    }


def oracle(table: Table, values: np.ndarray, page_ids: list[int], slots: list[int], layer: int) -> dict:
    """One token and head at a time."""
    out = leaves(table)
    for token, (page, slot) in enumerate(zip(page_ids, slots, strict=True)):
        if page == PAGES:
            continue
        for head in range(values.shape[1]):
            row = values[token, head]
            if table.quantized:
                q, scale = quantize_tokens(row[None])
                out["data"][layer, page, slot, head] = q[0]
                out["scale"][layer, page, slot, head] = scale[0]
            else:
                out["data"][layer, page, slot, head] = row.astype(out["data"].dtype)
    return out


def assert_table(table: Table, expected: dict[str, np.ndarray]) -> None:
    actual = leaves(table)
    assert set(actual) == set(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


@impls
@dtypes
@pytest.mark.parametrize("source", [np.float32, jnp.bfloat16], ids=["from float32", "from bfloat16"])
def test_named_slots_change_and_nothing_else(dtype: KVDtype, source: type, impl: str) -> None:
    """Two padded tokens among five; every other slot, page, head and layer keeps its bytes, the null page too."""
    page_ids, slots = [3, PAGES, 1, 3, PAGES], [0, 0, 3, 1, 2]
    for name, table in random_pages(dtype).items():
        heads, width = table.data.shape[-2:]
        values = 9 * random(5, heads, width, seed=len(name)).astype(source)
        expected = oracle(table, values.astype(np.float32), page_ids, slots, layer=1)
        out = write(
            table, values, np.array(page_ids, np.int32), np.array(slots, np.int32), layer=np.int32(1), impl=impl
        )
        assert_table(out, expected)
        np.testing.assert_array_equal(leaves(out)["data"][:, NULL_PAGE], leaves(table)["data"][:, NULL_PAGE])


@impls
@dtypes
def test_case_31_a_padded_token_writes_nothing_even_when_it_is_nan(dtype: KVDtype, impl: str) -> None:
    table = random_pages(dtype)["k"]
    values = np.full((3, KV_HEADS, HEAD_DIM), np.nan, np.float32)
    out = write(table, values, np.full(3, PAGES, np.int32), np.zeros(3, np.int32), layer=np.int32(0), impl=impl)
    assert_table(out, leaves(table))


@impls
def test_each_token_and_head_has_its_own_scale(impl: str) -> None:
    """A huge head beside a small one loses nothing of the small one; a zero head gets scale 1."""
    k = random(2, KV_HEADS, HEAD_DIM)
    k[0, 0] *= 1e6
    k[1, 1] = 0
    out = write(
        random_pages("int8")["k"],
        k,
        np.array([2, 2], np.int32),
        np.array([0, 1], np.int32),
        layer=np.int32(2),
        impl=impl,
    )
    scales = np.asarray(out.scale)[2, 2, :2]
    np.testing.assert_array_equal(scales, np.where(k.any(-1), np.abs(k).max(-1) * np.float32(1 / 127), np.float32(1)))
    assert (np.abs(np.asarray(out.data)[2, 2, :2]).max(-1) == [[127, 127], [127, 0]]).all()


@impls
def test_case_130_a_nan_token_is_visible_in_its_scale(impl: str) -> None:
    k = random(2, KV_HEADS, HEAD_DIM)
    k[1, 0, 3] = np.nan
    out = write(
        random_pages("int8")["k"],
        k,
        np.array([2, 2], np.int32),
        np.array([0, 1], np.int32),
        layer=np.int32(0),
        impl=impl,
    )
    np.testing.assert_array_equal(np.isnan(np.asarray(out.scale)[0, 2, :2]), [[False, False], [True, False]])
    assert (np.asarray(out.data)[0, 2, 1, 0] == 0).all()


@impls
def test_donated_pages_are_written_in_place(impl: str) -> None:
    table = jax.tree.map(jnp.asarray, random_pages("int8")["k"])
    pointers = [array.unsafe_buffer_pointer() for array in (table.data, table.scale)]
    step = jax.jit(partial(kv_write, impl=impl), donate_argnums=0)
    out = step(
        table, random(1, KV_HEADS, HEAD_DIM), np.array([1], np.int32), np.array([0], np.int32), layer=np.int32(0)
    )
    assert [array.unsafe_buffer_pointer() for array in (out.data, out.scale)] == pointers


@dtypes
def test_fill_overwrites_whole_pages_in_all_layers_of_all_tables(dtype: KVDtype) -> None:
    pages = random_pages(dtype)
    # An id of num_pages is padding; the same page twice is no harm.
    out = fill(pages, np.array([4, PAGES, 1, PAGES, 4], np.int32), 0, 0.0)
    assert out.keys() == pages.keys()
    for name, table in pages.items():
        expected = leaves(table)
        for array in expected.values():
            array[:, [1, 4]] = 0
        assert_table(out[name], expected)


@dtypes
def test_poison_is_data_and_scale(dtype: KVDtype) -> None:
    poisoned, clean = fill(random_pages(dtype), np.array([2], np.int32), 127, float("nan")), random_pages(dtype)
    for table in clean:
        before = leaves(clean[table])
        for part, array in leaves(poisoned[table]).items():
            if dtype == "int8" and part == "data":
                assert (array[:, 2] == 127).all()
            else:
                assert np.isnan(array[:, 2].astype(np.float32)).all()
            np.testing.assert_array_equal(np.delete(array, 2, axis=1), np.delete(before[part], 2, axis=1))


@dtypes
def test_abstract_pages_state_the_invariants(dtype: KVDtype) -> None:
    pages = abstract_pages(SPECS, pages=PAGES, page_size=PAGE, dtype=dtype)
    assert list(pages) == [spec.name for spec in SPECS]
    for spec in SPECS:
        table = pages[spec.name]
        assert table.data.shape == (spec.layers, PAGES, PAGE, spec.heads, spec.width)
        assert len(spec.axes) == table.data.ndim - 1 and spec.axes[-1] == spec.heads_axis
        assert (table.num_pages, table.page_size, table.quantized) == (PAGES, PAGE, dtype == "int8")
        assert table.data.dtype == jnp.dtype(dtype)
        if table.quantized:
            assert table.scale.shape == table.data.shape[:-1]
            assert table.scale.dtype == jnp.float32
        else:
            assert table.scale is None


@dtypes
def test_bytes_of_abstract_and_real_pools(dtype: KVDtype) -> None:
    abstract, real = abstract_pages(SPECS, pages=PAGES, page_size=PAGE, dtype=dtype), random_pages(dtype)
    assert pages_bytes(abstract) == pages_bytes(real) == sum(array.nbytes for array in jax.tree.leaves(real))
    vector = {"int8": lambda width: width + 4, "float32": lambda width: 4 * width, "bfloat16": lambda width: 2 * width}
    token = LAYERS * 2 * KV_HEADS * vector[dtype](HEAD_DIM) + 2 * vector[dtype](5)
    assert pages_bytes(abstract) == PAGES * PAGE * token
