"""Builds an evaluator from checkpoint folders: a model, and its float baseline with float keys and values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jaxmoe.engine.config import EngineConfig
from jaxmoe.engine.llm import choose_plan, load_runner
from jaxmoe.engine.tokenizer import Tokenizer
from jaxmoe.evals.perplexity import Evaluator
from jaxmoe.evals.windows import cut_windows, read_text
from jaxmoe.models.leaves import Schemes
from jaxmoe.models.manifest import Manifest
from jaxmoe.nn.step import Layout
from jaxmoe.ops.pages import KVDtype
from jaxmoe.parallel.plan import Plan
from jaxmoe.planner.ledger import Item, serve_items
from jaxmoe.weights.load import ModelFiles

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalShape:
    """How an evaluation is cut into windows and steps."""

    windows: int = 8
    window_tokens: int = 2176
    chunk: int = 128
    """Tokens of one step and window."""

    def rows(self, pools: int) -> int:
        """Windows that a pool of pages holds at once."""
        return -(-self.windows // pools)

    def layout(self, pools: int) -> Layout:
        """Shape of the evaluation's step."""
        return Layout(rows=self.rows(pools), chunk=self.chunk, all_logits=True)

    def config(self, pools: int, kv_cache: KVDtype) -> EngineConfig:
        """Engine settings with just enough pages; a short chat can follow on the same runner."""
        base = EngineConfig(decode_rows=(1,), prefill_tokens=(64,))
        pages = 1 + self.rows(pools) * -(-self.window_tokens // base.page_size)
        return replace(base, pages=pages, max_context_tokens=self.window_tokens, kv_cache=kv_cache)

    def items(self, manifest: Manifest, schemes: Schemes, plan: Plan, kv_cache: KVDtype, label: str) -> list[Item]:
        """Ledger lines of one model under this evaluation."""
        pools = plan.ways("pages")
        config = self.config(pools, kv_cache)
        return serve_items(
            manifest,
            schemes,
            plan,
            dtype=config.dtype,
            kv_cache=kv_cache,
            page_size=config.page_size,
            pages=config.pages,
            layouts=[self.layout(pools)],
            table_tokens=config.table_width * config.page_size,
            label=label,
        )


def tokenize(texts: Sequence[Path], tokenizer: Tokenizer) -> dict[str, list[int]]:
    """Token ids of each text file, by name.

    Raises:
        ConfigError: a file is absent, empty or not UTF-8.
    """
    return {path.stem: tokenizer.encode_long(read_text(path)) for path in texts}


def make_windows(documents: dict[str, list[int]], shape: EvalShape) -> np.ndarray:
    """The windows of an evaluation.

    Raises:
        ConfigError: the text is too short.
    """
    return cut_windows(documents, length=shape.window_tokens, count=shape.windows)


def build_evaluator(
    files: ModelFiles,
    baseline: ModelFiles | None,
    *,
    shape: EvalShape,
    kv_cache: KVDtype,
    devices: int,
    plan: Path | None = None,
    progress: Progress | None = None,
) -> Evaluator:
    """Loads the model, and the baseline with float32 keys and values, on the same mesh; not yet compiled.

    Raises:
        JaxMoeError: see `choose_plan`, `load_runner`, `Evaluator`.
    """
    chosen = choose_plan(files.manifest.config.family, devices, plan)
    pools = chosen.ways("pages")
    runner = load_runner(files, chosen, shape.config(pools, kv_cache), progress)
    other = None
    if baseline is not None:
        other_plan = choose_plan(baseline.manifest.config.family, devices, plan)
        other = load_runner(baseline, other_plan, shape.config(pools, "float32"), progress)
    return Evaluator(runner, other, rows=shape.rows(pools), chunk=shape.chunk)
