"""Reader and writer of checkpoints: round trips against the safetensors package, damage, slices, killed writes."""

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from jaxmoe.errors import WeightsError
from jaxmoe.weights.header import DTYPES
from jaxmoe.weights.safetensors import Checkpoint, TensorMeta, open_checkpoint
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec, write_text_atomic

INDEX = "model.safetensors.index.json"
shared_folder = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def random_array(dtype: np.dtype, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 100, size=shape)
    return np.asarray(values > 50 if dtype == np.bool_ else values).astype(dtype)


def one_of_each_dtype() -> dict[str, np.ndarray]:
    return {f"w.{code}": random_array(dtype, (3, 5), seed) for seed, (code, dtype) in enumerate(DTYPES.items())}


def spec_of(name: str, array: np.ndarray) -> TensorSpec:
    return TensorSpec(name=name, dtype=array.dtype, shape=array.shape)


def specs_of(tensors: Mapping[str, np.ndarray]) -> list[TensorSpec]:
    return [spec_of(name, array) for name, array in tensors.items()]


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save_shards(folder: Path, shards: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, str]:
    for file, tensors in shards.items():
        safetensors.numpy.save_file(dict(tensors), folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    write_index(folder, weight_map)
    return weight_map


def two_shards(folder: Path) -> tuple[Path, Path]:
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    arrays = {"a": random_array(np.dtype("f4"), (4, 8)), "b": random_array(np.dtype("f4"), (16, 64))}
    save_shards(folder, {names[0]: {"a": arrays["a"]}, names[1]: {"b": arrays["b"]}})
    return folder / names[0], folder / names[1]


def raw_file(folder: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def refusal(folder: Path) -> str:
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def assert_owned(array: np.ndarray) -> None:
    assert array.flags.c_contiguous
    assert array.flags.owndata
    assert array.flags.writeable


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    tensors = one_of_each_dtype() | {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float16)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    assert list(checkpoint.tensors) == sorted(tensors)
    for name, array in tensors.items():
        read = checkpoint.read(name)
        assert_same(read, array)
        assert_owned(read)
        assert checkpoint.tensors[name].nbytes == array.nbytes


def test_the_safetensors_package_reads_what_is_written(tmp_path: Path) -> None:
    tensors = one_of_each_dtype() | {"scalar": np.array(2.5, np.float32), "empty": np.zeros((0, 4), np.float16)}
    with CheckpointWriter(tmp_path, specs_of(tensors), max_shard_bytes=100, metadata={"format": "pt"}) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    peer = {name: view for file in files for name, view in safetensors.deserialize(file.read_bytes())}
    codes = {dtype: code for code, dtype in DTYPES.items()}
    assert peer.keys() == tensors.keys()
    for name, array in tensors.items():
        assert peer[name]["dtype"] == codes[array.dtype]
        assert tuple(peer[name]["shape"]) == array.shape
        assert bytes(peer[name]["data"]) == array.tobytes()
    with safetensors.safe_open(files[0], "np") as peer_file:
        assert peer_file.metadata() == {"format": "pt"}
    checkpoint = open_checkpoint(tmp_path)
    for name, array in tensors.items():
        assert_same(checkpoint.read(name), array)


def test_data_is_aligned_and_the_index_is_like_that_of_transformers(tmp_path: Path) -> None:
    tensors = {"z": random_array(np.dtype("i1"), (3,)), "a": random_array(np.dtype("f4"), (5,))}
    with CheckpointWriter(tmp_path, specs_of(tensors)) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    name = "model-00001-of-00001.safetensors"
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, INDEX]
    raw = (tmp_path / name).read_bytes()
    assert (8 + int.from_bytes(raw[:8], "little")) % 64 == 0
    assert all(meta.offset_bytes % meta.dtype.itemsize == 0 for meta in open_checkpoint(tmp_path).tensors.values())
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == {"metadata": {"total_size": 23}, "weight_map": {"a": name, "z": name}}
    assert list(index["weight_map"]) == ["a", "z"]


def test_shards_are_filled_in_the_given_order(tmp_path: Path) -> None:
    sizes = {"d": 4, "c": 4, "b": 9, "a": 4, "e": 3, "f": 2}
    tensors = {name: random_array(np.dtype("u1"), (size,)) for name, size in sizes.items()}
    with CheckpointWriter(tmp_path, specs_of(tensors), max_shard_bytes=8) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    shard_of = {name: int(file[6:11]) for name, file in weight_map.items()}
    assert shard_of == {"d": 1, "c": 1, "b": 2, "a": 3, "e": 3, "f": 4}
    assert weight_map["f"] == "model-00004-of-00004.safetensors"


def test_bytes_do_not_depend_on_the_order_of_writes(tmp_path: Path) -> None:
    tensors = {
        name: random_array(np.dtype("f4"), (size,), size) for name, size in zip("abcd", (3, 5, 2, 4), strict=True)
    }
    results = []
    for number, order in enumerate(itertools.permutations(tensors)):
        folder = tmp_path / str(number)
        with CheckpointWriter(folder, specs_of(tensors), max_shard_bytes=32) as writer:
            for name in order:
                writer.write(name, tensors[name])
        results.append(folder_bytes(folder))
    assert len(results[0]) == 3
    assert all(result == results[0] for result in results)


def test_a_view_that_is_not_contiguous_is_written_in_row_major_order(tmp_path: Path) -> None:
    array = random_array(np.dtype("f4"), (6, 4)).T[:, ::2]
    with CheckpointWriter(tmp_path, [spec_of("a", array)]) as writer:
        writer.write("a", array)
    assert_same(open_checkpoint(tmp_path).read("a"), np.ascontiguousarray(array))


def test_a_shard_gets_its_name_with_its_last_tensor(tmp_path: Path) -> None:
    array = random_array(np.dtype("u1"), (4,))
    writer = CheckpointWriter(tmp_path, [spec_of(name, array) for name in "abcd"], max_shard_bytes=8)
    writer.write("a", array)
    writer.write("c", array)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == []
    writer.write("d", array)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model-00002-of-00002.safetensors"]
    writer.write("b", array)
    assert not (tmp_path / INDEX).exists()
    writer.finish()
    assert list(open_checkpoint(tmp_path).tensors) == list("abcd")


def test_a_killed_write_leaves_no_index_and_no_half_shard(tmp_path: Path) -> None:
    array = random_array(np.dtype("u1"), (4,))
    with (
        pytest.raises(RuntimeError, match="killed"),
        CheckpointWriter(tmp_path, [spec_of(name, array) for name in "abcd"], max_shard_bytes=8) as writer,
    ):
        writer.write("a", array)
        writer.write("b", array)
        writer.write("c", array)
        raise RuntimeError("killed")
    assert [path.name for path in tmp_path.iterdir()] == ["model-00001-of-00002.safetensors"]
    with pytest.raises(WeightsError, match=r"neither model\.safetensors\.index\.json nor model\.safe"):
        open_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match=r"writer of .* is closed"):
        writer.write("d", array)
    with pytest.raises(WeightsError, match=r"writer of .* is closed"):
        writer.finish()


