"""Shards that are filled in place: any order, any writer, twice or not at all, and then published."""

import json
import shutil
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.errors import WeightsError
from jaxmoe.weights import shards as module
from jaxmoe.weights.layout import (
    MODEL_INDEX,
    TensorSpec,
    index_text,
    model_shard,
    plan_shards,
    write_at,
    write_text_atomic,
)
from jaxmoe.weights.safetensors import open_checkpoint
from jaxmoe.weights.shards import ShardFiles
from jaxmoe.weights.writer import CheckpointWriter

DTYPES = (np.float32, np.int8, ml_dtypes.bfloat16, np.int64)
ARRAYS = {
    f"t{index}": (np.arange(rows * columns) % 97).reshape(rows, columns).astype(DTYPES[index % 4])
    for index, (rows, columns) in enumerate([(3, 5), (1, 1), (8, 16), (2, 7), (5, 3), (4, 4)])
} | {"number": np.float32(3), "empty": np.zeros((0, 4), np.float32)}
SPECS = [TensorSpec(name=name, dtype=array.dtype, shape=array.shape) for name, array in ARRAYS.items()]
PLANS = plan_shards(SPECS, max_shard_bytes=200, metadata={"format": "pt"})


def shards_in(folder: Path) -> ShardFiles:
    return ShardFiles(folder, SPECS, PLANS, MODEL_INDEX)


