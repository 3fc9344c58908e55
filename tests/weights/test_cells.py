"""Views: a parameter's part of a tensor that others share, against plain numpy on the whole tensor."""

from pathlib import Path

import numpy as np
import pytest

from jaxmoe.models.family import View
from jaxmoe.models.manifest import Entry
from jaxmoe.quant.scheme import parse_scheme
from jaxmoe.weights.cells import Cell, Source, Stored, cell_shape, hub_cells, own_cells
from jaxmoe.weights.decoded import MxFp4, MxFp8
from jaxmoe.weights.encodings import Encoding, Integers, Plain
from jaxmoe.weights.safetensors import open_checkpoint
from tests.weights import encoders

LAYERS, EXPERTS, OUT, IN = (1, 3), 4, 6, 64
EACH = "layers.{layer}.experts.{expert}.gate.weight"
FUSED = "layers.{layer}.experts.gate_up"
VIEWS = {
    "whole": View(),
    "first": View(start=0, parts=2),
    "second": View(start=1, parts=2),
    "third": View(start=2, parts=3),
    "first, transposed": View(start=0, parts=2, transposed=True),
    "second, interleaved": View(start=1, parts=2, interleaved=True),
    "second, interleaved, transposed": View(start=1, parts=2, interleaved=True, transposed=True),
    "transposed": View(transposed=True),
    "unit axis": View(unit_axis=True),
    "unit axis, second": View(unit_axis=True, start=1, parts=2),
}


def entry_of(view: View, hub: str = FUSED, *, bias: bool = False) -> Entry:
    return Entry(
        path="moe.ffn.gate",
        shape=(len(LAYERS), EXPERTS, OUT) if bias else (len(LAYERS), EXPERTS, OUT, IN),
        axes=("layers", "experts", "expert_ffn") if bias else ("layers", "experts", "expert_ffn", "embed"),
        role="experts.bias" if bias else "experts.gate",
        float32=False,
        hub=hub,
        own=EACH,
        view=view,
        layers=LAYERS,
    )


def expected(tensor: np.ndarray, view: View, *, bias: bool = False) -> np.ndarray:
    """The part by the words of `View`."""
    if view.unit_axis:
        tensor = tensor[0]
    if view.transposed:
        tensor = np.swapaxes(tensor, -1, -2)
    if view.parts == 1:
        return tensor
    rows = tensor if bias else np.swapaxes(tensor, -1, -2)
    if view.interleaved:
        rows = rows[..., view.start :: view.parts]
    else:
        rows = np.split(rows, view.parts, axis=-1)[view.start]
    return rows if bias else np.swapaxes(rows, -1, -2)


def source_of(folder: Path, entry: Entry, encoding: Encoding, kind: str | None) -> tuple[Source, dict[str, np.ndarray]]:
    parts: dict[str, np.ndarray] = {}
    exact: dict[str, np.ndarray] = {}
    for seed, (_, name) in enumerate(entry.tensors()):
        rng = np.random.default_rng(seed)
        if kind is None:
            exact[name] = parts[name] = rng.standard_normal(entry.tensor_shape).astype(np.float32)
        else:
            more, exact[name] = encoders.WRITERS[kind](name, entry.tensor_shape, rng)
            parts.update(more)
    checkpoint = open_checkpoint(encoders.write(folder, {}, parts))
    stored = {name: Stored(shape=entry.tensor_shape, encoding=encoding) for name in exact}
    return Source(checkpoint=checkpoint, stored=stored), exact


def check(source: Source, entry: Entry, exact: dict[str, np.ndarray], *, bias: bool = False) -> None:
    cells = list(hub_cells(entry))
    assert [cell.position for cell in cells] == [(a, b) for a in range(2) for b in range(EXPERTS)]
    rng = np.random.default_rng(0)
    for cell in cells:
        whole = expected(exact[cell.tensor].astype(np.float32), entry.view, bias=bias)
        matrix = whole if cell.row is None else whole[cell.row]
        shape = cell_shape(entry)
        assert matrix.shape == shape
        for _ in range(6):
            index = tuple(slice(int(a := rng.integers(n)), int(rng.integers(a + 1, n + 1))) for n in shape)
            np.testing.assert_array_equal(source.read(entry, cell, index), matrix[index], err_msg=str((cell, index)))


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("hub", [FUSED, EACH], ids=["all experts", "one expert"])
def test_a_view_of_plain_floats(tmp_path: Path, view: View, hub: str) -> None:
    entry = entry_of(view, hub)
    source, exact = source_of(tmp_path / "x", entry, Plain(), None)
    check(source, entry, exact)


@pytest.mark.parametrize("name", ["whole", "first", "second, interleaved", "third", "unit axis, second"])
@pytest.mark.parametrize("view_kind", ["mxfp8", "mxfp4"])
def test_a_view_of_an_encoded_tensor(tmp_path: Path, name: str, view_kind: str) -> None:
    hub = f"{FUSED}_blocks" if view_kind == "mxfp4" else FUSED
    entry = entry_of(VIEWS[name], hub)
    source, exact = source_of(tmp_path / "x", entry, MxFp4() if view_kind == "mxfp4" else MxFp8(), view_kind)
    check(source, entry, exact)


@pytest.mark.parametrize("name", ["first, transposed", "transposed", "second, interleaved, transposed"])
def test_a_transposed_view_of_an_encoded_tensor(tmp_path: Path, name: str) -> None:
    """Groups run along the stored tensor's last axis, which is the parameter's outputs then."""
    entry = entry_of(VIEWS[name])
    source, exact = source_of(tmp_path / "x", entry, MxFp8(), "mxfp8")
    check(source, entry, exact)


@pytest.mark.parametrize("name", ["whole", "first", "second", "third", "second, interleaved"])
def test_a_view_of_biases(tmp_path: Path, name: str) -> None:
    entry = entry_of(VIEWS[name], bias=True)
    source, exact = source_of(tmp_path / "x", entry, Plain(), None)
    check(source, entry, exact, bias=True)


@pytest.mark.parametrize("name", ["whole", "second", "second, interleaved"])
def test_a_view_of_integers_and_their_scales(tmp_path: Path, name: str) -> None:
    entry = entry_of(VIEWS[name])
    encoding = Integers(scheme=parse_scheme("w8a16-g32"), scale_dtypes=(np.dtype(np.float16),))
    source, _ = source_of(tmp_path / "x", entry, encoding, "int8-groups")
    for cell in hub_cells(entry):
        assert cell.row is not None
        for part, tensor in (("values", cell.tensor), ("scale", f"{cell.tensor}_scale")):
            whole = expected(source.checkpoint.read(tensor), entry.view)[cell.row]
            index = (slice(1, 5), slice(0, whole.shape[-1] // 2))
            found = source.read(entry, cell, index, part)  # type: ignore[arg-type]
            np.testing.assert_array_equal(found, whole[index].astype(found.dtype))


def test_own_cells_have_tensors_of_their_own() -> None:
    entry = entry_of(VIEWS["second"])
    own = list(own_cells(entry))
    assert own[5] == Cell(position=(1, 1), tensor="layers.3.experts.1.gate.weight", row=None)
    assert [cell.position for cell in own] == [cell.position for cell in hub_cells(entry)]
    assert next(iter(hub_cells(entry))).label == "layers.1.experts.gate_up[0]"
