"""Leaves: what a parameter becomes in memory, in float and quantised, on one device and on eight."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmoe.models.leaves import Leaf, assemble, entry_leaves, model_leaves, scale_name
from jaxmoe.models.manifest import Manifest
from jaxmoe.parallel.plan import Plan
from jaxmoe.quant.qarray import QArray
from jaxmoe.quant.scheme import Scheme, parse_scheme
from tests import tiny
from tests.running import plan_for

G32 = parse_scheme("w8a8-g32")
EXPERT = ("expert",)


def manifest_of(**changes: Any) -> Manifest:
    return tiny.manifest_of({**tiny.CONFIGS["glm4_moe"], **changes})


def plan(devices: int) -> Plan:
    return plan_for("glm4_moe", devices)


def leaves_of(path: str, devices: int, scheme: Scheme | None = None, dtype: Any = jnp.bfloat16, **changes: Any) -> Any:
    return entry_leaves(manifest_of(**changes)[path], scheme, plan(devices), dtype)


def test_a_float_parameter_is_one_leaf() -> None:
    (leaf,) = leaves_of("moe.ffn.gate", 8)
    assert (leaf.part, leaf.scheme, leaf.shape, leaf.dtype) == ("weight", None, (2, 8, 32, 64), jnp.bfloat16)
    assert leaf.spec == PartitionSpec(None, EXPERT, None, None)
    assert leaf.shard_bytes(plan(8)) == 2 * 1 * 32 * 64 * 2
    assert leaf.hub_name("x.weight") == "x.weight"


def test_a_quantised_parameter_is_two_leaves_that_split_alike() -> None:
    weight, scale = leaves_of("moe.ffn.gate", 8, G32)
    assert (weight.part, weight.shape, weight.dtype) == ("weight", (2, 8, 32, 64), jnp.int8)
    assert (scale.part, scale.shape, scale.dtype) == ("scale", (2, 8, 32, 2), jnp.float32)
    assert weight.spec == scale.spec == PartitionSpec(None, EXPERT, None, None)
    assert scale.axes == ("layers", "experts", "expert_ffn", "groups")
    assert (weight.shard_bytes(plan(8)), scale.shard_bytes(plan(8))) == (2 * 32 * 64, 2 * 32 * 2 * 4)
    assert scale.hub_name("x.weight") == scale_name("x.weight") == "x.weight_scale"


@pytest.mark.parametrize(
    ("scheme", "groups"), [("w8a8-g32", 3), ("w8a8-g64", 2), ("w8a8-g128", 1), ("w8a8-channel", 1)]
)
def test_the_last_group_may_be_ragged(scheme: str, groups: int) -> None:
    _, scale = leaves_of("dense.ffn.down", 1, parse_scheme(scheme))
    assert scale.shape == (1, 64, groups)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_case_11_the_router_stays_float32(dtype: Any) -> None:
    for leaf in model_leaves(manifest_of(), {}, plan(8), dtype):
        assert leaf.dtype == (jnp.float32 if leaf.entry.path.startswith("moe.ffn.router.") else dtype)


@pytest.mark.parametrize(("experts", "devices", "slots"), [(8, 8, 8), (10, 4, 12), (10, 8, 16), (5, 8, 8), (5, 1, 5)])
def test_uneven_experts_are_padded_to_equal_parts(experts: int, devices: int, slots: int) -> None:
    for leaf in leaves_of("moe.ffn.down", devices, G32, n_routed_experts=experts):
        assert leaf.shape[:2] == (2, slots)
        assert leaf.shard_bytes(plan(devices)) * devices == math.prod(leaf.shape) * leaf.dtype.itemsize
    # Routing knows logical experts only.
    (router,) = leaves_of("moe.ffn.router.weight", devices, n_routed_experts=experts)
    assert router.shape == (2, experts, 64) and router.spec == PartitionSpec(None, None, None)


@pytest.mark.parametrize(("vocab", "rows"), [(256, 256), (257, 264), (250, 256), (5, 8)])
@pytest.mark.parametrize("path", ["embed.weight", "head.weight"])
def test_an_odd_vocabulary_is_padded_to_equal_parts(path: str, vocab: int, rows: int) -> None:
    (leaf,) = leaves_of(path, 8, vocab_size=vocab)
    assert leaf.shape == (rows, 64) and leaf.spec == PartitionSpec(EXPERT, None)
    assert leaves_of(path, 1, vocab_size=vocab)[0].shape == (vocab, 64)


def test_everything_else_is_on_every_device() -> None:
    for leaf in model_leaves(manifest_of(), {}, plan(8), jnp.float32):
        split = {axis for axis, part in zip(leaf.axes, leaf.spec, strict=True) if part is not None}
        assert split == {"experts", "vocab"} & set(leaf.axes)
        assert split or leaf.shard_bytes(plan(8)) == math.prod(leaf.shape) * 4


def test_leaves_come_in_the_order_of_the_manifest() -> None:
    manifest = manifest_of()
    leaves = model_leaves(manifest, {"moe.ffn.up": G32, "dense.ffn.up": None}, plan(1), jnp.float32)
    names = [(leaf.entry.path, leaf.part) for leaf in leaves]
    expected = [(entry.path, "weight") for entry in manifest.entries]
    expected.insert(expected.index(("moe.ffn.up", "weight")) + 1, ("moe.ffn.up", "scale"))
    assert names == expected


def test_assemble_pairs_values_with_their_scales() -> None:
    schemes = {"moe.ffn.up": G32, "moe.ffn.down": parse_scheme("w8a16-channel")}
    leaves = model_leaves(manifest_of(), schemes, plan(1), jnp.float32)
    arrays = [np.full(leaf.shape, number, leaf.dtype) for number, leaf in enumerate(leaves)]
    weights = assemble(leaves, arrays)
    assert list(weights) == [entry.path for entry in manifest_of().entries]
    for path, weight in weights.items():
        first = next(i for i, leaf in enumerate(leaves) if leaf.entry.path == path)
        if path not in schemes:
            assert weight is arrays[first]
            continue
        assert isinstance(weight, QArray) and weight.scheme == schemes[path]
        assert weight.qvalue is arrays[first] and weight.scale is arrays[first + 1]


def test_assemble_needs_an_array_for_each_leaf() -> None:
    leaves: tuple[Leaf, ...] = model_leaves(manifest_of(), {}, plan(1), jnp.float32)
    with pytest.raises(ValueError, match="zip"):
        assemble(leaves, [np.zeros(())])