def fill(shards: ShardFiles) -> None:
    for name, array in ARRAYS.items():
        shards.write(name, np.asarray(array))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The same checkpoint by the writer that takes one tensor after the other."""
    folder = tmp_path_factory.mktemp("expected") / "x"
    with CheckpointWriter(folder, SPECS, max_shard_bytes=200, metadata={"format": "pt"}) as writer:
        for name, array in ARRAYS.items():
            writer.write(name, np.asarray(array))
    return files_of(folder)


def test_shards_are_those_of_the_other_writer(tmp_path: Path, expected: dict[str, bytes]) -> None:
    shards = shards_in(tmp_path)
    assert len(PLANS) > 2 and not shards.are_there
    shards.create()
    assert shards.are_there
    assert {path.name for path in tmp_path.iterdir()} == {f"{plan.file_name}.tmp" for plan in PLANS}
    fill(shards)
    shards.make_durable(ARRAYS)
    shards.publish()
    assert files_of(tmp_path) == expected and shards.are_there
    checkpoint = open_checkpoint(tmp_path)
    for name, array in ARRAYS.items():
        assert checkpoint.read(name).tobytes() == np.asarray(array).tobytes()


@given(
    order=st.permutations([(name, row) for name, array in ARRAYS.items() if array.ndim for row in range(len(array))]),
    again=st.integers(0, 30),
)
def test_rows_in_any_order_and_some_twice(
    order: list[tuple[str, int]], again: int, expected: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    shards = shards_in(folder)
    shards.create()
    shards.write("number", np.asarray(ARRAYS["number"]))
    for name, row in [*order, *order[:again]]:
        shards.write_rows(name, row, ARRAYS[name][row : row + 1])
    shards.publish()
    assert files_of(folder) == expected
    shutil.rmtree(folder)


def test_several_writers_at_once(tmp_path: Path, expected: dict[str, bytes]) -> None:
    """Two objects, as two processes have, and three threads each."""
    both = [shards_in(tmp_path), shards_in(tmp_path)]
    for shards in both:
        shards.create()
    threads = [threading.Thread(target=fill, args=(shards,)) for shards in both * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    both[1].publish()
    assert files_of(tmp_path) == expected


def test_taken_up_at_any_moment(tmp_path: Path, expected: dict[str, bytes]) -> None:
    """Killed while files were made, filled or published: what is there is kept."""
    first = shards_in(tmp_path)
    first.create()
    first.write("t2", ARRAYS["t2"])
    lost = tmp_path / f"{PLANS[-1].file_name}.tmp"
    lost.unlink()
    (tmp_path / f"{lost.name}.new").write_bytes(b"half of a header")
    second = shards_in(tmp_path)
    assert not second.are_there
    second.create()
    for name in ARRAYS.keys() - {"t2"}:
        second.write(name, np.asarray(ARRAYS[name]))
    (tmp_path / f"{PLANS[0].file_name}.tmp").rename(tmp_path / PLANS[0].file_name)
    third = shards_in(tmp_path)
    third.create()
    third.publish()
    third.publish()
    assert files_of(tmp_path) == expected


def test_another_layout_is_refused(tmp_path: Path) -> None:
    shards_in(tmp_path).create()
    for specs in (SPECS[::-1], [*SPECS[:-1], TensorSpec(name="other", dtype=np.dtype(np.int8), shape=(2,))]):
        other = ShardFiles(tmp_path, specs, plan_shards(specs, max_shard_bytes=200), MODEL_INDEX)
        assert other.sha256 != shards_in(tmp_path).sha256
    same_names = ShardFiles(
        tmp_path, SPECS, plan_shards(SPECS, max_shard_bytes=200, metadata={"format": "xx"}), MODEL_INDEX
    )
    with pytest.raises(WeightsError, match=r"safetensors.tmp has another layout than this quantisation; remove"):
        same_names.create()
    shorter = tmp_path / f"{PLANS[0].file_name}.tmp"
    shorter.write_bytes(shorter.read_bytes()[:-1])
    with pytest.raises(WeightsError, match=f"{shorter.name} has another layout"):
        shards_in(tmp_path).create()


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("nobody", np.zeros(3), "tensor 'nobody' was not declared among the 8 tensors to write"),
        ("t0", np.zeros((3, 4), np.float32), r"'t0' was declared as float32\[3, 5\], written as \[3, 4\]"),
        ("t0", np.zeros((3, 5), np.float64), "'t0' was declared as float32, written as float64"),
    ],
)
def test_what_was_not_declared(tmp_path: Path, name: str, array: np.ndarray, message: str) -> None:
    shards = shards_in(tmp_path)
    shards.create()
    before = files_of(tmp_path)
    with pytest.raises(WeightsError, match=message):
        shards.write(name, array)
    assert files_of(tmp_path) == before


@pytest.mark.parametrize(("start", "rows", "columns"), [(-1, 1, 5), (2, 2, 5), (0, 0, 5), (0, 1, 4)])
def test_rows_out_of_range(tmp_path: Path, start: int, rows: int, columns: int) -> None:
    shards = shards_in(tmp_path)
    shards.create()
    with pytest.raises(
        WeightsError, match=rf"'t0' was declared as float32\[3, 5\]; rows {start} to {start + rows} came"
    ):
        shards.write_rows("t0", start, np.zeros((rows, columns), np.float32))


@pytest.mark.parametrize(
    ("step", "message"), [("write_at", "cannot write tensor 't1' to"), ("publish", "cannot finish")]
)
def test_a_disk_that_fails(tmp_path: Path, step: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_in(tmp_path)
    shards.create()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, step, full)
    with pytest.raises(WeightsError, match=f"{message}.*No space left on device"):
        shards.write("t1", ARRAYS["t1"])
        shards.publish()
    assert not (tmp_path / MODEL_INDEX).exists()


def test_no_room_for_the_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(WeightsError, match="cannot make the shards of"):
        shards_in(tmp_path / "file").create()


# The layout.


def test_widest_items_come_first_and_are_aligned() -> None:
    for plan in PLANS:
        own = [spec for spec in SPECS if spec.name in plan.offsets_bytes]
        assert len(plan.head) % 64 == 0
        for spec in own:
            assert plan.offsets_bytes[spec.name] % spec.dtype.itemsize == 0, spec
        assert plan.nbytes == len(plan.head) + sum(spec.nbytes for spec in own)


def test_names_and_index() -> None:
    plans = plan_shards(SPECS, max_shard_bytes=200, file_name=lambda number, of: f"part-{number}/{of}")
    assert [plan.file_name for plan in plans] == [f"part-{n + 1}/{len(plans)}" for n in range(len(plans))]
    assert model_shard(3, 12) == "model-00003-of-00012.safetensors"
    index = json.loads(index_text(SPECS, PLANS))
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in SPECS)
    assert list(index["weight_map"]) == sorted(ARRAYS)
    for name, file in index["weight_map"].items():
        assert name in next(plan for plan in PLANS if plan.file_name == file).offsets_bytes


def test_write_at_writes_there_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(20))
    write_at(path, 6, np.arange(1, 9, dtype=np.int8).reshape(2, 4).T)
    assert path.read_bytes() == bytes(6) + bytes([1, 5, 2, 6, 3, 7, 4, 8]) + bytes(6)
    with pytest.raises(FileNotFoundError):
        write_at(tmp_path / "absent", 0, np.ones(1))


def test_text_is_there_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    write_text_atomic(path, "before")
    write_text_atomic(path, "größer")
    assert path.read_bytes() == "größer".encode()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxmoe.weights.layout.publish", full)
    with pytest.raises(WeightsError, match=f"cannot write {path}: .*No space left"):
        write_text_atomic(path, "after")
    assert path.read_text(encoding="utf-8") == "größer" and len(list(tmp_path.iterdir())) == 1