def test_a_shard_that_never_closed_has_only_its_temporary_name(tmp_path: Path) -> None:
    array = random_array(np.dtype("u1"), (4,))
    CheckpointWriter(tmp_path, [spec_of("a", array), spec_of("b", array)]).write("a", array)
    assert [path.name for path in tmp_path.iterdir()] == ["model-00001-of-00001.safetensors.tmp"]


def test_finish_names_what_was_not_written(tmp_path: Path) -> None:
    array = random_array(np.dtype("u1"), (4,))
    with (
        pytest.raises(WeightsError, match=r"2 of the 3 declared tensors were not written to .*: 'b', 'c'"),
        CheckpointWriter(tmp_path, [spec_of(name, array) for name in "abc"]) as writer,
    ):
        writer.write("a", array)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_may_be_finished_before_the_context_ends(tmp_path: Path) -> None:
    array = random_array(np.dtype("u1"), (4,))
    with CheckpointWriter(tmp_path, [spec_of("a", array)]) as writer:
        writer.write("a", array)
        writer.finish()
        assert_same(open_checkpoint(tmp_path).read("a"), array)
        with pytest.raises(WeightsError, match=r"writer of .* is closed"):
            writer.finish()


def test_a_header_that_no_reader_accepts_is_not_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxmoe.weights.layout.MAX_HEADER_BYTES", 100)
    array = random_array(np.dtype("u1"), (4,))
    with pytest.raises(WeightsError, match=r"header of model-00001-of-00001\.safetensors has 120 bytes for 2 tensors"):
        CheckpointWriter(tmp_path, [spec_of("a", array), spec_of("b", array)])


