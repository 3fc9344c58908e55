"""Contract of latent_attention: absorbed == expanded == selected == float64 oracle, sinks in each, padding, poison."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmoe.errors import UnsupportedError
from jaxmoe.ops import latent_attention as op
from jaxmoe.ops.dispatch import choose
from jaxmoe.ops.kv_write import kv_write
from jaxmoe.ops.latent_attention import choose_form, latent_attention, reference
from jaxmoe.ops.latent_attention.xla import BLOCK_SELECTED, TILE_QUERIES
from jaxmoe.ops.pages import NULL_PAGE, Table, TableSpec, abstract_pages
from tests.ops.paged import LAYER, LAYERS, chunks, dequantized, padded, paging, poisoned, random_table, slot_of
from tests.tolerances import TOLERANCES

SCALE = 0.3
HEADS, NOPE, ROPE, V, LORA = 3, 6, 4, 5, 16

impls = pytest.mark.parametrize("impl", [entry.name for entry in op.IMPLS])
kinds = pytest.mark.parametrize("kind", ["int8", "float32"])
FORMS = ("absorbed", "expanded", "selected")
"""The two forms over all keys, and a selection of all keys."""
forms = pytest.mark.parametrize("form", FORMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a case looks like; `lengths` are tokens in the cache, the newest `chunk` of which are queries."""

    lengths: tuple[int, ...]
    chunk: int = 1
    page_size: int = 4


