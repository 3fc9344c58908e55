"""What tasks hand to each other through a folder: complete or not there, whoever writes it, however often."""

import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxmoe.errors import WeightsError
from jaxmoe.ptq import work as module
from jaxmoe.ptq.actions import packed_stats, unpacked_stats
from jaxmoe.ptq.statistics import InputStats
from jaxmoe.ptq.work import WorkFolder

DTYPES = (np.float32, np.float64, np.int8, np.int32, np.int64, np.bool_, ml_dtypes.bfloat16)


def same(one: np.ndarray, other: np.ndarray) -> None:
    assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


arrays = st.dictionaries(
    st.sampled_from(["a", "stats:ffn.in:gram", "treatment:x:rows"]),
    st.sampled_from(DTYPES[:6]).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))),
    min_size=1,
)


@given(kept=arrays)
def test_what_is_saved_is_loaded(kept: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Numbers and empty arrays too, with their shapes."""
    work = WorkFolder(tmp_path_factory.mktemp("work"))
    work.save("layer-00001/plan", kept)
    found = work.load("layer-00001/plan")
    assert set(found) == set(kept)
    for name, array in kept.items():
        same(found[name], array)
        same(work.array("layer-00001/plan", name), array)


def test_all_dtypes_and_views(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "not" / "there")
    table = np.arange(24).reshape(4, 6)
    for dtype in DTYPES:
        work.save("x", {"view": table.astype(dtype)[::2, ::-1], "absent": None})
        assert set(work.load("x")) == {"view"}
        same(work.array("x", "view"), np.asarray(table.astype(dtype)[::2, ::-1], order="C"))


def test_the_last_one_counts_and_readers_keep_what_they_have(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)
    work.save("x", {"a": np.zeros(1000)})
    before = work.array("x", "a")
    work.save("x", {"a": np.ones(1000)})
    assert not before.any() and work.array("x", "a").all()
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_two_at_once(tmp_path: Path) -> None:
    """The same task in two threads: a reader never sees half a file, and no other file is left."""
    work, errors = WorkFolder(tmp_path), []

    def write(value: int) -> None:
        try:
            for _ in range(30):
                work.save("layer/x", {"a": np.full(5000, value)})
                found = work.array("layer/x", "a")
                assert (found == found[0]).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(value,)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and [path.name for path in (tmp_path / "layer").iterdir()] == ["x.safetensors"]


def test_what_is_removed_is_gone(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path)
    work.save("layer-00001/a", {"a": np.ones(2)})
    work.save("layer-00002/a", {"a": np.ones(2)})
    work.remove("layer-00001")
    work.remove("layer-00001")
    message = r"the intermediate results in .*layer-00001/a.safetensors are damaged: cannot be read: No such file"
    with pytest.raises(WeightsError, match=message):
        work.load("layer-00001/a")
    assert work.array("layer-00002/a", "a").tolist() == [1, 1]


def test_damage_is_named(tmp_path: Path) -> None:
    work, path = WorkFolder(tmp_path), tmp_path / "x.safetensors"
    work.save("x", {"a": np.ones(100)})
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(WeightsError, match=f"the intermediate results in {path} are damaged: "):
        work.load("x")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there stays, and no part of what came is left."""
    work = WorkFolder(tmp_path)
    work.save("x", {"a": np.ones(3)})

    def full(*_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "publish", full)
    with pytest.raises(WeightsError, match=r"cannot keep intermediate results in .*x.safetensors: .*No space left"):
        work.save("x", {"a": np.zeros(3)})
    assert work.array("x", "a").all() and len(list(tmp_path.iterdir())) == 1


def stats(rng: np.random.Generator, *, gram: bool) -> InputStats:
    x = rng.normal(size=(7, 5)).astype(np.float32)
    product = x.T @ x if gram else None
    return InputStats(absmax=np.abs(x).max(0), squares=(x**2).sum(0), count=np.int32(7), gram=product)


@pytest.mark.parametrize("gram", [False, True])
def test_statistics_survive(tmp_path: Path, gram: bool) -> None:
    work, rng = WorkFolder(tmp_path), np.random.default_rng(3)
    parts = [stats(rng, gram=gram) for _ in range(3)]
    merged = {"ffn.in": InputStats.merge_all(parts), "attention.in": parts[0].widened()}
    work.save("x", packed_stats(merged) | {"pairs": np.arange(3)})
    found = unpacked_stats(work.load("x"))
    assert set(found) == set(merged)
    for tap, each in merged.items():
        for name, array in each.arrays().items():
            same(np.asarray(getattr(found[tap], name)), array)
        assert int(found[tap].count) in (7, 21) and (found[tap].gram is None) != gram


def test_statistics_add_up() -> None:
    """Sums in float64; the largest; a Gram matrix only if all have one; those of nothing are zero."""
    rng = np.random.default_rng(4)
    rows = [rng.normal(size=(n, 5)).astype(np.float32) for n in (4, 0, 1)]
    parts = [
        InputStats(absmax=np.abs(x).max(0, initial=0), squares=(x**2).sum(0), count=np.int32(len(x)), gram=x.T @ x)
        for x in rows
    ]
    total, x = InputStats.merge_all(parts), np.concatenate(rows).astype(np.float64)
    assert total.squares.dtype == np.float64 and int(total.count) == 5
    np.testing.assert_array_equal(total.absmax, np.abs(x).max(0))
    np.testing.assert_allclose(total.mean_square(), (x**2).mean(0), rtol=1e-6)
    np.testing.assert_allclose(total.mean_gram(), x.T @ x / 5, rtol=0, atol=1e-6)
    assert not parts[1].widened().mean_square().any() and not parts[1].widened().mean_gram().any()
    plain = InputStats(absmax=parts[0].absmax, squares=parts[0].squares, count=parts[0].count)
    assert InputStats.merge_all([parts[0], plain]).gram is None
    with pytest.raises(ValueError, match="no statistics to merge"):
        InputStats.merge_all([])
