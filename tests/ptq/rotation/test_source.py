"""A rotated checkpoint is the same model, and any part of it is read with the bits of the whole."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmoe.errors import RecipeError, WeightsError
from jaxmoe.models.manifest import Entry
from jaxmoe.nn.config import LatentAttentionConfig
from jaxmoe.ptq.rotation.plan import RotationRecipe, Side
from jaxmoe.ptq.rotation.source import RotatedFiles, rotate_files
from jaxmoe.weights.cells import Cell, cell_shape, hub_cells
from jaxmoe.weights.load import open_model
from jaxmoe.weights.safetensors import Checkpoint, open_checkpoint
from jaxmoe.weights.writer import CheckpointWriter, TensorSpec
from tests import tiny
from tests.ptq.rotation.rotating import rotate_folder, write_rotated
from tests.ptq.rotation.test_hadamard import bound, dense
from tests.running import run_logits, scratch, tiny_folder, tiny_quantized
from tests.tolerances import TOLERANCES
from tests.weights.test_formats import encoded

FAST = ("glm4_moe", "gpt_oss")
EVERYTHING = RotationRecipe(values=True, latents=True, tied="untie", mtp="drop", not_run="drop")


def recipe_for(family: str) -> RotationRecipe:
    """All that can turn in a family."""
    attention = tiny.read(family, {}).attention
    latent = isinstance(attention, LatentAttentionConfig)
    return dataclasses.replace(EVERYTHING, latents=latent, values=not (latent and attention.gate))


@cache
def rotated_tiny(family: str) -> RotatedFiles:
    return rotate_folder(tiny_folder(family), recipe_for(family))


def whole(rotated: RotatedFiles, entry: Entry, cell: Cell, **options: Any) -> np.ndarray:
    return rotated.source.read(entry, cell, tuple(slice(0, size) for size in cell_shape(entry)), **options)


def cells(rotated: RotatedFiles, path: str) -> list[tuple[Entry, Cell]]:
    entry = rotated.files.manifest[path]
    return [(entry, cell) for cell in hub_cells(entry)]


@pytest.mark.parametrize(
    "family", [family if family in FAST else pytest.param(family, marks=pytest.mark.slow) for family in tiny.CONFIGS]
)
def test_is_the_same_model(family: str, tmp_path: Path) -> None:
    rotated = rotated_tiny(family)
    folder = write_rotated(rotated, tmp_path / "rotated")
    ids = tiny.token_ids()
    expected, got = run_logits(tiny_folder(family), ids), run_logits(folder, ids)
    assert expected.std() > 0.5
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCES["rotated_logits"].value)


def test_another_model_would_be_seen(tmp_path: Path) -> None:
    """The comparison above can fail: here one parameter lacks its norm's gain, which varies by a fifth."""
    rotated = rotated_tiny("glm4_moe")
    path = "moe.ffn.shared.up"
    changes = dict(rotated.source.plan.changes)
    changes[path] = dataclasses.replace(changes[path], gains=())
    plan = dataclasses.replace(rotated.source.plan, changes=changes)
    wrong = dataclasses.replace(rotated, source=dataclasses.replace(rotated.source, plan=plan))
    folder = write_rotated(wrong, tmp_path / "wrong")
    ids = tiny.token_ids()
    difference = np.abs(run_logits(folder, ids) - run_logits(tiny_folder("glm4_moe"), ids))
    assert difference.max() > 0.1


def side_matrix(side: Side | None, size: int) -> np.ndarray:
    """What multiplies an axis, as a float64 matrix."""
    matrix = np.eye(size)
    if side is not None:
        width = side.rotation.size
        for start in range(side.start, size, side.period):
            matrix[start : start + width, start : start + width] = dense(side.rotation)
    return matrix


