"""Runner: owns the weights' leaves, the donated pages and one compiled program per layout."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmoe.engine.config import EngineConfig
from jaxmoe.engine.heap import trim_heap
from jaxmoe.errors import EngineError
from jaxmoe.models.bind import bind
from jaxmoe.models.leaves import Leaf, assemble
from jaxmoe.models.manifest import Manifest
from jaxmoe.nn.cache import cache_tables
from jaxmoe.nn.step import Layout, StepBatch
from jaxmoe.ops.pages import Pages, Table, abstract_pages, fill_pages, pages_bytes
from jaxmoe.ops.sample import sample
from jaxmoe.parallel.exchange import ParallelContext
from jaxmoe.parallel.plan import Plan

_POISON_DATA = 127
_POISON_SCALE = float("nan")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_k", "top_p", "seeds", "counters"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Sampling parameters of each row, [shards * rows]; see ops.sample."""

    temperature: Any
    top_k: Any
    top_p: Any
    seeds: Any
    counters: Any

    @classmethod
    def greedy(cls, rows: int) -> "SamplingBatch":
        """Greedy for every row; entries are overwritten in place for rows that draw."""
        return cls(
            temperature=np.zeros(rows, np.float32),
            top_k=np.zeros(rows, np.int32),
            top_p=np.ones(rows, np.float32),
            seeds=np.zeros(rows, np.uint32),
            counters=np.zeros(rows, np.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Result of a generation step, on the host."""

    tokens: np.ndarray
    """[shards, rows] int32."""
    finite: np.ndarray
    """[shards, rows] bool: whether all logits of the row were finite."""


@partial(jax.tree_util.register_dataclass, data_fields=["logits", "expert_ids"], meta_fields=[])
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Result of an evaluation step, on the devices (or its shapes)."""

    logits: Any
    """[shards * tokens, vocab] float32, rows split over the devices."""
    expert_ids: Any
    """[moe_layers, shards * tokens, top_k] int32 logical experts."""


class Runner:
    """Runs steps of a loaded model.

    Programs are compiled ahead of time; a step of an unknown layout is an error, never a compilation.
    """

    def __init__(
        self,
        *,
        manifest: Manifest,
        leaves: tuple[Leaf, ...],
        arrays: list[jax.Array],
        plan: Plan,
        mesh: Mesh,
        config: EngineConfig,
    ):
        """Takes the loaded leaves and allocates zeroed pages."""
        self.manifest = manifest
        self.plan = plan
        self.mesh = mesh
        self.config = config
        self.shards = plan.ways("pages")
        """Page pools: groups of devices that share rows. Heads may be split within a group."""
        self._leaves = leaves
        self._arrays = arrays
        self._parallel = ParallelContext.from_plan(plan)
        self._token_spec = plan.spec(("tokens",))
        self._programs: dict[Layout, Callable[..., Any]] = {}
        self._pages = self._allocate_pages()
        self._fill: Callable[..., Any] | None = None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts that have a program."""
        return tuple(sorted(self._programs))

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def _page_partitions(self) -> Pages:
        """How each array of the pages is split."""
        return {
            spec.name: Table(
                data=self.plan.spec(spec.axes), scale=self.plan.spec(spec.axes) if self._quantized_pages else None
            )
            for spec in cache_tables(self.manifest.config)
        }

    @property
    def _quantized_pages(self) -> bool:
        return self.config.kv_cache == "int8"

    def _page_specs(self) -> Pages:
        abstract = abstract_pages(
            cache_tables(self.manifest.config),
            pages=self.config.pages * self.shards,
            page_size=self.config.page_size,
            dtype=self.config.kv_cache,
        )
        return jax.tree.map(
            lambda array, spec: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._sharding(spec)),
            abstract,
            self._page_partitions(),
        )

    def _allocate_pages(self) -> Pages:
        specs = self._page_specs()
        zeros = jax.jit(
            lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), specs),
            out_shardings=jax.tree.map(lambda a: a.sharding, specs),
        )
        return zeros()

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages of all devices."""
        return pages_bytes(self._pages)

    def compile(self, layouts: Seq[Layout], progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles programs that do not exist yet, two at a time; lowering stays on this thread."""
        new = [layout for layout in layouts if layout not in self._programs]
        lowered = [(layout, self._traced(layout).lower()) for layout in new]
        with ThreadPoolExecutor(max_workers=2) as pool:
            pending = [(layout, pool.submit(stage.compile)) for layout, stage in lowered]
            for done, (layout, future) in enumerate(pending):
                self._programs[layout] = future.result()
                if progress is not None:
                    progress(done + 1, len(pending))
        trim_heap()

    def _traced(self, layout: Layout) -> Any:
        tokens = self._token_spec
        page_specs = self._page_partitions()
        out = (tokens, PartitionSpec(None, *tokens)) if layout.all_logits else (tokens, tokens)
        step = jax.shard_map(
            partial(self._step, layout),
            mesh=self.mesh,
            in_specs=([leaf.spec for leaf in self._leaves], page_specs, tokens, tokens),
            out_specs=(*out, page_specs),
            check_vma=False,
        )
        batch, sampling = self._abstract_batch(layout)
        arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in self._arrays]
        return jax.jit(step, donate_argnums=1).trace(arrays, self._page_specs(), batch, sampling)

    def jaxpr(self, layout: Layout) -> Any:
        """The step of a layout as a jaxpr, for the checks of ops.lint; compiles nothing."""
        return self._traced(layout).jaxpr

    def _abstract_batch(self, layout: Layout) -> tuple[StepBatch, SamplingBatch]:
        rows, tokens, shards = layout.rows, layout.tokens, self.shards
        sharding = self._sharding(self._token_spec)

        def abstract(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((shards * shape[0], *shape[1:]), dtype, sharding=sharding)

        batch = StepBatch(
            token_ids=abstract((tokens,), jnp.int32),
            positions=abstract((tokens,), jnp.int32),
            page_ids=abstract((tokens,), jnp.int32),
            slots=abstract((tokens,), jnp.int32),
            page_table=abstract((rows, self.config.table_width), jnp.int32),
            zero_pages=abstract((self.config.zeroed(layout),), jnp.int32),
            last_token=abstract((rows,), jnp.int32),
        )
        sampling = jax.tree.map(lambda a: abstract((rows,), a.dtype), SamplingBatch.greedy(rows))
        return batch, sampling

    def _step(
        self, layout: Layout, arrays: list[jax.Array], pages: Pages, batch: StepBatch, sampling: SamplingBatch
    ) -> tuple[jax.Array, jax.Array, Pages]:
        model = bind(self.manifest, assemble(self._leaves, arrays))
        dtype = jnp.dtype(self.config.dtype)
        hidden, pages, ids = model(batch, pages, layout=layout, parallel=self._parallel, dtype=dtype)
        if layout.all_logits:
            return model.logits(hidden, self._parallel), ids, pages
        logits = model.logits(hidden[batch.last_token], self._parallel)
        with jax.named_scope("sample"):
            tokens = sample(
                logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.seeds, sampling.counters
            )
        return tokens, jnp.all(jnp.isfinite(logits), axis=-1), pages

    def _run(self, layout: Layout, batch: StepBatch, sampling: SamplingBatch) -> tuple[jax.Array, jax.Array]:
        program = self._programs.get(layout)
        if program is None:
            raise EngineError(f"no program for {layout}; compiled are {', '.join(map(str, self.layouts)) or 'none'}")
        sharding = self._sharding(self._token_spec)
        batch, sampling = jax.device_put((batch, sampling), sharding)
        first, second, self._pages = program(self._arrays, self._pages, batch, sampling)
        return first, second

    def generate(self, layout: Layout, batch: StepBatch, sampling: SamplingBatch) -> Generated:
        """Runs a generation step and waits for its tokens.

        Raises:
            EngineError: the layout has no program.
        """
        tokens, finite = self._run(layout, batch, sampling)
        shape = (self.shards, layout.rows)
        return Generated(tokens=np.asarray(tokens).reshape(shape), finite=np.asarray(finite).reshape(shape))

    def evaluate(self, layout: Layout, batch: StepBatch) -> Evaluated:
        """Runs an evaluation step; its result stays on the devices.

        Raises:
            EngineError: the layout has no program or gives no logits of all tokens.
        """
        if not layout.all_logits:
            raise EngineError(f"{layout} does not return logits of all tokens")
        logits, ids = self._run(layout, batch, SamplingBatch.greedy(self.shards * layout.rows))
        return Evaluated(logits=logits, expert_ids=ids)

    def abstract_evaluated(self, layout: Layout) -> Evaluated:
        """Shapes and splits of `evaluate`'s result."""
        config, tokens = self.manifest.config, self.shards * layout.tokens
        ids = (config.moe_layers, tokens, config.moe.router.top_k)
        return Evaluated(
            logits=jax.ShapeDtypeStruct((tokens, config.vocab), jnp.float32, sharding=self._sharding(self._token_spec)),
            expert_ids=jax.ShapeDtypeStruct(
                ids, jnp.int32, sharding=self._sharding(PartitionSpec(None, *self._token_spec))
            ),
        )

    def abstract_tokens(self, layout: Layout) -> jax.ShapeDtypeStruct:
        """Shape and split of one int32 a token."""
        return jax.ShapeDtypeStruct(
            (self.shards * layout.tokens,), jnp.int32, sharding=self._sharding(self._token_spec)
        )

    def put_tokens(self, values: np.ndarray) -> jax.Array:
        """One value a token, split over the devices as tokens are."""
        return jax.device_put(values, self._sharding(self._token_spec))

    def poison(self, page_ids: Seq[Seq[int]]) -> None:
        """Debug mode: overwrites free pages with garbage and NaN scales; correct output must not change.

        Args:
            page_ids: for each device, its free pages. The first call compiles.
        """
        most = self.config.pages
        ids = np.full((self.shards, most), most, np.int32)
        for shard, pages in enumerate(page_ids):
            ids[shard, : len(pages)] = pages
        if self._fill is None:
            pages_spec = self._page_partitions()
            fill = jax.shard_map(
                lambda pages, ids: fill_pages(pages, ids, _POISON_DATA, _POISON_SCALE),
                mesh=self.mesh,
                in_specs=(pages_spec, self._token_spec),
                out_specs=pages_spec,
                check_vma=False,
            )
            self._fill = jax.jit(fill, donate_argnums=0)
        self._pages = self._fill(self._pages, jax.device_put(ids.reshape(-1), self._sharding(self._token_spec)))
