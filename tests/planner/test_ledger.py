"""The ledger against the arrays that are really there."""

import math
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxmoe.assets import asset
from jaxmoe.engine.config import EngineConfig
from jaxmoe.engine.llm import load_runner
from jaxmoe.errors import MemoryPlanError, PlanError
from jaxmoe.models.leaves import model_leaves
from jaxmoe.nn.cache import cache_tables
from jaxmoe.nn.config import LatentAttentionConfig
from jaxmoe.nn.step import Layout
from jaxmoe.ops.index_select.xla import BLOCK_INDEX_KEYS
from jaxmoe.parallel import mesh
from jaxmoe.parallel.plan import Plan, load_plan
from jaxmoe.planner.ledger import Item, Ledger, gib, kv_token_bytes, serve_items
from jaxmoe.quant.scheme import parse_scheme
from jaxmoe.weights.load import load_leaves, open_model
from tests import tiny
from tests.running import plan_for, scratch, tiny_folder, tiny_quantized

CONFIG = EngineConfig(page_size=4, pages=9, max_context_tokens=32)
HY_V4_TABLES = [("latent", 6, 32), ("rope", 6, 8), ("index", 3, 16)]
"""Name, layers and width of the tiny model's tables."""


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
    "w4a8": lambda: tiny_quantized("glm4_moe", "w4a8-experts"),
    "gpt_oss": lambda: tiny_folder("gpt_oss"),
    "hy_v4": lambda: tiny_folder("hy_v4"),
}
PLANS = ("1", "8", "4x2")


def plan_of(family: str, plan: str) -> Plan:
    """One device, the family's plan on eight, or four parts of rows with heads split in two."""
    if plan == "4x2":
        return load_plan(asset("sharding", "default", "cpu8_tp2.toml"))
    return plan_for(family, int(plan))


def items_of(folder: Path, plan: str, **changes: Any) -> list[Item]:
    files = open_model(folder)
    options = {"dtype": "float32", "kv_cache": "int8", "page_size": 4, "pages": 9, "layouts": CONFIG.layouts()}
    chosen = plan_of(files.manifest.config.family, plan)
    return serve_items(files.manifest, files.schemes, chosen, **{**options, **changes})


def bytes_by_device(arrays: Any) -> dict[int, int]:
    """Bytes that are really there, of each device."""
    real: dict[int, int] = defaultdict(int)
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            real[shard.device.id] += shard.data.nbytes
    return real


def total(items: list[Item], kind: str, size: str = "device_bytes") -> int:
    return sum(getattr(item, size) for item in items if item.kind == kind)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", FOLDERS)
def test_weights_are_exact(name: str, plan: str, dtype: str) -> None:
    files = open_model(FOLDERS[name]())
    chosen = plan_of(files.manifest.config.family, plan)
    kind = "float32" if dtype == "float32" else jax.numpy.bfloat16
    _, arrays = load_leaves(files, chosen, mesh.make(chosen.mesh), kind)
    items = items_of(FOLDERS[name](), plan, dtype=dtype)
    real = bytes_by_device(arrays)
    assert len(real) == chosen.num_devices
    assert set(real.values()) == {total(items, "weights")}
    assert total(items, "weights", "host_bytes") == sum(array.nbytes for array in arrays)


def test_every_part_of_a_model_has_its_owner() -> None:
    items = [item.owner for item in items_of(FOLDERS["hy_v4"](), "8") if item.kind == "weights"]
    assert len(set(items)) == len(items)
    assert {"attention", "indexer", "hyper-connections", "routed experts", "shared experts", "router"} <= set(items)
    mtp = {item.owner: item.device_bytes for item in items_of(FOLDERS["hy_v4"](), "1")}["multi-token prediction"]
    entries = [entry for entry in open_model(FOLDERS["hy_v4"]()).manifest.entries if entry.path.startswith("mtp.")]
    assert mtp == sum(math.prod(entry.shape) for entry in entries) * 4 > 0


def test_splitting_heads_splits_attention() -> None:
    """Half of it on each device, norms and latents aside; of eight parts, four have the same."""

    def attention(plan: str) -> dict[str, int]:
        items = items_of(FOLDERS["glm4_moe"](), plan)
        return {item.owner: item.device_bytes for item in items if item.owner == "attention"}

    whole, half = attention("8")["attention"], attention("4x2")["attention"]
    norms = 3 * 2 * 16 * 4  # of queries and keys in each layer, head_dim float32 gains
    assert whole - norms == 2 * (half - norms)


def test_heads_that_cannot_be_split_are_refused() -> None:
    rows = Plan(
        mesh={"data": 1, "heads": 8},
        rules={"tokens": ("data",), "pages": ("data",), "experts": (), "vocab": (), "heads": ("heads",)},
    )
    files = open_model(FOLDERS["glm4_moe"]())
    options: dict[str, Any] = {"dtype": "float32", "kv_cache": "int8", "page_size": 4, "pages": 9}
    with pytest.raises(PlanError, match="4 attention heads cannot be split 8 ways"):
        serve_items(files.manifest, files.schemes, rows, layouts=CONFIG.layouts(), **options)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_of_quantised_weights_are_counted_in_bits(bits: int, group: int) -> None:
    """Of any shape: half a byte an element and a scale a group, which inputs of 64 and 32 make one or two."""
    manifest = tiny.manifest_of(tiny.CONFIGS["glm4_moe"])
    scheme, entry = parse_scheme(f"w{bits}a8-g{group}"), manifest["moe.ffn.up"]
    assert entry.shape == (2, 8, 32, 64)
    leaves = model_leaves(manifest, {entry.path: scheme}, plan_for("glm4_moe", 8), "float32")
    weight, scale = (leaf for leaf in leaves if leaf.entry.path == entry.path)
    elements = 2 * 8 * 32 * 64
    assert weight.nbytes == elements * bits // 8 and weight.shard_bytes(plan_for("glm4_moe", 8)) == weight.nbytes // 8
    assert scale.nbytes == elements // min(group, 64) * 4