def test_rows_written_in_pieces_are_the_whole_tensor(tmp_path: Path) -> None:
    arrays = {"a": np.arange(35, dtype=np.float32).reshape(7, 5), "b": np.arange(6, dtype=np.int8)}
    specs = [TensorSpec(name=name, dtype=array.dtype, shape=array.shape) for name, array in arrays.items()]
    for name, pieces in (("whole", [7]), ("pieces", [1, 4, 2])):
        with CheckpointWriter(tmp_path / name, specs) as writer:
            start = 0
            for count in pieces:
                writer.write_rows("a", start, arrays["a"][start : start + count])
                start += count
            writer.write("b", arrays["b"])
    files = [(tmp_path / name / "model-00001-of-00001.safetensors").read_bytes() for name in ("whole", "pieces")]
    assert files[0] == files[1]
    np.testing.assert_array_equal(open_checkpoint(tmp_path / "pieces").read("a"), arrays["a"])


def test_rows_that_are_not_the_next_ones_are_refused(tmp_path: Path) -> None:
    array = np.zeros((4, 3), np.float32)
    writer = CheckpointWriter(tmp_path, [TensorSpec(name="a", dtype=array.dtype, shape=array.shape)])
    writer.write_rows("a", 0, array[:2])
    for start, rows in ((0, array[:2]), (3, array[:1]), (2, array), (2, array[:0]), (2, array[:2, :2])):
        with pytest.raises(
            WeightsError, match=r"'a' was declared as float32\[4, 3\], of which 2 rows are written; rows"
        ):
            writer.write_rows("a", start, rows)
    with pytest.raises(WeightsError, match=r"rows 2 to 4 came as int8\[2, 3\]"):
        writer.write_rows("a", 2, array[2:].astype(np.int8))
    with pytest.raises(WeightsError, match="written as float32.* after 2 rows"):
        writer.write("a", array)
    with pytest.raises(WeightsError, match="1 of the 1 declared tensors were not written"):
        writer.finish()
    writer.write_rows("a", 2, array[2:])
    with pytest.raises(WeightsError, match="tensor 'a' was already written"):
        writer.write_rows("a", 4, array[:1])
    writer.finish()


def test_writes_that_do_not_match_the_declaration_are_refused(tmp_path: Path) -> None:
    array = random_array(np.dtype("f4"), (2, 3))
    writer = CheckpointWriter(tmp_path, [spec_of("a", array), spec_of("b", array)])
    writer.write("a", array)
    with pytest.raises(WeightsError, match="tensor 'c' was not declared among the 2 tensors"):
        writer.write("c", array)
    with pytest.raises(WeightsError, match="tensor 'a' was already written to model-00001-of-00001"):
        writer.write("a", array)
    with pytest.raises(WeightsError, match=r"'b' was declared as float32\[2, 3\], written as float32\[3, 2\]"):
        writer.write("b", array.T)
    with pytest.raises(WeightsError, match=r"'b' was declared as float32\[2, 3\], written as bfloat16\[2, 3\]"):
        writer.write("b", array.astype(ml_dtypes.bfloat16))
    writer.write("b", array)
    writer.finish()
    assert_same(open_checkpoint(tmp_path).read("b"), array)


