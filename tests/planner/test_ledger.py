"""The ledger against the arrays that are really there."""

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxmoe.engine.config import EngineConfig
from jaxmoe.engine.llm import load_runner
from jaxmoe.errors import MemoryPlanError
from jaxmoe.nn.step import Layout
from jaxmoe.ops.pages import abstract_pages
from jaxmoe.parallel import mesh
from jaxmoe.planner.ledger import Item, Ledger, gib, kv_token_bytes, page_bytes, serve_items
from jaxmoe.weights.load import load_leaves, open_model
from tests import tiny
from tests.running import plan_for, scratch, tiny_folder, tiny_quantized

CONFIG = EngineConfig(page_size=4, pages=9, max_context_tokens=32)


@cache
def uneven_folder() -> Path:
    """Experts and vocabulary that no device count divides: padding has to be counted."""
    config = {**tiny.CONFIGS["glm4_moe"], "n_routed_experts": 6, "vocab_size": 251}
    return tiny.write_checkpoint(scratch() / "uneven-everything", config)


FOLDERS = {
    "glm4_moe": lambda: tiny_folder("glm4_moe"),
    "hunyuan_v1_moe": lambda: tiny_folder("hunyuan_v1_moe"),
    "w8a8": lambda: tiny_quantized("glm4_moe", "w8a8-g128"),
    "uneven": uneven_folder,
}


def items_of(folder: Path, devices: int, **changes: Any) -> list[Item]:
    files = open_model(folder)
    options = {"dtype": "float32", "kv_cache": "int8", "page_size": 4, "pages": 9, "layouts": CONFIG.layouts()}
    plan = plan_for(files.manifest.config.family, devices)
    return serve_items(files.manifest, files.schemes, plan, **{**options, **changes})


def total(items: list[Item], kind: str, size: str = "device_bytes") -> int:
    return sum(getattr(item, size) for item in items if item.kind == kind)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_exact(name: str, devices: int, dtype: str) -> None:
    files = open_model(FOLDERS[name]())
    plan = plan_for(files.manifest.config.family, devices)
    _, arrays = load_leaves(files, plan, mesh.make(plan.mesh), "float32" if dtype == "float32" else jax.numpy.bfloat16)
    real: dict[int, int] = defaultdict(int)
    for array in arrays:
        for shard in array.addressable_shards:
            real[shard.device.id] += shard.data.nbytes
    items = items_of(FOLDERS[name](), devices, dtype=dtype)
    assert len(real) == devices
    assert set(real.values()) == {total(items, "weights")}
    assert total(items, "weights", "host_bytes") == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("kv_cache", ["int8", "float32", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 8])
def test_pages_are_exact(devices: int, kv_cache: Any) -> None:
    config = EngineConfig(page_size=4, pages=9, max_context_tokens=32, kv_cache=kv_cache)
    runner = load_runner(open_model(tiny_folder("glm4_moe")), plan_for("glm4_moe", devices), config)
    items = items_of(tiny_folder("glm4_moe"), devices, kv_cache=kv_cache)
    assert total(items, "pages") * devices == runner.page_bytes == total(items, "pages", "host_bytes")


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_bytes_of_a_token(family: str) -> None:
    manifest = tiny.manifest_of(tiny.CONFIGS[family])
    layers, kv_heads, head_dim = 3, 2, 16
    assert kv_token_bytes(manifest, "int8") == layers * 2 * kv_heads * (head_dim + 4)
    assert kv_token_bytes(manifest, "float32") == layers * 2 * kv_heads * head_dim * 4
    assert kv_token_bytes(manifest, "bfloat16") == layers * 2 * kv_heads * head_dim * 2


def test_page_bytes_of_abstract_and_real_pools() -> None:
    abstract = abstract_pages(layers=3, pages=9, page_size=4, kv_heads=2, head_dim=16, dtype="int8")
    real = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), abstract)
    assert page_bytes(abstract) == page_bytes(real) == sum(a.nbytes for a in jax.tree.leaves(real))


def test_workspace_grows_with_the_layout() -> None:
    def work(*layouts: Layout) -> int:
        return total(items_of(tiny_folder("glm4_moe"), 8, layouts=layouts), "workspace")

    small = Layout(rows=1, chunk=64)
    for larger in (
        Layout(rows=2, chunk=64),
        Layout(rows=1, chunk=128),
        Layout(rows=1, chunk=2048, all_logits=True),
    ):
        assert work(larger) > work(small) > 0
        assert work(small, larger) == work(larger), "the largest layout counts"
    assert work(Layout(rows=64, chunk=1)) > work(Layout(rows=1, chunk=1))


def item(owner: str, device: int, host: int) -> Item:
    return Item(owner=owner, kind="weights", device_bytes=device, host_bytes=host)


def test_check_names_the_largest_items() -> None:
    mib = 2**20
    rows = (item("a", 5 * mib, 5 * mib), item("b", 1 * mib, 8 * mib), item("c", 3 * mib, 24 * mib))
    ledger = Ledger(devices=8, items=(*rows, item("d", 4 * mib, 6 * mib)))
    assert (ledger.device_bytes, ledger.host_bytes) == (13 * mib, 43 * mib)
    ledger.check(13 * mib, shared_host=False)
    ledger.check(43 * mib, shared_host=True)
    with pytest.raises(MemoryPlanError, match="needs 13.0 MiB, there are 13.0 MiB per device; largest: a .*, d .*, c "):
        ledger.check(13 * mib - 1, shared_host=False)
    with pytest.raises(MemoryPlanError, match="needs 43.0 MiB, there are 42.0 MiB on this host; largest: c .*, b "):
        ledger.check(42 * mib, shared_host=True)


def test_bytes_as_text() -> None:
    assert gib(2**30) == "1.00 GiB" and gib(2**30 - 2**20) == "1023.0 MiB" and gib(0) == "0.0 MiB"