@pytest.mark.parametrize("family", ["gpt_oss", "glm_moe_dsa", "hy_v4"])
def test_every_cell_is_what_its_change_says(family: str) -> None:
    rotated = rotated_tiny(family)
    files, plan = rotated.files, rotated.source.plan
    seen = 0
    for entry in files.manifest.entries:
        change, shape = plan.changes.get(entry.path), cell_shape(entry)
        for cell in hub_cells(entry):
            got = whole(rotated, entry, cell)
            plain = files.source.read(entry, cell, tuple(slice(0, size) for size in shape))
            if change is None:
                assert got.dtype == plain.dtype
                np.testing.assert_array_equal(got, plain)
                continue
            assert got.dtype == np.float32
            seen += 1
            if change.ones:
                np.testing.assert_array_equal(got, np.ones(shape, np.float32))
                continue
            expected = plain.astype(np.float64)
            for gain, part in zip(change.gains, np.split(expected, max(1, len(change.gains)), axis=-1), strict=False):
                path, position = gain.at(cell.position)
                norm = files.manifest[path]
                where = next(found for found in hub_cells(norm) if found.position == position)
                part *= files.source.read(norm, where, (slice(0, norm.shape[-1]),))
            expected = expected @ side_matrix(change.columns, shape[-1])
            if change.rows is not None:
                expected = side_matrix(change.rows, shape[-2]).T @ expected
            atol = bound(expected)
            np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=entry.path)
    assert seen > 50


@given(data=st.data())
@pytest.mark.parametrize("family", ["gpt_oss", "glm_moe_dsa"])
def test_a_part_has_the_bits_of_the_whole(family: str, data: st.DataObject) -> None:
    rotated = rotated_tiny(family)
    entry = rotated.files.manifest[data.draw(st.sampled_from(sorted(rotated.source.plan.changes)))]
    cell = data.draw(st.sampled_from(list(hub_cells(entry))))
    index = []
    for size in cell_shape(entry):
        start = data.draw(st.integers(0, size - 1))
        index.append(slice(start, data.draw(st.integers(start, size)), data.draw(st.integers(1, 3))))
    got = rotated.source.read(entry, cell, tuple(index))
    assert got.flags.c_contiguous
    np.testing.assert_array_equal(got, whole(rotated, entry, cell)[tuple(index)])


@pytest.mark.parametrize(
    ("path", "index", "expected"),
    [
        # A row of the embedding, for a token; a part of it needs its block.
        ("embed.weight", (slice(5, 6), slice(0, 64)), 64),
        ("embed.weight", (slice(5, 6), slice(17, 20)), 16),
        ("moe.attention.q", (slice(0, 3), slice(0, 64)), 3 * 64 + 64),
        # A row of what writes the residual stream needs the rows of its block.
        ("moe.ffn.shared.down", (slice(20, 21), slice(4, 6)), 16 * 2),
        # Values: the rows of one head and no other.
        ("moe.attention.v", (slice(16, 17), slice(0, 64)), 16 * 64 + 64),
        ("moe.attention_norm.weight", (slice(0, 64),), 0),
    ],
)
def test_reads_blocks_and_nothing_beside_them(
    monkeypatch: pytest.MonkeyPatch, path: str, index: tuple[slice, ...], expected: int
) -> None:
    rotated = rotate_folder(tiny_folder("glm4_moe"), RotationRecipe(block=16, values=True))
    read, original = [], Checkpoint.read

    def counted(self: Checkpoint, name: str, index: tuple[slice | int, ...] = ()) -> np.ndarray:
        array = original(self, name, index)
        read.append(array.size)
        return array

    monkeypatch.setattr(Checkpoint, "read", counted)
    entry, cell = cells(rotated, path)[0]
    rotated.source.read(entry, cell, index)
    assert sum(read) == expected


def test_a_decoded_source_turns_after_it_was_decoded() -> None:
    folder, exact = encoded("fp8")
    rotated = rotate_folder(folder, dataclasses.replace(EVERYTHING, values=False))
    entry, cell = cells(rotated, "moe.ffn.down")[3]
    side = rotated.source.plan.changes[entry.path].rows
    expected = side_matrix(side, entry.shape[-2]).T @ exact[cell.tensor]
    atol = bound(expected)
    np.testing.assert_allclose(whole(rotated, entry, cell), expected, rtol=0, atol=atol)
    assert rotated.source.dtype(entry, cell) == np.float32
    assert rotated.source.kept_dtype(entry, cell) == ml_dtypes.bfloat16