def test_a_failing_disk_is_a_weights_error(tmp_path: Path) -> None:
    array = random_array(np.dtype("f4"), (2, 3))
    writer = CheckpointWriter(tmp_path / "out", [spec_of("a", array)])
    (tmp_path / "out").rmdir()
    with pytest.raises(WeightsError, match=r"cannot write tensor 'a' to .*out.*No such file"):
        writer.write("a", array)


@pytest.mark.parametrize(
    ("specs", "max_shard_bytes", "message"),
    [
        ([], 1, "at least one tensor"),
        ([("a", "f4", (1,))], 0, "max_shard_bytes is 0"),
        ([("a", "f4", (1,)), ("a", "f4", (1,))], 1, "'a' is declared twice"),
        ([("__metadata__", "f4", (1,))], 1, "'__metadata__' has a name that the format reserves"),
        ([("a", "c8", (1,))], 1, "'a' has dtype complex64, which is none of bool, uint8"),
        ([("a", ">f4", (1,))], 1, "'a' has dtype >f4, which is none of bool, uint8"),
        ([("a", "f4", (2, -1))], 1, r"'a' has the negative shape \(2, -1\)"),
    ],
)
def test_declarations_that_cannot_be_stored_are_refused(
    tmp_path: Path, specs: list[tuple[str, str, tuple[int, ...]]], max_shard_bytes: int, message: str
) -> None:
    folder = tmp_path / "out"
    with pytest.raises(WeightsError, match=message):
        CheckpointWriter(
            folder,
            [TensorSpec(name=name, dtype=np.dtype(dtype), shape=shape) for name, dtype, shape in specs],
            max_shard_bytes=max_shard_bytes,
        )
    assert not folder.exists()


@pytest.mark.parametrize("left", ["model.safetensors", INDEX, "model-00001-of-00009.safetensors.tmp"])
def test_a_folder_with_another_checkpoint_is_not_written_to(tmp_path: Path, left: str) -> None:
    (tmp_path / left).touch()
    with pytest.raises(WeightsError, match=f"already holds 1 safetensors file.*'{left}'"):
        CheckpointWriter(tmp_path, [TensorSpec(name="a", dtype=np.dtype("f4"), shape=(1,))])


def test_a_file_in_place_of_the_output_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(WeightsError, match=r"cannot use .*out for a checkpoint: File exists"):
        CheckpointWriter(tmp_path / "out", [TensorSpec(name="a", dtype=np.dtype("f4"), shape=(1,))])


