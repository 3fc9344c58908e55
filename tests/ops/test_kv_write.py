"""Contract of kv_write and fill_pages: exactly the named slots change, quantised per token and head."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.ops import kv_write as op
from jaxmoe.ops.kv_write import kv_write
from jaxmoe.ops.linear.reference import quantize_tokens
from jaxmoe.ops.pages import NULL_PAGE, KVDtype, KVPages, abstract_pages, fill_pages

LAYERS, PAGES, PAGE, KV_HEADS, HEAD_DIM = 3, 5, 4, 2, 8
DTYPES: list[KVDtype] = ["int8", "float32", "bfloat16"]

impls = pytest.mark.parametrize("impl", [entry.name for entry in op.IMPLS])
dtypes = pytest.mark.parametrize("dtype", DTYPES)

write = jax.jit(kv_write, static_argnames="impl")
fill = jax.jit(fill_pages, static_argnums=(2, 3))


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def random_pages(dtype: KVDtype) -> KVPages:
    """A pool in which every element is something else than zero."""
    spec = abstract_pages(layers=LAYERS, pages=PAGES, page_size=PAGE, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    generator = np.random.default_rng(7)
    return jax.tree.map(lambda leaf: (generator.integers(1, 100, leaf.shape)).astype(leaf.dtype), spec)


def leaves(pages: KVPages) -> dict[str, np.ndarray]:
    """Data and, when there are any, scales, by name."""
    return {
        name: np.array(getattr(pages, name)) for name in ("k", "v", "k_scale", "v_scale") if pages_have(pages, name)
    }


def pages_have(pages: KVPages, name: str) -> bool:
    return getattr(pages, name) is not None


def oracle(pages: KVPages, k: np.ndarray, v: np.ndarray, page_ids: list[int], slots: list[int], layer: int) -> dict:
    """One token and head at a time."""
    out = leaves(pages)
    for name, rows in (("k", k), ("v", v)):
        for token, (page, slot) in enumerate(zip(page_ids, slots, strict=True)):
            if page == PAGES:
                continue
            for head in range(KV_HEADS):
                row = rows[token, head]
                if pages.quantized:
                    q, scale = quantize_tokens(row[None])
                    out[name][layer, page, slot, head] = q[0]
                    out[f"{name}_scale"][layer, page, slot, head] = scale[0]
                else:
                    out[name][layer, page, slot, head] = row.astype(out[name].dtype)
    return out


def assert_pages(pages: KVPages, expected: dict[str, np.ndarray]) -> None:
    actual = leaves(pages)
    assert set(actual) == set(expected)
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        np.testing.assert_array_equal(actual[name], array, err_msg=name)


@impls
@dtypes
@pytest.mark.parametrize("source", [np.float32, jnp.bfloat16], ids=["from float32", "from bfloat16"])
def test_named_slots_change_and_nothing_else(dtype: KVDtype, source: type, impl: str) -> None:
    """Two padded tokens among five; every other slot, page, head and layer keeps its bytes, the null page too."""
    k = random(5, KV_HEADS, HEAD_DIM).astype(source)
    v = 9 * random(5, KV_HEADS, HEAD_DIM, seed=1).astype(source)
    page_ids, slots = [3, PAGES, 1, 3, PAGES], [0, 0, 3, 1, 2]
    pages = random_pages(dtype)
    expected = oracle(pages, k.astype(np.float32), v.astype(np.float32), page_ids, slots, layer=1)
    out = write(pages, k, v, np.int32(page_ids), np.int32(slots), layer=np.int32(1), impl=impl)
    assert_pages(out, expected)
    np.testing.assert_array_equal(leaves(out)["k"][:, NULL_PAGE], leaves(pages)["k"][:, NULL_PAGE])


@impls
@dtypes
def test_case_31_a_padded_token_writes_nothing_even_when_it_is_nan(dtype: KVDtype, impl: str) -> None:
    pages = random_pages(dtype)
    k = np.full((3, KV_HEADS, HEAD_DIM), np.nan, np.float32)
    out = write(pages, k, k, np.full(3, PAGES, np.int32), np.zeros(3, np.int32), layer=np.int32(0), impl=impl)
    assert_pages(out, leaves(pages))


@impls
def test_each_token_and_head_has_its_own_scale(impl: str) -> None:
    """A huge head beside a small one loses nothing of the small one; a zero head gets scale 1."""
    k = random(2, KV_HEADS, HEAD_DIM)
    k[0, 0] *= 1e6
    k[1, 1] = 0
    out = write(random_pages("int8"), k, k, np.int32([2, 2]), np.int32([0, 1]), layer=np.int32(2), impl=impl)
    scales = np.asarray(out.k_scale)[2, 2, :2]
    np.testing.assert_array_equal(scales, np.where(k.any(-1), np.abs(k).max(-1) * np.float32(1 / 127), np.float32(1)))
    assert (np.abs(np.asarray(out.k)[2, 2, :2]).max(-1) == [[127, 127], [127, 0]]).all()


@impls
def test_case_130_a_nan_token_is_visible_in_its_scale(impl: str) -> None:
    k = random(2, KV_HEADS, HEAD_DIM)
    k[1, 0, 3] = np.nan
    out = write(random_pages("int8"), k, k, np.int32([2, 2]), np.int32([0, 1]), layer=np.int32(0), impl=impl)
    np.testing.assert_array_equal(np.isnan(np.asarray(out.k_scale)[0, 2, :2]), [[False, False], [True, False]])
    assert (np.asarray(out.k)[0, 2, 1, 0] == 0).all()


@impls
def test_donated_pages_are_written_in_place(impl: str) -> None:
    pages = jax.tree.map(jnp.asarray, random_pages("int8"))
    pointer = pages.k.unsafe_buffer_pointer()
    step = jax.jit(partial(kv_write, impl=impl), donate_argnums=0)
    k = random(1, KV_HEADS, HEAD_DIM)
    out = step(pages, k, k, np.int32([1]), np.int32([0]), layer=np.int32(0))
    assert out.k.unsafe_buffer_pointer() == pointer


@dtypes
def test_fill_overwrites_whole_pages_in_all_layers(dtype: KVDtype) -> None:
    pages = random_pages(dtype)
    expected = leaves(pages)
    for name, array in expected.items():
        array[:, [1, 4]] = 0 if "scale" not in name else 0.0
    # An id of num_pages is padding; the same page twice is no harm.
    assert_pages(fill(pages, np.int32([4, PAGES, 1, PAGES, 4]), 0, 0.0), expected)


@dtypes
def test_poison_is_data_and_scale(dtype: KVDtype) -> None:
    out = leaves(fill(random_pages(dtype), np.int32([2]), 127, float("nan")))
    clean = leaves(random_pages(dtype))
    for name, array in out.items():
        if dtype == "int8" and "scale" not in name:
            assert (array[:, 2] == 127).all()
        else:
            assert np.isnan(array[:, 2].astype(np.float32)).all()
        np.testing.assert_array_equal(np.delete(array, 2, axis=1), np.delete(clean[name], 2, axis=1))


@dtypes
def test_abstract_pages_state_the_invariants(dtype: KVDtype) -> None:
    pages = random_pages(dtype)
    assert pages.k.shape == pages.v.shape == (LAYERS, PAGES, PAGE, KV_HEADS, HEAD_DIM)
    assert (pages.num_pages, pages.page_size, pages.quantized) == (PAGES, PAGE, dtype == "int8")
    assert pages.k.dtype == jnp.dtype(dtype)
    if pages.quantized:
        assert pages.k_scale.shape == pages.v_scale.shape == pages.k.shape[:-1]
        assert pages.k_scale.dtype == jnp.float32
    else:
        assert pages.k_scale is None and pages.v_scale is None