def test_dtypes_of_a_bfloat16_source(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "bf16", tiny.CONFIGS["glm4_moe"], dtype=ml_dtypes.bfloat16)
    # The release stores its router in bfloat16 too.
    for rotates, recipe in ((True, RotationRecipe()), (False, RotationRecipe(residual=False, values=True))):
        rotated = rotate_folder(folder, recipe)
        for path, read, kept in [
            ("embed.weight", np.float32, ml_dtypes.bfloat16),
            ("head.weight", np.float32, ml_dtypes.bfloat16),
            ("moe.ffn.down", np.float32, ml_dtypes.bfloat16),
            ("moe.attention_norm.weight", np.float32, ml_dtypes.bfloat16),
            ("moe.ffn.router.weight", np.float32, np.float32),
        ]:
            entry, cell = cells(rotated, path)[0]
            stored = np.float32 if entry.float32 else ml_dtypes.bfloat16
            assert rotated.source.dtype(entry, cell) == (read if rotates else stored), path
            assert rotated.source.kept_dtype(entry, cell) == (kept if rotates else stored), path
            assert whole(rotated, entry, cell).dtype == rotated.source.dtype(entry, cell)


def test_a_bfloat16_router_is_kept_in_float32() -> None:
    rotated = rotate_folder(tiny_folder("glm4_moe"), RotationRecipe())
    entry, cell = cells(rotated, "moe.ffn.router.weight")[0]
    old = rotated.source.inner.checkpoint
    meta = dataclasses.replace(old.tensors[cell.tensor], dtype=np.dtype(ml_dtypes.bfloat16))
    checkpoint = Checkpoint(folder=old.folder, tensors={**old.tensors, cell.tensor: meta}, unused_files=())
    inner = dataclasses.replace(rotated.source.inner, checkpoint=checkpoint)
    source = dataclasses.replace(rotated.source, inner=inner)
    assert source.kept_dtype(entry, cell) == np.float32
    other = dataclasses.replace(source.plan, changes={})
    assert dataclasses.replace(source, plan=other).kept_dtype(entry, cell) == ml_dtypes.bfloat16


def test_integers_cannot_turn() -> None:
    rotated = rotate_folder(tiny_quantized("glm4_moe", "w8a8-g128"), RotationRecipe())
    entry, cell = cells(rotated, "moe.ffn.down")[0]
    with pytest.raises(WeightsError, match=r"down_proj\.weight: its integers cannot be rotated"):
        whole(rotated, entry, cell, part="values")


class TestUntied:
    def test_the_head_is_the_embedding_with_the_final_gain(self) -> None:
        rotated = rotate_folder(tiny_folder("ernie4_5_moe"), RotationRecipe(tied="untie", not_run="drop"))
        assert rotated.untied and not rotated.files.manifest.config.tied_head
        assert open_model(tiny_folder("ernie4_5_moe")).manifest.config.tied_head
        plain = open_checkpoint(tiny_folder("ernie4_5_moe"))
        table, gain = (plain.read(name) for name in ("model.embed_tokens.weight", "model.norm.weight"))
        side = rotated.source.plan.changes["embed.weight"].columns
        assert side is not None
        for path, expected in (("embed.weight", table), ("head.weight", table * gain)):
            got = whole(rotated, *cells(rotated, path)[0])
            expected = expected.astype(np.float64) @ dense(side.rotation)
            atol = bound(expected)
            np.testing.assert_allclose(got, expected, rtol=0, atol=atol)

    def test_only_where_the_residual_stream_turns(self) -> None:
        recipe = RotationRecipe(residual=False, values=True)
        rotated = rotate_folder(tiny_folder("ernie4_5_moe"), recipe)
        assert not rotated.untied and rotated.files.manifest.config.tied_head
        assert rotated.config_json({"a": 1}) == {"a": 1}
        with pytest.raises(RecipeError, match="tied = 'untie': of no effect with residual = false"):
            rotate_folder(tiny_folder("ernie4_5_moe"), dataclasses.replace(recipe, tied="untie"))

    def test_a_head_given_again_is_left_out(self, tmp_path: Path) -> None:
        folder = tiny.write_checkpoint(tmp_path / "tied", tiny.CONFIGS["ernie4_5_moe"])
        table = open_checkpoint(folder).read("model.embed_tokens.weight")
        merge(folder, {"lm_head.weight": table})
        assert open_model(folder).not_loaded == ("lm_head.weight",)
        rotated = rotate_folder(folder, RotationRecipe(tied="untie"))
        assert rotated.files.not_loaded == ()
        assert open_model(write_rotated(rotated, tmp_path / "out")).manifest.config.tied_head is False

    def test_config_json(self) -> None:
        rotated = rotate_folder(tiny_folder("ernie4_5_moe"), RotationRecipe(tied="untie"))
        assert rotated.config_json({"tie_word_embeddings": True, "a": 1}) == {"tie_word_embeddings": False, "a": 1}
        inner = {"text_config": {"tie_word_embeddings": True, "b": 2}}
        assert rotated.config_json(inner) == {
            "tie_word_embeddings": False,
            "text_config": {"tie_word_embeddings": False, "b": 2},
        }