def test_write_text_atomic_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("a longer text that was there before")
    write_text_atomic(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(WeightsError, match=r"cannot write .*config\.json: .*No such file"):
        write_text_atomic(tmp_path / "absent" / "config.json", "")


def test_a_missing_folder_and_a_file_in_its_place_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="absent does not exist; give the folder"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(WeightsError, match="file is not a folder; give the folder"):
        open_checkpoint(tmp_path / "file")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(WeightsError, match=r"no weights in .*: no \*\.safetensors\.index\.json and no \.safetensors"):
        open_checkpoint(tmp_path)


def test_weights_without_an_index_are_listed(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / INDEX).unlink()
    message = (
        r"has 2 .safetensors file\(s\) but .*'model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'"
    )
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(tmp_path)


def test_one_index_of_another_name_is_used_and_several_are_refused(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "other.safetensors.index.json")
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b"]
    (tmp_path / "more.safetensors.index.json").touch()
    with pytest.raises(WeightsError, match=r"2 index files, 'more\.safetensors\.index\.json', 'other\.safe"):
        open_checkpoint(tmp_path)
    (tmp_path / "other.safetensors.index.json").rename(tmp_path / INDEX)
    assert list(open_checkpoint(tmp_path).tensors) == ["a", "b"]


def test_files_beside_the_checkpoint_are_reported(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "consolidated.safetensors").touch()
    assert open_checkpoint(tmp_path).unused_files == (tmp_path / "consolidated.safetensors",)


def test_a_shard_may_lie_in_a_folder_below(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    save_shards(tmp_path, {"sub/model.safetensors": {"a": random_array(np.dtype("f4"), (2,))}})
    assert open_checkpoint(tmp_path).tensors["a"].file == tmp_path / "sub" / "model.safetensors"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "weight_map must be an object .*, found nothing"),
        ('{"metadata": {}}', "weight_map must be an object .*, found nothing"),
        ('{"weight_map": {}}', "weight_map must be an object .*, found dict '{}'"),
        ('{"weight_map": ["a"]}', "weight_map must be an object .*, found list"),
        ('{"weight_map": {"a": 1}}', "no file name but another type for 'a'"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "given twice: 'a'"),
        ('{"weight_map": {"a": "../x.safetensors"}}', r"outside its folder: '\.\./x\.safetensors'; refused"),
        ('{"weight_map": {"a": "b/../../x"}}', r"outside its folder: 'b/\.\./\.\./x'; refused"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "outside its folder: '/etc/passwd'; refused"),
        (r'{"weight_map": {"a": "..\\x"}}', "outside its folder"),
        (r'{"weight_map": {"a": "x\u0000"}}', "outside its folder"),
        ('{"weight_map": {"a": ""}}', "outside its folder: ''; refused"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(tmp_path)


def test_an_index_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).symlink_to(tmp_path / "absent")
    with pytest.raises(WeightsError, match=f"cannot read .*{INDEX}: No such file"):
        open_checkpoint(tmp_path)


def test_case_79_missing_shard_is_named(tmp_path: Path) -> None:
    files = [f"model-{number:05d}-of-00014.safetensors" for number in range(1, 15)]
    save_shards(tmp_path, {file: {f"w.{file}": random_array(np.dtype("f4"), (2,))} for file in files})
    gone = files[1:13]
    for file in gone:
        (tmp_path / file).unlink()
    message = refusal(tmp_path)
    assert f"12 of the 14 files that {INDEX} names are missing" in message
    assert all(file in message for file in gone)
    assert files[0] not in message


@pytest.mark.parametrize("lost_bytes", [1, 1024])
def test_case_81_truncated_shard_is_named_with_both_sizes(tmp_path: Path, lost_bytes: int) -> None:
    _, second = two_shards(tmp_path)
    full = second.stat().st_size
    with second.open("r+b") as stream:
        stream.truncate(full - lost_bytes)
    message = f"{second}: truncated: expected {full} bytes, found {full - lost_bytes}; copy it again"
    assert message in refusal(tmp_path)


@pytest.mark.parametrize("kept_bytes", [0, 5, 20])
def test_case_81_shard_truncated_in_its_header_is_named(tmp_path: Path, kept_bytes: int) -> None:
    _, second = two_shards(tmp_path)
    least = 8 if kept_bytes < 8 else 8 + int.from_bytes(second.read_bytes()[:8], "little")
    with second.open("r+b") as stream:
        stream.truncate(kept_bytes)
    message = refusal(tmp_path)
    assert f"{second}: truncated" in message
    assert f"expected at least {least} bytes, found {kept_bytes}; copy it again" in message


def test_case_83_stale_index_names_both_sets_of_files(tmp_path: Path) -> None:
    write_index(tmp_path, {f"w.{number}": f"model-{number:05d}-of-00030.safetensors" for number in range(1, 31)})
    for number in range(1, 16):
        array = {f"w.{number}": random_array(np.dtype("f4"), (2,))}
        safetensors.numpy.save_file(array, tmp_path / f"model-{number:05d}-of-00015.safetensors")
    message = refusal(tmp_path)
    assert "30 of the 30 files" in message
    assert all(f"'model-{number:05d}-of-00030.safetensors'" in message for number in range(1, 31))
    unnamed = ", ".join(f"'model-{number:05d}-of-00015.safetensors'" for number in range(1, 11))
    assert f"the folder has files that the index does not name: {unnamed} and 5 more (stale index?)" in message


def test_case_83_stale_index_names_both_sets_of_tensors(tmp_path: Path) -> None:
    first, _ = two_shards(tmp_path)
    write_index(tmp_path, {"a": first.name, "old": first.name, "b": first.name})
    (tmp_path / "model-00002-of-00002.safetensors").rename(tmp_path / "gone")
    assert "2 tensor(s) are not in the file that it names ['b', 'old'], 0 tensor(s)" in refusal(tmp_path)
    (tmp_path / "gone").rename(tmp_path / "model-00002-of-00002.safetensors")
    write_index(tmp_path, {"a": first.name, "old": "model-00002-of-00002.safetensors"})
    message = refusal(tmp_path)
    assert "does not match its files (stale index?)" in message
    assert "1 tensor(s) are not in the file that it names ['old']" in message
    assert "1 tensor(s) are in a file that it does not name for them ['b']" in message
    write_index(tmp_path, {"b": first.name, "a": "model-00002-of-00002.safetensors"})
    message = refusal(tmp_path)
    assert "2 tensor(s) are not in the file that it names ['a', 'b']" in message
    assert "2 tensor(s) are in a file that it does not name for them ['a', 'b']" in message


@pytest.mark.parametrize("extra_bytes", [1, 4096])
def test_case_84_trailing_bytes_are_refused(tmp_path: Path, extra_bytes: int) -> None:
    _, second = two_shards(tmp_path)
    full = second.stat().st_size
    with second.open("ab") as stream:
        stream.write(b"\0" * extra_bytes)
    message = f"{second}: file not fully covered: {extra_bytes} bytes at offset {full} follow the last tensor"
    assert message in refusal(tmp_path)


def test_a_tensor_in_two_files_is_named_with_its_files(tmp_path: Path) -> None:
    array = random_array(np.dtype("f4"), (2,))
    save_shards(tmp_path, {"x.safetensors": {"a": array, "b": array}, "y.safetensors": {"b": array, "c": array}})
    message = r"1 tensor\(s\) are in more than one file: 'b' \(the first in x\.safetensors, y\.safetensors\)"
    with pytest.raises(WeightsError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert "stale" not in str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    array = random_array(np.dtype("f4"), (64,))
    save_shards(tmp_path, {f"{name}.safetensors": {name: array} for name in "abc"})
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes()[:-4])
    (tmp_path / "c.safetensors").write_bytes((tmp_path / "c.safetensors").read_bytes() + b"1")
    message = refusal(tmp_path)
    assert "1 of the 3 files" in message
    assert "'a.safetensors'" in message
    assert "b.safetensors: truncated" in message
    assert "c.safetensors: file not fully covered" in message


def test_messages_stay_short_for_many_problems(tmp_path: Path) -> None:
    array = random_array(np.dtype("f4"), (2,))
    save_shards(tmp_path, {f"{number:03d}.safetensors": {f"w.{number:03d}": array} for number in range(40)})
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    message = refusal(tmp_path)
    assert message.count("truncated") == 10
    assert message.endswith("and 30 more")
    raw_file(tmp_path, {f"{'n' * 1000}{number}": entry("F8_E8M0", [0], 0, 0) for number in range(1000)})
    (tmp_path / INDEX).unlink()
    message = refusal(tmp_path)
    assert "and 997 more" in message
    assert len(message) < 2000


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "header is not valid JSON"),
        (b"\xff\xfe", b"", "header is not valid JSON"),
        (b'{"a":' * 50_000, b"", "header is not valid JSON"),
        (b"[]", b"", "header is not a JSON object that starts at byte 8"),
        (b" {}", b"", "header is not a JSON object that starts at byte 8"),
        (b"{}", b"", "has no tensors: 'model.safetensors' declare none"),
        (b'{"a":1,"a":2}', b"", "given twice: 'a'"),
        ({"__metadata__": {"format": 1}}, b"", "__metadata__ is not an object of text values"),
        ({"a": 3}, b"", "entry of tensor 'a' is malformed: 3"),
        ({"a": {"dtype": "F32", "shape": [1]}}, b"", "entry of tensor 'a' is malformed"),
        ({"a": {"dtype": 1, "shape": [1], "data_offsets": [0, 4]}}, bytes(4), "entry of tensor 'a' is malformed"),
        ({"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}, bytes(1), "entry of tensor 'a' is malformed"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, bytes(1), "entry of tensor 'a' is malformed"),
        ({"a": entry("U8", [-1], 0, 1)}, bytes(1), "entry of tensor 'a' is malformed"),
        ({"a": entry("U8", [True], 0, 1)}, bytes(1), "entry of tensor 'a' is malformed"),
        ({"a": entry("U8", [1], 1, 0)}, bytes(1), "entry of tensor 'a' is malformed"),
        ({"a": entry("U8", [1] * 33, 0, 1)}, bytes(1), "entry of tensor 'a' is malformed"),
        ({"a": entry("U8", [0, 1 << 62, 1 << 62], 0, 0)}, b"", "entry of tensor 'a' is malformed"),
        ({"a": entry("F4", [2], 0, 1)}, bytes(1), "tensor 'a' has the unknown dtype 'F4'; known are BOOL, U8"),
        ({"a": entry("F32", [2], 0, 4)}, bytes(4), r"'a' of F32\[2\] needs 8 bytes, its data_offsets give 4"),
        (
            {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)},
            bytes(5),
            r"not fully covered: 1 bytes at offset \d+ before tensor 'b' belong to no tensor",
        ),
        ({"a": entry("U8", [2], 1, 3)}, bytes(3), r"not fully covered: 1 bytes at offset \d+ before tensor 'a'"),
        (
            {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)},
            bytes(3),
            r"tensor 'b' overlaps the tensor before it: starts 1 bytes early at offset \d+",
        ),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    raw_file(tmp_path, header, data)
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(tmp_path)


