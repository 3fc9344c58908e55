"""Tensor names: those of the released checkpoints and those that transformers' save_pretrained writes both fit.

`names/<type>.released.txt` and, where they differ, `.saved.txt`: one line a tensor, shape, layers; '#' stands for the
layer, '*' for each of the eight experts. Written by transformers 5.24.0 from the tiny configs; released names of hy_v4
and kimi_k25 after the deployments that load them.
"""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from jaxmoe.models.manifest import build_manifest
from jaxmoe.models.registry import read_config
from tests import tiny

FILES = sorted(Path(__file__).with_name("names").glob("*.txt"))
EXPERTS = 8


def listed(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape."""
    tensors = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"(\S+) (\[.*\])(?: ([\d,]+))?", line)
        assert match, line
        for layer in (match[3] or "-").split(","):
            name = match[1].replace("#", layer)
            for expert in range(EXPERTS) if ".*." in name else [0]:
                tensors[name.replace("*", str(expert))] = tuple(ast.literal_eval(match[2]))
    return tensors


def test_every_family_has_a_list() -> None:
    assert {path.name.split(".")[0] for path in FILES} == set(tiny.CONFIGS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_names_and_shapes(path: Path) -> None:
    """The model needs exactly the listed tensors, beside those that its family ignores."""
    tensors = listed(path)
    family, config = read_config(tiny.CONFIGS[path.name.split(".")[0]], path.name)
    manifest = build_manifest(family, replace(config, mtp_layers=0), tensors)
    needed = {name: entry.tensor_shape for entry in manifest.entries for _, name in entry.tensors()}
    ignored = {name for name in tensors if family.ignored is not None and re.match(family.ignored, name)}
    assert needed == {name: shape for name, shape in tensors.items() if name not in ignored}


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_our_own_names_are_found_again(family: str) -> None:
    """A quantised checkpoint, written under own names, gives the same names when it is opened."""
    rules, config = read_config(tiny.CONFIGS[family], family)
    released = build_manifest(rules, config)
    own = {name for entry in released.entries for _, name in entry.own_tensors()}
    again = build_manifest(rules, config, own)
    assert [entry.hub for entry in again.entries] == [entry.own for entry in released.entries]
    shapes = [entry.own_shape for entry in released.entries]
    assert [entry.tensor_shape for entry in again.entries] == shapes
    total = sum(1 for entry in released.entries for _ in entry.own_tensors())
    assert len(own) == total, "no two parameters share a tensor"
