"""What commands share: options of the mesh and the engine, start-up of JAX, progress bars."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from jaxmoe import log
from jaxmoe.assets import asset
from jaxmoe.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from jaxmoe.engine.config import EngineConfig
    from jaxmoe.weights.load import ModelFiles

MOST_EMULATED_DEVICES = 64


def add_mesh_arguments(parser: argparse.ArgumentParser, *, devices: int = 1) -> None:
    """--devices, --plan, --no-compile-cache."""
    parser.add_argument(
        "--devices", type=int, default=devices, metavar="N", help="devices of the mesh; on CPU they are emulated"
    )
    parser.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="sharding plan (default: sharding/<family>/cpu8.toml, or that of sharding/default)",
    )
    parser.add_argument("--no-compile-cache", action="store_true", help="do not keep compiled programs on disk")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """--profile, --kv-cache, --max-context, --pages."""
    parser.add_argument("--profile", default="default", help="name in configs/serve or a .toml file")
    parser.add_argument("--kv-cache", choices=["int8", "float32", "bfloat16"], help="storage of keys and values")
    parser.add_argument("--max-context", type=int, metavar="TOKENS", help="longest prompt plus answer")
    parser.add_argument("--pages", type=int, metavar="N", help="pages of each device, one of them the null page")


def open_described(model: str) -> "ModelFiles":
    """A checkpoint folder, a config.json, or a preset of configs/models; the latter two have no weights.

    Raises:
        ConfigError: it is none of them.
        JaxMoeError: see `open_model`, `open_config`.
    """
    from jaxmoe.weights.load import open_model
    from jaxmoe.weights.preset import open_config

    path = Path(model)
    if path.is_dir():
        has_weights = any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))
        return open_model(path) if has_weights else open_config(path / "config.json")
    return open_config(path if path.suffix == ".json" else preset_path(model))


def preset_path(name: str) -> Path:
    """The config.json of a preset.

    Raises:
        ConfigError: no such preset; all are listed.
    """
    try:
        return asset("configs", "models", f"{name}.json")
    except ConfigError:
        known = sorted(entry.stem for entry in asset("configs", "models").glob("*.json"))
        raise ConfigError(f"{name} is no folder, no config.json and no preset; presets: {', '.join(known)}") from None


def checkpoint_folder(model: str) -> Path:
    """A folder for a command that needs weights.

    Raises:
        ConfigError: it is a preset's name.
    """
    path = Path(model)
    if not path.exists() and (asset("configs", "models") / f"{model}.json").exists():
        raise ConfigError(
            f"{model} is a preset, a config without weights, and this command needs weights: give the checkpoint's "
            "folder"
        )
    return path


def engine_config(options: argparse.Namespace) -> "EngineConfig":
    """The profile with the command line's overrides.

    Raises:
        ConfigError: the profile or the result is wrong.
    """
    from jaxmoe.engine.config import load_profile

    config = load_profile(options.profile)
    changes: dict[str, object] = {}
    if options.kv_cache is not None:
        changes["kv_cache"] = options.kv_cache
    if options.max_context is not None:
        changes["max_context_tokens"] = options.max_context
        changes["pages"] = max(config.pages, 1 - (-options.max_context // config.page_size))
    if options.pages is not None:
        changes["pages"] = options.pages
    return replace(config, **changes)  # type: ignore[arg-type]


def start_jax(options: argparse.Namespace) -> None:
    """Emulates CPU devices as asked, and keeps compiled programs between runs; before the first use of JAX.

    Raises:
        PlanError: the number of devices is out of range.
    """
    log.configure()
    # Only its tokenizers are used: that it finds no torch is no news.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    devices = options.devices.emulated if isinstance(options.devices, DeviceChoice) else options.devices
    if not 1 <= devices:
        raise PlanError(f"--devices {devices} is below 1")
    import jax

    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        if devices > MOST_EMULATED_DEVICES and os.environ.get("JAX_PLATFORMS", "") in ("", "cpu"):
            raise PlanError(f"--devices {devices}: at most {MOST_EMULATED_DEVICES} CPU devices are emulated")
        jax.config.update("jax_num_cpu_devices", min(devices, MOST_EMULATED_DEVICES))
    if not options.no_compile_cache:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jaxmoe" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def console() -> Console:
    """The console of a command's output."""
    return Console(highlight=False, soft_wrap=True)


class _Left(TimeRemainingColumn):
    """Time that is left; nothing where the whole is not known."""

    def render(self, task: Task) -> Text:
        """See the class."""
        return super().render(task) if task.total and not task.finished else Text("")


@contextmanager
def progress_bars(target: Console) -> Iterator[Progress]:
    """Progress bars: description, bar, percentage, time so far and time left."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), _Left())
    with Progress(*columns, console=target) as progress:
        yield progress


@contextmanager
def bar(progress: Progress, description: str) -> Iterator["Bar"]:
    """One bar; it is complete when the block ends without an error."""
    task = progress.add_task(description, total=None)
    yield Bar(progress, task)
    progress.update(task, total=1, completed=1)


class Bar:
    """A callable (done, total) that moves a bar."""

    def __init__(self, progress: Progress, task: TaskID):
        """Args: progress: the display; task: id of the bar."""
        self._progress = progress
        self._task = task

    def __call__(self, done: float | int, total: float | int) -> None:  # beartype takes no int for a float
        """Sets the bar."""
        self._progress.update(self._task, completed=done, total=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceChoice:
    """Devices that a command works on."""

    count: int | None = None
    """The first so many; None: as `ids` says, or all."""
    ids: tuple[int, ...] | None = None

    @property
    def emulated(self) -> int:
        """Devices that a CPU must emulate for this; 1 for all there are."""
        return max(self.ids) + 1 if self.ids else self.count or 1

    def choose(self) -> list[Any]:
        """The devices.

        Raises:
            PlanError: this process has too few.
        """
        import jax

        devices = jax.devices()
        wanted = self.ids if self.ids is not None else range(len(devices) if self.count is None else self.count)
        missing = [index for index in wanted if index >= len(devices)]
        if missing:
            raise PlanError(f"--devices: no device {missing[0]}; this process has {len(devices)}, counted from 0")
        return [devices[index] for index in wanted]


def parse_devices(text: str) -> DeviceChoice:
    """'8': the first eight; 'all'; '0,2,5': these.

    Raises:
        PlanError: it is none of these.
    """
    if text == "all":
        return DeviceChoice()
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise PlanError(f"--devices {text}: give a number, 'all', or a list such as 0,1,2") from None
    if len(numbers) == 1 and not text.endswith(","):
        if numbers[0] < 1:
            raise PlanError(f"--devices {text} is below 1")
        return DeviceChoice(count=numbers[0])
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise PlanError(f"--devices {text}: a list names each device once, from 0")
    return DeviceChoice(ids=numbers)


def parse_bytes(text: str) -> int:
    """'64GiB', '80GB', '512MiB' or a plain number of bytes.

    Raises:
        ConfigError: it is none of these.
    """
    units = {"GIB": 2**30, "MIB": 2**20, "GB": 10**9, "MB": 10**6, "B": 1, "": 1}
    digits = text.rstrip("GIBMgibm")
    try:
        return int(float(digits) * units[text[len(digits) :].upper()])
    except (ValueError, KeyError, OverflowError):
        raise ConfigError(f"{text!r} is no amount of memory; write 64GiB, 80GB or 512MiB") from None


def host_memory_bytes() -> int:
    """Physical memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