def merge(folder: Path, more: dict[str, np.ndarray]) -> None:
    """Adds tensors to a checkpoint."""
    old = open_checkpoint(folder)
    tensors = {**{name: old.read(name) for name in old.tensors}, **more}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    specs = [TensorSpec(name=name, dtype=array.dtype, shape=array.shape) for name, array in tensors.items()]
    with CheckpointWriter(folder, specs) as writer:
        for name, array in tensors.items():
            writer.write(name, array)


def test_parts_that_are_not_run_would_not_fit(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "vision", tiny.CONFIGS["kimi_k25"])
    merge(folder, {"mm_projector.proj.0.weight": np.ones((64, 32), np.float32)})
    files = open_model(folder)
    assert len(files.not_loaded) == 1
    with pytest.raises(RecipeError, match=r"1 tensors, such as mm_projector\.proj\.0\.weight, belong to parts"):
        rotate_files(files, RotationRecipe())
    assert rotate_files(files, RotationRecipe(not_run="drop")).files.not_loaded == ()
    # Values and latents stay inside a layer: nothing outside can see that they turn.
    kept = rotate_files(files, RotationRecipe(residual=False, values=True, latents=True))
    assert kept.files.not_loaded == files.not_loaded


class TestPrediction:
    """Blocks that predict further tokens are kept, but nothing runs them yet: checked by their equations."""

    FOLDER = "deepseek_v3"

    def test_dropped_with_their_parameters(self, tmp_path: Path) -> None:
        rotated = rotate_folder(tiny_folder(self.FOLDER), RotationRecipe(mtp="drop"))
        assert not any(entry.path.startswith("mtp.") for entry in rotated.files.manifest.entries)
        # config.json still names them, as releases without them do.
        data = json.loads((tiny_folder(self.FOLDER) / "config.json").read_text(encoding="utf-8"))
        assert rotated.config_json(data) == data
        assert open_model(write_rotated(rotated, tmp_path / "out")).mtp_layers == 0

    def test_fed_the_residual_stream_they_are_exact(self) -> None:
        rotated = rotate_folder(tiny_folder(self.FOLDER), RotationRecipe(mtp="residual"))
        plain, side = rotated.files.source, rotated.source.plan.changes["mtp.embed"].columns
        assert side is not None
        turn, rng = dense(side.rotation), np.random.default_rng(2)
        embedding, hidden, stream = rng.standard_normal((3, 64)) * np.array([[1.0], [30.0], [5.0]])

        def forward(source: Any, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            def weight(path: str) -> np.ndarray:
                entry = rotated.files.manifest[path]
                cell = next(iter(hub_cells(entry)))
                index = tuple(slice(0, size) for size in cell_shape(entry))
                return source.read(entry, cell, index).astype(np.float64)

            def norm(x: np.ndarray, path: str) -> np.ndarray:
                return x / np.sqrt(np.mean(x * x)) * weight(path)

            pair = [norm(embedding @ turn, "mtp.embed_norm.weight"), norm(hidden @ turn, "mtp.hidden_norm.weight")]
            projected = weight("mtp.projection") @ np.concatenate(pair)
            return projected, weight("mtp.head") @ norm(stream @ turn, "mtp.norm.weight")

        projected, logits = forward(plain, np.eye(64))
        turned, same = forward(rotated.source, turn)
        np.testing.assert_allclose(turned, projected @ turn, rtol=0, atol=bound(projected))
        np.testing.assert_allclose(same, logits, rtol=0, atol=bound(logits))


def test_the_same_bytes_every_time() -> None:
    first, second = (
        write_rotated(rotate_folder(tiny_folder("glm4_moe"), recipe_for("glm4_moe")), scratch() / f"rotated-{turn}")
        for turn in "ab"
    )
    for path in sorted(first.iterdir()):
        assert path.read_bytes() == (second / path.name).read_bytes()
