"""Contract of index_select: the float64 oracle, exact ties, padding, poison, and one choice in prefill and decode."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import UnsupportedError
from jaxmoe.ops import index_select as op
from jaxmoe.ops.dispatch import choose
from jaxmoe.ops.index_select import index_select, reference
from jaxmoe.ops.kv_write import kv_write
from jaxmoe.ops.pages import NULL_PAGE, Table, TableSpec, abstract_pages
from tests.ops.paged import LAYER, LAYERS, chunks, dequantized, padded, paging, poisoned, random_table

HEADS, WIDTH = 4, 6

impls = pytest.mark.parametrize("impl", [entry.name for entry in op.IMPLS])
kinds = pytest.mark.parametrize("kind", ["int8", "float32"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a case looks like; `lengths` are tokens in the cache, the newest `chunk` of which are queries."""

    lengths: tuple[int, ...]
    chunk: int = 1
    page_size: int = 4


SHAPES = {
    "decode": Shape(lengths=(1, 3, 4, 5, 0, 40)),
    "chunk": Shape(lengths=(3, 4, 21, 0, 9), chunk=7),
    "page-of-one": Shape(lengths=(1, 2, 0, 9), chunk=2, page_size=1),
    "blocks-decode": Shape(lengths=(255, 256, 257, 17, 600, 0), page_size=16),
    "blocks-chunk": Shape(lengths=(300, 17, 0), chunk=19, page_size=16),
}
shapes = pytest.mark.parametrize("name", SHAPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arguments of the operator, and which slots hold a key."""

    q: np.ndarray
    weights: np.ndarray
    index: Table
    page_table: np.ndarray
    positions: np.ndarray
    written: np.ndarray

    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.weights, self.index, self.page_table, self.positions


@cache
def case_of(name: str, kind: str) -> Case:
    """Random everything; pages in random order; a free page at the end; all unwritten slots zero."""
    shape = SHAPES[name]
    generator = np.random.default_rng(len(name))
    where = paging(shape.lengths, generator, chunk=shape.chunk, page_size=shape.page_size)
    rows = len(shape.lengths)
    return Case(
        q=generator.normal(size=(rows, shape.chunk, HEADS, WIDTH)).astype(np.float32),
        weights=generator.normal(size=(rows, shape.chunk, HEADS)).astype(np.float32),
        index=random_table(generator, where.written, 1, WIDTH, kind),
        page_table=where.page_table,
        positions=where.positions,
        written=where.written,
    )


def of_small_integers(case: Case) -> Case:
    """The case with -1, 0 and 1, so that scores are exact, many of them equal and many exactly 0."""
    generator = np.random.default_rng(11)

    def draw(array: np.ndarray) -> np.ndarray:
        return generator.integers(-1, 1, size=array.shape, endpoint=True).astype(array.dtype)

    data = draw(case.index.data) * case.written[None, :, :, None, None]
    scale = None if case.index.scale is None else np.full_like(case.index.scale, 0.5)
    return replace(
        case,
        q=draw(case.q),
        weights=draw(case.weights),
        index=Table(data=data.astype(case.index.data.dtype), scale=scale),
    )


@partial(jax.jit, static_argnames=("top_k", "impl"))
def run(arguments: tuple[Any, ...], layer: jax.Array, top_k: int, impl: str) -> jax.Array:
    return index_select(*arguments, layer=layer, top_k=top_k, impl=impl)


write = jax.jit(kv_write)


def apply(case: Case, top_k: int, impl: str, **changes: Any) -> np.ndarray:
    """The jitted operator with a traced layer index; skips what the implementation refuses."""
    case = replace(case, **changes)
    try:
        choose("index_select", op.IMPLS, impl, *case.arguments(), layer=LAYER, top_k=top_k)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return np.asarray(run(case.arguments(), np.int32(LAYER), top_k, impl))


def oracle(case: Case, top_k: int) -> np.ndarray:
    where = (case.page_table, case.positions)
    return reference.index_select(case.q, case.weights, dequantized(case.index), *where, top_k=top_k)


@impls
@kinds
@shapes
@pytest.mark.parametrize("top_k", [8, 40])
def test_equals_the_oracle(top_k: int, name: str, kind: str, impl: str) -> None:
    case = case_of(name, kind)
    out = apply(case, top_k, impl)
    assert out.dtype == np.int32
    np.testing.assert_array_equal(out, oracle(case, top_k))


@impls
@kinds
@pytest.mark.parametrize("name", ["chunk", "blocks-decode", "blocks-chunk"])
def test_of_equal_scores_the_lower_position_wins(name: str, kind: str, impl: str) -> None:
    """Exact arithmetic, so that numpy's ties are the operator's, within a block and between blocks."""
    case = of_small_integers(case_of(name, kind))
    expected = oracle(case, 8)
    assert ties_at_the_edge(case, expected) > 0, "the case has no tie that matters"
    np.testing.assert_array_equal(apply(case, 8, impl), expected)


def ties_at_the_edge(case: Case, chosen: np.ndarray) -> int:
    """Queries of which a key that was left has the score of a key that was chosen."""
    count, keys = 0, dequantized(case.index)
    for row, chunk in np.ndindex(case.positions.shape):
        length = int(case.positions[row, chunk]) + 1
        if length > chosen.shape[-1]:
            sequence = reference.cached(keys, case.page_table[row], length)[:, 0]
            of_key = reference.scores(case.q[row, chunk], case.weights[row, chunk], sequence)
            left = np.delete(of_key, chosen[row, chunk])
            count += int(of_key[chosen[row, chunk]].min() == left.max())
    return count


@impls
@pytest.mark.parametrize("weight", [1, -1], ids=["zero", "minus zero"])
def test_when_no_key_matters_the_first_are_chosen(weight: int, impl: str) -> None:
    """All products are negative, so all scores are exactly 0 (or -0, which is equal), over three blocks."""
    case = case_of("blocks-decode", "float32")
    data = np.abs(case.index.data)
    changes = {"q": -np.abs(case.q), "weights": np.full_like(case.weights, weight)}
    out = apply(case, 8, impl, index=Table(data=data, scale=None), **changes)
    np.testing.assert_array_equal(out[:5, 0], [range(8)] * 5)
    np.testing.assert_array_equal(out[5, 0], [-1] * 8)


@impls
def test_a_zero_of_either_sign_is_the_same_score(impl: str) -> None:
    """One head with a negative weight: products of 1, -1 and, underflowing, 0 and -0; only the first scores below 0."""
    case = case_of("decode", "float32")
    row = 5
    products = np.resize([1, -1, 1e-36, -1e-36], 40)
    data = case.index.data.copy()
    for position, product in enumerate(products):
        page, slot = case.page_table[row, position // 4], position % 4
        data[:, page, slot] = 0
        data[:, page, slot, 0, 0] = product
    q, weights = np.zeros_like(case.q), np.zeros_like(case.weights)
    q[..., 0, 0], weights[..., 0] = 1e-10, -1
    out = apply(case, 8, impl, q=q, weights=weights, index=Table(data=data, scale=None))
    expected = [position for position in range(40) if position % 4 != 0][:8]
    np.testing.assert_array_equal(out[row, 0], expected)


def test_top_k_separates_zeros_by_their_sign() -> None:
    """Why the operator makes them one (jax 0.10.2): otherwise a -0 at a lower position would lose."""
    assert jax.lax.top_k(jnp.asarray([-0.0, 0.0], jnp.float32), 1)[1].tolist() == [1]


@impls
@kinds
def test_fewer_keys_than_top_k_are_all_chosen(kind: str, impl: str) -> None:
    for name, top_k in (("chunk", 21), ("decode", 40)):
        case = case_of(name, kind)
        out = apply(case, top_k, impl)
        places = np.arange(top_k)[None, None]
        np.testing.assert_array_equal(out, np.where(places <= case.positions[..., None], places, -1))


@impls
def test_no_more_places_than_the_cache_has_slots(impl: str) -> None:
    case = case_of("chunk", "int8")
    capacity = case.page_table.shape[1] * case.index.page_size
    out = apply(case, capacity + 100, impl)
    assert out.shape[-1] == capacity
    np.testing.assert_array_equal(out, oracle(case, capacity + 100))


@impls
@kinds
@shapes
def test_choices_ascend_before_their_padding_and_are_seen(name: str, kind: str, impl: str) -> None:
    """Laws that attention builds on."""
    case = of_small_integers(case_of(name, kind))
    out = apply(case, 8, impl)
    length = case.positions[..., None] + 1
    count = (out >= 0).sum(axis=-1, keepdims=True)
    np.testing.assert_array_equal(count, np.minimum(length, out.shape[-1]))
    places = np.arange(out.shape[-1])[None, None]
    assert (out[places >= count] == -1).all()
    assert (np.diff(out, axis=-1)[places[..., 1:] < count] > 0).all()
    assert (out < np.maximum(length, 0)).all()


@impls
@kinds
def test_case_129_padded_rows_choose_nothing(kind: str, impl: str) -> None:
    for name in ("chunk", "decode"):
        case = case_of(name, kind)
        assert (apply(case, 8, impl)[case.positions < 0] == -1).all()
        nowhere = np.full_like(case.positions, -1)
        for table in (case.page_table, np.full_like(case.page_table, NULL_PAGE)):
            assert (apply(case, 8, impl, positions=nowhere, page_table=table) == -1).all()


@impls
@kinds
@shapes
def test_case_29_poison_beyond_the_lengths_changes_nothing(name: str, kind: str, impl: str) -> None:
    case = case_of(name, kind)
    out = apply(case, 8, impl, index=poisoned(case.index, ~case.written))
    np.testing.assert_array_equal(out, apply(case, 8, impl))


@impls
@kinds
def test_a_damaged_key_is_chosen_by_those_who_see_it(kind: str, impl: str) -> None:
    """So that attention, which reads the same token, shows the damage; others of the row and other rows do not."""
    case = case_of("chunk", kind)
    where, position = np.zeros_like(case.written), 16
    where[case.page_table[2, position // 4], position % 4] = True
    out, clean = apply(case, 8, impl, index=poisoned(case.index, where)), apply(case, 8, impl)
    sees = (np.arange(len(case.positions))[:, None] == 2) & (case.positions >= position)
    assert 0 < sees[2].sum() < SHAPES["chunk"].chunk
    assert (out[sees] == position).any(axis=-1).all()
    np.testing.assert_array_equal(out[~sees], clean[~sees])


@impls
@kinds
@pytest.mark.parametrize("ties", [False, True], ids=["distinct scores", "ties"])
def test_prefill_and_decode_choose_alike(ties: bool, kind: Any, impl: str) -> None:
    """Written and chosen in chunks of 48, 16 and 1; before that, all slots hold damage."""
    tokens, page_size, top_k = 43, 4, 8
    generator = np.random.default_rng(5)
    page_table = np.concatenate([generator.permutation(np.arange(1, 12)), [0]]).astype(np.int32)
    sizes = ((tokens, HEADS, WIDTH), (tokens, HEADS), (tokens, 1, WIDTH))
    if ties:
        # Largest magnitude 127, so that INT8 keeps the integers: its scale is 1 up to rounding, the same for all.
        q, weights, keys = (generator.integers(-1, 2, size=size).astype(np.float32) for size in sizes)
        keys[..., 0] = 127
        q[..., 0] = 0
    else:
        q, weights, keys = (generator.normal(size=size).astype(np.float32) for size in sizes)
    spec = TableSpec(name="index", layers=LAYERS, heads=1, width=WIDTH, heads_axis="latent")
    abstract = abstract_pages([spec], pages=12, page_size=page_size, dtype=kind)["index"]

    def prefill(bucket: int) -> np.ndarray:
        table = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
        table, out = poisoned(table, np.ones((12, page_size), bool)), []
        for span, padding in chunks(tokens, bucket):
            ids = padded(page_table[span // page_size], padding, 12)
            slots = padded((span % page_size).astype(np.int32), padding)
            table = write(table, padded(keys[span], padding), ids, slots, layer=np.int32(LAYER))
            case = Case(
                q=padded(q[span], padding)[None],
                weights=padded(weights[span], padding)[None],
                index=table,
                page_table=page_table[None],
                positions=padded(span.astype(np.int32), padding, -1)[None],
                written=np.zeros((12, page_size), bool),
            )
            out.append(apply(case, top_k, impl)[0, : len(span)])
        return np.concatenate(out)

    whole = prefill(48)
    for bucket in (16, 1):
        np.testing.assert_array_equal(prefill(bucket), whole)
    if ties:
        scores = [reference.scores(q[t], weights[t], keys[: t + 1, 0]) for t in range(tokens)]
        expected = [sorted(sorted(range(t + 1), key=lambda p, t=t: (-scores[t][p], p))[:top_k]) for t in range(tokens)]
        assert [row[row >= 0].tolist() for row in whole] == expected


@impls
def test_bfloat16_queries_are_widened(impl: str) -> None:
    case = case_of("chunk", "int8")
    case = replace(case, q=case.q.astype(jnp.bfloat16))
    np.testing.assert_array_equal(apply(case, 8, impl), oracle(case, 8))


def test_widths_that_do_not_fit_are_named() -> None:
    case, select = case_of("decode", "float32"), partial(index_select, layer=0, top_k=8)
    wrong = replace(case, index=Table(data=case.index.data[..., :5], scale=None))
    with pytest.raises(ValueError) as error:
        jax.eval_shape(select, *wrong.arguments())
    keys = list(wrong.index.data.shape)
    assert str(error.value).startswith(f"index_select: q {list(case.q.shape)} does not fit keys {keys}")


def test_an_unknown_implementation_is_refused() -> None:
    case, select = case_of("decode", "float32"), partial(index_select, layer=0, top_k=8)
    with pytest.raises(UnsupportedError, match="index_select has no implementation 'cuda'; it has "):
        jax.eval_shape(partial(select, impl="cuda"), *case.arguments())