def test_the_offset_of_a_gap_counts_from_the_start_of_the_file(tmp_path: Path) -> None:
    path = raw_file(tmp_path, {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, bytes(5))
    assert f"at offset {path.stat().st_size - 3} before tensor 'b'" in refusal(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 1 << 63])
def test_an_absurd_header_length_is_refused(tmp_path: Path, length: int) -> None:
    raw_file(tmp_path, b"{}", length=length)
    with pytest.raises(WeightsError, match=f"header length {length} is not within 2..100000000"):
        open_checkpoint(tmp_path)


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(WeightsError, match="git lfs pull"):
        open_checkpoint(tmp_path)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "absent")
    with pytest.raises(WeightsError, match=r"model\.safetensors: cannot be read: No such file"):
        open_checkpoint(tmp_path)


@shared_folder
@given(position=st.integers(0, 400), byte=st.integers(0, 255))
@example(position=7, byte=255)
def test_a_changed_header_byte_gives_a_weights_error_or_the_same_data(tmp_path: Path, position: int, byte: int) -> None:
    array = random_array(np.dtype("i2"), (3, 4))
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": array, "b": array}, path, metadata={"format": "pt"})
    raw = bytearray(path.read_bytes())
    assume(position < 8 + int.from_bytes(raw[:8], "little"))
    raw[position] = byte
    path.write_bytes(raw)
    try:
        checkpoint = open_checkpoint(tmp_path)
    except WeightsError:
        return
    assert sum(checkpoint.read(name).nbytes for name in checkpoint.tensors) == 2 * array.nbytes