@pytest.mark.parametrize("kv_cache", ["int8", "float32", "bfloat16"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["glm4_moe", "hy_v4"])
def test_pages_are_exact(family: str, plan: str, kv_cache: Any) -> None:
    """Latents and index keys are whole on each device along which heads are split; keys and values are not."""
    config = EngineConfig(page_size=4, pages=9, max_context_tokens=32, kv_cache=kv_cache)
    chosen = plan_of(family, plan)
    runner = load_runner(open_model(tiny_folder(family)), chosen, config)
    items = items_of(tiny_folder(family), plan, kv_cache=kv_cache)
    real = bytes_by_device(runner._pages)
    assert len(real) == chosen.num_devices
    assert set(real.values()) == {total(items, "pages")}
    assert total(items, "pages", "host_bytes") == sum(real.values())
    copies = chosen.ways("q_heads") if family == "hy_v4" else 1
    assert total(items, "pages", "host_bytes") == runner.page_bytes * copies


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_bytes_of_a_token(family: str) -> None:
    manifest = tiny.manifest_of(tiny.CONFIGS[family])
    config = manifest.config
    attention = config.attention
    if isinstance(attention, LatentAttentionConfig):
        vectors = config.layers * [attention.kv_lora, attention.rope_dim]
        if attention.indexer is not None:
            vectors += len(attention.indexer.full_layers) * [attention.indexer.head_dim]
    else:
        vectors = config.layers * 2 * attention.kv_heads * [attention.head_dim]
    assert kv_token_bytes(manifest, "int8") == sum(width + 4 for width in vectors)
    assert kv_token_bytes(manifest, "float32") == sum(vectors) * 4
    assert kv_token_bytes(manifest, "bfloat16") == sum(vectors) * 2
    halves = plan_of(family, "4x2")
    whole = isinstance(attention, LatentAttentionConfig)
    assert kv_token_bytes(manifest, "int8", halves) * (1 if whole else 2) == kv_token_bytes(manifest, "int8")


def test_bytes_of_a_token_by_hand() -> None:
    """glm4_moe: 3 layers of 2 key heads of 16; hy_v4: latents of 32 and 8 in 6 layers, index keys of 16 in 3."""
    assert kv_token_bytes(tiny.manifest_of(tiny.CONFIGS["glm4_moe"]), "int8") == 3 * 2 * 2 * (16 + 4)
    hy_v4 = tiny.manifest_of(tiny.CONFIGS["hy_v4"])
    assert [(table.name, table.layers, table.width) for table in cache_tables(hy_v4.config)] == HY_V4_TABLES
    assert kv_token_bytes(hy_v4, "int8") == sum(layers * (width + 4) for _, layers, width in HY_V4_TABLES)


def work(name: str, *layouts: Layout, **changes: Any) -> int:
    return total(items_of(FOLDERS[name](), "8", layouts=layouts, **changes), "workspace")


@pytest.mark.parametrize("name", ["glm4_moe", "hy_v4"])
def test_workspace_grows_with_the_layout(name: str) -> None:
    small = Layout(rows=1, chunk=64)
    for larger in (
        Layout(rows=2, chunk=64),
        Layout(rows=1, chunk=128),
        Layout(rows=1, chunk=2048, all_logits=True),
    ):
        assert work(name, larger) > work(name, small) > 0
        assert work(name, small, larger) == work(name, larger), "the largest layout counts"
    assert work(name, Layout(rows=64, chunk=1)) > work(name, Layout(rows=1, chunk=1))


def test_index_scores_are_workspace_when_there_is_a_choice() -> None:
    """Products of one block with all index heads; none where all keys may be chosen anyway; no more for more keys."""
    layout = Layout(rows=1, chunk=512)

    def with_table(name: str, tokens: int) -> int:
        return work(name, layout, table_tokens=tokens)

    assert with_table("glm4_moe", 1 << 20) == with_table("glm4_moe", 0)
    assert with_table("hy_v4", 8) == with_table("hy_v4", 0)
    one = with_table("hy_v4", 1 << 20)
    assert one == with_table("hy_v4", 2 << 20), "capacity costs nothing"
    assert one >= 512 * 32 * BLOCK_INDEX_KEYS * 4


def test_rows_that_are_equal_are_gathered_once() -> None:
    """Heads split over the mesh axis that also splits experts: its devices have the same rows."""
    layout = Layout(rows=1, chunk=512)
    apart, together = (
        total(items_of(FOLDERS["glm4_moe"](), plan, layouts=[layout]), "workspace") for plan in ("4x2", "8")
    )
    assert apart < 0.75 * together, "four parts of rows meet instead of eight"


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