SHAPES = {
    "decode": Shape(lengths=(1, 3, 4, 5, 0, 9)),
    "chunk": Shape(lengths=(3, 4, 5, 0, 9), chunk=7),
    "page-of-one": Shape(lengths=(1, 2, 0), chunk=2, page_size=1),
    "blocks-decode": Shape(lengths=(255, 256, 257, 17, 600, 0), page_size=16),
    "blocks-chunk": Shape(lengths=(300, 17, 0), chunk=19, page_size=16),
}
shapes = pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decode", "int8"),
        ("chunk", "int8"),
        ("chunk", "float32"),
        ("page-of-one", "float32"),
        ("blocks-decode", "int8"),
        ("blocks-decode", "float32"),
        ("blocks-chunk", "int8"),
    ],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arguments of the operator, and which slots hold a token."""

    q_nope: np.ndarray
    q_rope: np.ndarray
    w_k: np.ndarray
    w_v: np.ndarray
    latent: Table
    rope: Table
    page_table: np.ndarray
    positions: np.ndarray
    written: np.ndarray
    sinks: np.ndarray | None = None
    selected: np.ndarray | None = None

    def arguments(self) -> tuple[Any, ...]:
        return (
            *(self.q_nope, self.q_rope, self.w_k, self.w_v),
            *(self.latent, self.rope, self.page_table, self.positions),
        )


@cache
def case_of(name: str, kind: str, with_sinks: bool = False) -> Case:
    """Random everything; pages in random order; a free page at the end; all unwritten slots zero."""
    shape = SHAPES[name]
    generator = np.random.default_rng(len(name))
    where = paging(shape.lengths, generator, chunk=shape.chunk, page_size=shape.page_size)

    def normal(*size: int) -> np.ndarray:
        return generator.normal(size=size).astype(np.float32)

    rows = len(shape.lengths)
    return Case(
        q_nope=normal(rows, shape.chunk, HEADS, NOPE),
        q_rope=normal(rows, shape.chunk, HEADS, ROPE),
        w_k=normal(HEADS, NOPE, LORA) / 4,
        w_v=normal(HEADS, V, LORA) / 4,
        latent=random_table(generator, where.written, 1, LORA, kind),
        rope=random_table(generator, where.written, 1, ROPE, kind),
        page_table=where.page_table,
        positions=where.positions,
        written=where.written,
        sinks=normal(HEADS) + np.float32(0.5) if with_sinks else None,
    )


def everything(case: Case) -> np.ndarray:
    """The selection of all keys of each query, as wide as the cache has slots."""
    places = np.arange(case.page_table.shape[1] * case.latent.page_size, dtype=np.int32)[None, None]
    return np.where(places <= case.positions[..., None], places, -1).astype(np.int32)


def some(case: Case, most: int) -> np.ndarray:
    """A random selection of at most `most` keys of each query, its own or not."""
    generator = np.random.default_rng(most)
    selected = np.full((*case.positions.shape, most), -1, np.int32)
    for row, chunk in np.ndindex(case.positions.shape):
        length = int(case.positions[row, chunk]) + 1
        chosen = np.sort(generator.permutation(length)[:most])
        selected[row, chunk, : len(chosen)] = chosen
    return selected


@partial(jax.jit, static_argnames=("form", "impl"))
def run(
    arguments: tuple[Any, ...],
    layer: jax.Array,
    sinks: jax.Array | None,
    selected: jax.Array | None,
    form: Any,
    impl: str,
) -> jax.Array:
    options: dict[str, Any] = {"sinks": sinks, "selected": selected, "form": form, "impl": impl}
    return latent_attention(*arguments, layer=layer, scale=SCALE, **options)


write = jax.jit(kv_write)


def apply(case: Case, form: str | None, impl: str, **changes: Any) -> np.ndarray:
    """The jitted operator with a traced layer index; skips what the implementation refuses."""
    case = replace(case, **changes)
    if form == "selected":
        case, form = replace(case, selected=everything(case)), None
    options = {"sinks": case.sinks, "selected": case.selected, "form": form or "absorbed"}
    try:
        choose("latent_attention", op.IMPLS, impl, *case.arguments(), layer=LAYER, scale=SCALE, **options)
    except UnsupportedError as error:
        pytest.skip(str(error))
    return np.asarray(run(case.arguments(), np.int32(LAYER), case.sinks, case.selected, form, impl))


def oracle(case: Case) -> np.ndarray:
    return reference.latent_attention(
        *(case.q_nope, case.q_rope, case.w_k, case.w_v, dequantized(case.latent), dequantized(case.rope)),
        case.page_table,
        case.positions,
        scale=SCALE,
        sinks=None if case.sinks is None else case.sinks.astype(np.float64),
        selected=case.selected,
    )


def bound(case: Case) -> float:
    """Relative to the largest value that any head can have."""
    values = np.einsum("pskl,hvl->pshv", dequantized(case.latent), case.w_v.astype(np.float64))
    return TOLERANCES["latent_attention"].value * np.abs(values).max()


def poison(case: Case, where: np.ndarray) -> dict[str, Table]:
    """Both tables with NaN in these slots, as changes of the case."""
    return {"latent": poisoned(case.latent, where), "rope": poisoned(case.rope, where)}


def assert_oracle(case: Case, form: str, impl: str) -> None:
    """Compares with the oracle, padding included."""
    out = apply(case, form, impl)
    assert out.dtype == np.float32 and out.shape == (*case.positions.shape, HEADS, V)
    np.testing.assert_allclose(out, oracle(case), rtol=0, atol=bound(case))
    assert (out[case.positions < 0] == 0).all()


@impls
@shapes
@forms
def test_every_form_with_sinks_equals_the_oracle(form: str, name: str, kind: str, impl: str) -> None:
    """A sink joins in every form, the dense one for sequences that need no selection included."""
    assert_oracle(case_of(name, kind, True), form, impl)


@impls
@pytest.mark.parametrize(("name", "kind"), [("chunk", "int8"), ("blocks-decode", "float32")])
@forms
def test_every_form_without_sinks_equals_the_oracle(form: str, name: str, kind: str, impl: str) -> None:
    assert_oracle(case_of(name, kind), form, impl)


@impls
@pytest.mark.parametrize(
    ("name", "most", "kind"),
    [
        ("chunk", 4, "int8"),
        ("blocks-decode", 1, "int8"),
        ("blocks-decode", BLOCK_SELECTED + 2, "float32"),
        ("blocks-chunk", 5, "float32"),
        ("blocks-chunk", BLOCK_SELECTED - 1, "int8"),
        ("blocks-chunk", BLOCK_SELECTED, "float32"),
        ("blocks-chunk", 2 * BLOCK_SELECTED + 1, "int8"),
    ],
)
def test_selected_keys_equal_the_oracle_over_them_alone(name: str, most: int, kind: str, impl: str) -> None:
    case = case_of(name, kind, most % 2 == 1)
    assert case.positions.size % TILE_QUERIES, "the last tile is a short one"
    case = replace(case, selected=some(case, most))
    out = apply(case, None, impl)
    np.testing.assert_allclose(out, oracle(case), rtol=0, atol=bound(case))
    assert (out[case.positions < 0] == 0).all()


@impls
@pytest.mark.parametrize("queries", [1, TILE_QUERIES, TILE_QUERIES + 1])
def test_any_number_of_queries_fills_tiles(queries: int, impl: str) -> None:
    """The same rows over and over: each gives what it gives alone, wherever it lies in a tile."""
    case = case_of("decode", "int8", True)
    row = np.arange(queries) % len(case.positions)
    names = ("q_nope", "q_rope", "page_table", "positions")
    many = replace(case, **{name: getattr(case, name)[row] for name in names})
    alone = apply(case, None, impl, selected=some(case, 5))
    out = apply(many, None, impl, selected=some(case, 5)[row])
    np.testing.assert_allclose(out, alone[row], rtol=0, atol=bound(case))
    np.testing.assert_allclose(out, oracle(replace(many, selected=some(case, 5)[row])), rtol=0, atol=bound(case))


@impls
@shapes
def test_a_selection_of_everything_is_no_selection(name: str, kind: str, impl: str) -> None:
    case = case_of(name, kind, True)
    np.testing.assert_allclose(apply(case, "selected", impl), apply(case, "absorbed", impl), rtol=0, atol=bound(case))


@impls
def test_the_padding_of_a_selection_does_not_matter(impl: str) -> None:
    """Bit for bit: a block in which nothing is chosen leaves the sums as they are."""
    case = case_of("blocks-decode", "int8", True)
    selected = some(case, BLOCK_SELECTED)
    longer = np.concatenate([selected, np.full((*selected.shape[:2], BLOCK_SELECTED), -1, np.int32)], axis=2)
    np.testing.assert_array_equal(apply(case, None, impl, selected=longer), apply(case, None, impl, selected=selected))


@impls
@kinds
def test_keys_that_nobody_chose_are_never_read(kind: str, impl: str) -> None:
    case = case_of("blocks-chunk", kind, True)
    selected = some(case, 5)
    where = np.ones_like(case.written)
    for row, chunk in np.ndindex(case.positions.shape):
        for position in selected[row, chunk][selected[row, chunk] >= 0].tolist():
            where[slot_of(case.page_table, row, position, SHAPES["blocks-chunk"].page_size)] = False
    assert where.mean() > 0.4, "most of the cache is poisoned"
    out = apply(case, None, impl, selected=selected, **poison(case, where))
    np.testing.assert_array_equal(out, apply(case, None, impl, selected=selected))


@impls
@kinds
@forms
def test_case_129_fully_padded_rows_give_zeros(form: str, kind: str, impl: str) -> None:
    for name in ("chunk", "blocks-decode"):
        case = case_of(name, kind, True)
        nowhere = np.full_like(case.positions, -1)
        for table in (case.page_table, np.full_like(case.page_table, NULL_PAGE)):
            assert (apply(case, form, impl, positions=nowhere, page_table=table) == 0).all()


@impls
@shapes
@forms
def test_case_29_poison_beyond_the_lengths_changes_nothing(form: str, name: str, kind: str, impl: str) -> None:
    case = case_of(name, kind, True)
    clean = apply(case, form, impl)
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(apply(case, form, impl, **poison(case, ~case.written)), clean)


@impls
@kinds
@forms
@pytest.mark.parametrize("part", ["latent", "rope"])
def test_case_30_poison_in_only_one_table_changes_nothing(part: str, form: str, kind: str, impl: str) -> None:
    case = case_of("chunk", kind, True)
    out = apply(case, form, impl, **{part: poison(case, ~case.written)[part]})
    np.testing.assert_array_equal(out, apply(case, form, impl))


@impls
@kinds
@forms
def test_case_31_the_null_page_does_not_matter(form: str, kind: str, impl: str) -> None:
    case = case_of("chunk", kind, True)
    null = np.zeros_like(case.written)
    null[NULL_PAGE] = True
    np.testing.assert_array_equal(apply(case, form, impl, **poison(case, null)), apply(case, form, impl))


@impls
@kinds
@forms
def test_damage_stays_visible_and_in_its_row(form: str, kind: str, impl: str) -> None:
    case = case_of("chunk", kind, True)
    where = np.zeros_like(case.written)
    where[case.page_table[1, 0], 0] = True
    for part in ("latent", "rope"):
        out = apply(case, form, impl, **{part: poison(case, where)[part]})
        assert np.isnan(out[1][case.positions[1] >= 0]).all()
        assert (out[1][case.positions[1] < 0] == 0).all()
        clean = apply(case, form, impl)
        np.testing.assert_array_equal(np.delete(out, 1, axis=0), np.delete(clean, 1, axis=0))


@impls
@kinds
@forms
def test_other_rows_of_a_step_do_not_matter(form: str, kind: str, impl: str) -> None:
    case = case_of("blocks-decode", kind, True)
    together = apply(case, form, impl)
    for row in (3, 4):
        others = np.arange(len(case.positions)) != row
        positions = np.where(others[:, None], -1, case.positions).astype(np.int32)
        np.testing.assert_array_equal(apply(case, form, impl, positions=positions)[row], together[row])


@impls
@kinds
@forms
def test_a_sink_moves_its_own_head_only(form: str, kind: str, impl: str) -> None:
    case = case_of("chunk", kind, True)
    assert case.sinks is not None
    clean, real = apply(case, form, impl), case.positions >= 0
    for head in range(HEADS):
        sinks = case.sinks.copy()
        sinks[head] += 1
        out = apply(case, form, impl, sinks=sinks)
        assert (out[real][:, head] != clean[real][:, head]).any(axis=-1).all()
        np.testing.assert_array_equal(np.delete(out, head, axis=2), np.delete(clean, head, axis=2))


@impls
@kinds
@forms
def test_a_single_key_shares_with_the_sink(form: str, kind: str, impl: str) -> None:
    """The only key of a sequence takes sigmoid(score - sink)."""
    case = case_of("decode", kind, True)
    assert case.sinks is not None
    slot = slot_of(case.page_table, 0, 0, SHAPES["decode"].page_size)
    content, turned = dequantized(case.latent)[slot][0], dequantized(case.rope)[slot][0]
    score = SCALE * (case.q_nope[0, 0] * (case.w_k @ content)).sum(-1) + SCALE * case.q_rope[0, 0] @ turned
    expected = (case.w_v @ content) / (1 + np.exp(case.sinks - score))[:, None]
    np.testing.assert_allclose(apply(case, form, impl)[0, 0], expected, rtol=0, atol=bound(case))


def cache_of(kind: Any, page_size: int, pages: int) -> dict[str, Table]:
    """An empty cache in which all slots hold damage."""
    widths = {"latent": LORA, "rope": ROPE}
    specs = [
        TableSpec(name=name, layers=LAYERS, heads=1, width=width, heads_axis="latent") for name, width in widths.items()
    ]
    abstract = abstract_pages(specs, pages=pages, page_size=page_size, dtype=kind)
    tables = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
    return {name: poisoned(table, np.ones((pages, page_size), bool)) for name, table in tables.items()}


@impls
@kinds
def test_case_74_prefill_chunks_and_decode_use_one_scale(kind: str, impl: str) -> None:
    """The form is the operator's own choice, expanded for chunks and absorbed for single tokens; then the other one."""
    tokens, page_size = 37, 4
    case = case_of("chunk", kind, True)
    generator = np.random.default_rng(5)
    page_table = np.concatenate([generator.permutation(np.arange(1, 11)), [0]]).astype(np.int32)
    nope, rope = (generator.normal(size=(tokens, HEADS, width)).astype(np.float32) for width in (NOPE, ROPE))
    widths = {"latent": LORA, "rope": ROPE}
    new = {name: generator.normal(size=(tokens, 1, w)).astype(np.float32) for name, w in widths.items()}
    assert [choose_form(bucket, LORA, NOPE, V) for bucket in (40, 16, 1)] == ["expanded", "expanded", "absorbed"]

    def prefill(bucket: int, form: str | None) -> tuple[np.ndarray, Case]:
        tables, out = cache_of(kind, page_size, 11), []
        for span, padding in chunks(tokens, bucket):
            ids = padded(page_table[span // page_size], padding, 11)
            slots = padded((span % page_size).astype(np.int32), padding)
            for name, vectors in new.items():
                tables[name] = write(tables[name], padded(vectors[span], padding), ids, slots, layer=np.int32(LAYER))
            step = replace(
                case,
                q_nope=padded(nope[span], padding)[None],
                q_rope=padded(rope[span], padding)[None],
                page_table=page_table[None],
                positions=padded(span.astype(np.int32), padding, -1)[None],
                **tables,
            )
            out.append(apply(step, form, impl)[0, : len(span)])
        whole = replace(step, q_nope=nope[None], q_rope=rope[None], positions=np.arange(tokens, dtype=np.int32)[None])
        return np.concatenate(out), whole

    others = ((16, None), (40, "absorbed"), (1, "expanded"), (1, "selected"))
    for bucket, form in ((40, None), (1, None), *(others if kind == "int8" else ())):
        out, whole = prefill(bucket, form)
        # Of unwritten slots the oracle must see nothing either.
        clean = {name: jax.tree.map(np.nan_to_num, getattr(whole, name)) for name in ("latent", "rope")}
        whole = replace(whole, **clean)
        np.testing.assert_allclose(out, oracle(whole)[0], rtol=0, atol=bound(whole), err_msg=f"{bucket} {form}")


@impls
@forms
def test_the_scale_is_a_factor_on_both_parts_of_the_scores(form: str, impl: str) -> None:
    case = case_of("chunk", "float32", True)
    twice = jax.jit(partial(latent_attention, layer=LAYER, scale=2 * SCALE, impl=impl), static_argnames="form")
    options = {"selected": jnp.asarray(everything(case))} if form == "selected" else {"form": form}
    doubled = apply(case, form, impl, q_nope=2 * case.q_nope, q_rope=2 * case.q_rope)
    out = np.asarray(twice(*case.arguments(), sinks=case.sinks, **options))
    np.testing.assert_allclose(out, doubled, rtol=0, atol=bound(case))
    assert (np.abs(out - apply(case, form, impl))[case.positions > 0] > 100 * bound(case)).any()


@impls
@forms
def test_bfloat16_queries_give_bfloat16(form: str, impl: str) -> None:
    case = case_of("chunk", "int8", True)
    narrow = {name: getattr(case, name).astype(jnp.bfloat16) for name in ("q_nope", "q_rope", "w_k", "w_v")}
    case = replace(case, **narrow)
    out = apply(case, form, impl)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        out.astype(np.float64), oracle(case), rtol=TOLERANCES["bfloat16_ulp"].value, atol=bound(case)
    )


@impls
@forms
def test_bfloat16_pages(form: str, impl: str) -> None:
    case = case_of("chunk", "bfloat16", True)
    np.testing.assert_allclose(apply(case, form, impl), oracle(case), rtol=0, atol=bound(case))


@impls
@forms
def test_large_scores_do_not_overflow(form: str, impl: str) -> None:
    case = case_of("blocks-decode", "float32", True)
    out = apply(case, form, impl, q_nope=case.q_nope * np.float32(1e4), q_rope=case.q_rope * np.float32(1e4))
    assert np.isfinite(out).all()


def test_the_form_with_fewer_multiplications_is_chosen() -> None:
    """Counted for each key and head: expanded builds a key and a value once, then each query multiplies with both;
    absorbed, each query multiplies with the latent twice. The rotated part costs the same."""
    for lora, nope, v in ((512, 128, 128), (512, 192, 256), (LORA, NOPE, V)):
        for chunk in (1, 2, 8, 64, 157, 158, 170, 171, 172, 2048):
            expanded, absorbed = lora * (nope + v) + chunk * (nope + v), chunk * 2 * lora
            assert choose_form(chunk, lora, nope, v) == ("expanded" if expanded < absorbed else "absorbed")
        assert choose_form(1, lora, nope, v) == "absorbed" and choose_form(2048, lora, nope, v) == "expanded"
    assert choose_form(10**6, 8, 8, 8) == "absorbed", "latents that are as small as the heads are never expanded"


def test_what_does_not_fit_is_named() -> None:
    case = case_of("decode", "float32")
    attend = partial(latent_attention, layer=0, scale=1.0)
    wrong = replace(case, rope=Table(data=case.rope.data[..., :3], scale=None))
    with pytest.raises(ValueError, match=r"q_rope \[6, 1, 3, 4\], .* and rope \[2, 10, 4, 1, 3\] do not fit"):
        jax.eval_shape(attend, *wrong.arguments())
    wrong = replace(case, latent=Table(data=case.latent.data[..., :15], scale=None))
    with pytest.raises(ValueError, match=r"latent \[2, 10, 4, 1, 15\] and rope \[2, 10, 4, 1, 4\] do not fit"):
        jax.eval_shape(attend, *wrong.arguments())


def test_an_expanded_selection_and_an_unknown_implementation_are_refused() -> None:
    case = case_of("decode", "float32")
    attend, selected = partial(latent_attention, layer=0, scale=1.0), jnp.asarray(everything(case))
    with pytest.raises(ValueError, match="latent_attention: selected keys differ by query, so they are never expanded"):
        jax.eval_shape(partial(attend, selected=selected, form="expanded"), *case.arguments())
    with pytest.raises(UnsupportedError, match="latent_attention has no implementation 'cuda'; it has "):
        jax.eval_shape(partial(attend, impl="cuda"), *case.arguments())