@st.composite
def shapes_and_indices(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice | int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    index: list[slice | int] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        bound = st.none() | st.integers(-size, size)
        slices = st.builds(slice, bound, bound, st.none() | st.integers(1, 3))
        index.append(draw(slices | st.integers(-size, size - 1) if size else slices))
    return shape, tuple(index)


@shared_folder
@given(case=shapes_and_indices(), code=st.sampled_from(["I8", "BF16", "F32", "BOOL", "F8_E4M3", "F64"]))
@example(case=((4, 3, 2), (2,)), code="BF16")
@example(case=((4, 3, 2), (slice(1, 3), slice(None), 1)), code="BF16")
@example(case=((4, 3, 2), (1, slice(0, 2))), code="BF16")
@example(case=((4, 3), (slice(None, None, 2),)), code="BF16")
def test_slices_equal_those_of_numpy(
    tmp_path: Path, case: tuple[tuple[int, ...], tuple[slice | int, ...]], code: str
) -> None:
    shape, index = case
    array = random_array(DTYPES[code], shape)
    odd = np.zeros(1, np.uint8)
    data = odd.tobytes() + array.tobytes()
    header = {"odd": entry("U8", [1], 0, 1), "a": entry(code, list(shape), 1, 1 + array.nbytes)}
    raw_file(tmp_path, header, data)
    read = open_checkpoint(tmp_path).read("a", index)
    assert_same(read, np.asarray(array[index]))
    assert_owned(read)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((4,), r"index 4 of axis 0 of tensor 'a', shape \(4, 8\), is out of range"),
        ((-5,), "index -5 of axis 0 .* is out of range"),
        ((slice(0, 5),), "slice bound 5 of axis 0 .* is out of range"),
        ((slice(5, None),), "slice bound 5 of axis 0 .* is out of range"),
        ((slice(None), slice(-9, None)), "slice bound -9 of axis 1 .* is out of range"),
        ((slice(None, None, -1),), "slice step -1 of axis 0 .* is not at least 1"),
        ((slice(None, None, 0),), "slice step 0 of axis 0 .* is not at least 1"),
        ((0, 0, 0), r"tensor 'a' of shape \(4, 8\) got an index of 3 axes"),
    ],
)
def test_an_index_outside_the_tensor_is_refused(tmp_path: Path, index: tuple[slice | int, ...], message: str) -> None:
    two_shards(tmp_path)
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(tmp_path).read("a", index)


def test_an_unknown_name_comes_with_the_closest_ones(tmp_path: Path) -> None:
    array = random_array(np.dtype("f4"), (2,))
    names = [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down", "sum")]
    safetensors.numpy.save_file(dict.fromkeys(names, array), tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(WeightsError) as caught:
        checkpoint.read("model.layers.0.mlp.gate_proj.weights")
    message = str(caught.value)
    assert "no tensor 'model.layers.0.mlp.gate_proj.weights' among the 4 tensors" in message
    assert "closest names are 'model.layers.0.mlp.gate_proj.weight', " in message
    assert message.count("_proj.weight'") == 3
    with pytest.raises(WeightsError, match=r"no tensor 'xyz' among the 4 tensors of [^;]*$"):
        checkpoint.read("xyz")


def test_only_the_requested_bytes_are_read(tmp_path: Path) -> None:
    rows, columns = 1 << 18, 1 << 18
    header = {"big": entry("I8", [rows, columns], 0, rows * columns)}
    path = raw_file(tmp_path, header)
    data_start = path.stat().st_size
    with path.open("r+b") as stream:
        stream.truncate(data_start + rows * columns)
        stream.seek(data_start + 12345 * columns + 67)
        stream.write(b"\x07")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("big", (slice(12345, 12346), slice(60, 70))).tolist() == [[0] * 7 + [7, 0, 0]]
    assert checkpoint.read("big", (12345, 67)).tolist() == 7
    assert checkpoint.read("big", (slice(12340, 12350), 67)).tolist() == [0] * 5 + [7] + [0] * 4


@pytest.mark.parametrize("index", [(), (slice(None), slice(0, 2))])
def test_a_file_that_got_shorter_since_is_noticed(tmp_path: Path, index: tuple[slice | int, ...]) -> None:
    _, second = two_shards(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    with second.open("r+b") as stream:
        stream.truncate(second.stat().st_size - 1)
    with pytest.raises(WeightsError, match=r"cannot read tensor 'b' from .*; open the checkpoint again"):
        checkpoint.read("b", index)
    second.unlink()
    with pytest.raises(WeightsError, match=r"cannot read tensor 'b' from .*No such file"):
        checkpoint.read("b", index)


def test_a_checkpoint_cannot_be_changed(tmp_path: Path) -> None:
    two_shards(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, Checkpoint)
    meta = checkpoint.tensors["a"]
    assert isinstance(meta, TensorMeta)
    assert meta.nbytes == math.prod(meta.shape) * 4
    with pytest.raises(TypeError):
        checkpoint.tensors["c"] = meta  # pyright: ignore[reportIndexIssue]
