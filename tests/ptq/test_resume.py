"""Runs that end early: what is done is kept, what is resumed has the same bytes, and nothing else is taken up."""

import errno
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import jaxmoe
from jaxmoe.errors import ConfigError, WeightsError
from jaxmoe.ptq import quantize as module
from jaxmoe.ptq.calib import Calibration
from jaxmoe.ptq.export import FORMATS
from jaxmoe.ptq.job import Job, make_job, prepare
from jaxmoe.ptq.quantize import Result, partial_folder, quantize
from jaxmoe.ptq.recipe import Recipe, load_recipe
from jaxmoe.weights.shards import ShardFiles
from tests.ptq.jobs import digest, finished, run, windows
from tests.running import tiny_folder

GLM = "glm4_moe"
PLAIN, SMOOTH = "w8a8-g128", "w8a8-g128-smooth"


class Stopped(Exception):
    """The run ends here."""


def stop_after(tasks: int, error: type[BaseException] = Stopped) -> Callable[[float, float, str], None]:
    """Progress that raises when so many tasks have ended."""
    seen: list[str] = []

    def progress(_done: float, _total: float, task: str) -> None:
        seen.append(task)
        if len(seen) == tasks:
            raise error

    return progress


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each task was done and recorded."""
    done: Counter[str] = Counter()
    write = module.write_text_atomic

    def recorded(path: Path, text: str) -> None:
        write(path, text)
        if path.parent.name == "tasks":
            done[json.loads(text)["task"]] += 1

    with patch.context() as inner:
        inner.setattr(module, "write_text_atomic", recorded)
        yield done


def job_of(recipe: str | Recipe, folder: Path | None = None) -> Job:
    return prepare(folder or tiny_folder(GLM), load_recipe(recipe) if isinstance(recipe, str) else recipe)


def data_of(recipe: str) -> Calibration | None:
    return windows() if recipe == SMOOTH else None


def stopped(out: Path, recipe: str = PLAIN, tasks: int = 20) -> None:
    """A run that ended after some tasks."""
    with pytest.raises(Stopped):
        quantize(job_of(recipe), out, calibration=data_of(recipe), progress=stop_after(tasks))
    assert not out.exists() and partial_folder(out).exists()


def check_finished(out: Path, recipe: str = PLAIN) -> None:
    assert digest(out) == digest(finished(GLM, recipe))
    assert [path.name for path in out.parent.iterdir()] == [out.name], "no partial folder stays behind"


def killed_often(out: Path, recipe: str, kills: int, seed: int, patch: pytest.MonkeyPatch, devices: int) -> None:
    """One run that is stopped at random moments until it is through."""
    generator = random.Random(seed)
    ended, before = None, 0
    with counted(patch) as done:
        for attempt in range(kills + 1):
            progress = stop_after(generator.randint(1, 2 * 97 // kills)) if attempt < kills else None
            before = sum(done.values())
            try:
                ended = quantize(
                    job_of(recipe),
                    out,
                    calibration=data_of(recipe),
                    devices=jax.devices()[: generator.randint(1, devices)],
                    resume=attempt > 0,
                    progress=progress,
                )
            except Stopped:
                assert not out.exists()
                continue
            break
    assert ended is not None and ended.resumed == before
    assert set(done.values()) == {1}, "no task was done twice"
    assert ended.summary.done_before == before and ended.summary.tasks == len(done) - before
    check_finished(out, recipe)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_moments(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time taken up where it stopped."""
    killed_often(tmp_path / "out", PLAIN, 20, seed, monkeypatch, devices=2)


@pytest.mark.slow
def test_calibrated_and_killed_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_often(tmp_path / "out", SMOOTH, 20, 3, monkeypatch, devices=3)


def test_calibrated_and_stopped_once(tmp_path: Path) -> None:
    """In the middle of a layer, and taken up on two devices."""
    stopped(tmp_path / "out", SMOOTH, tasks=70)
    ended = run(job_of(SMOOTH), tmp_path / "out", windows(), 2, resume=True)
    assert ended.resumed >= 70 and ended.coverage is not None
    check_finished(tmp_path / "out", SMOOTH)


def test_interrupted(tmp_path: Path) -> None:
    """Ctrl-C: the running task is finished, and all that is done is kept."""
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize(job_of(PLAIN), out, progress=stop_after(30, KeyboardInterrupt))
    ended = run(job_of(PLAIN), out, resume=True)
    assert 30 <= ended.resumed <= 32
    check_finished(out)


def test_without_being_told_to(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped(out)
    before = sorted(partial_folder(out).rglob("*"))
    with pytest.raises(ConfigError, match=f"{out}.partial holds an unfinished run; give --resume to take it up, or"):
        run(job_of(PLAIN), out)
    assert sorted(partial_folder(out).rglob("*")) == before
    shutil.rmtree(partial_folder(out))
    assert run(job_of(PLAIN), out).resumed == 0
    check_finished(out)


def test_nothing_to_take_up_is_a_fresh_run(tmp_path: Path) -> None:
    assert run(job_of(PLAIN), tmp_path / "out", resume=True).resumed == 0
    check_finished(tmp_path / "out")


def refused(out: Path, job: Job, names: str, calibration: Calibration | None = None) -> None:
    message = f"{out}.partial holds an unfinished run with another {names}; it cannot be taken up: remove it, or give"
    with pytest.raises(ConfigError, match=message):
        run(job, out, calibration, resume=True)
    assert partial_folder(out).exists() and not out.exists()


def test_another_job_is_not_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of what differs."""
    source = Path(shutil.copytree(tiny_folder(GLM), tmp_path / "source"))
    out = tmp_path / "out"
    with pytest.raises(Stopped):
        quantize(job_of(PLAIN, source), out, progress=stop_after(5))
    refused(out, job_of(load_recipe("w8a8-g64"), source), "recipe, layout")
    refused(out, job_of(replace(load_recipe(PLAIN), kv_cache="float32"), source), "recipe")
    refused(out, job_of(SMOOTH, source), "recipe, samples", windows())
    with monkeypatch.context() as patch:
        patch.setattr(jaxmoe, "__version__", "0.0.0")
        refused(out, job_of(PLAIN, source), "version")
    shard = next(source.glob("*.safetensors"))
    os.utime(shard, ns=(1, 1))
    refused(out, job_of(PLAIN, source), "source")


def test_other_samples_are_not_taken_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped(out, SMOOTH, 3)
    refused(out, job_of(SMOOTH), "samples", windows(seed=1))
    refused(out, job_of(SMOOTH), "samples", windows(samples=17))


def test_another_format_is_not_taken_up(tmp_path: Path) -> None:
    out, recipe = tmp_path / "out", load_recipe("w8a8-channel")
    plain = make_job(job_of(PLAIN).files, recipe, FORMATS["jaxmoe"])
    with pytest.raises(Stopped):
        quantize(plain, out, calibration=windows(), progress=stop_after(3))
    refused(out, replace(plain, output=FORMATS["ascendv1"]), "layout", windows())


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    partial = partial_folder(out)
    partial.mkdir()
    (partial / "precious.txt").write_text("mine", encoding="utf-8")
    for resume in (False, True):
        with pytest.raises(ConfigError, match=f"{partial} is in the way, and no run of this program left it; remove"):
            run(job_of(PLAIN), out, resume=resume)
    assert [path.name for path in partial.iterdir()] == ["precious.txt"] and not out.exists()


def test_lost_shards_are_not_replaced_by_zeros(tmp_path: Path) -> None:
    out = tmp_path / "out"
    stopped(out)
    next(partial_folder(out).rglob("*.safetensors.tmp")).unlink()
    with pytest.raises(ConfigError, match=f"{out}.partial has lost files of the unfinished run that it holds; remove"):
        run(job_of(PLAIN), out, resume=True)


def failing_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that meets a full disk from a call on."""
    left = [calls]

    def full(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*arguments)

    return full


@pytest.mark.parametrize(
    ("recipe", "target", "calls", "message"),
    [
        (PLAIN, "jaxmoe.weights.shards.write_at", 30, "cannot write tensor .* to .*out.partial"),
        (PLAIN, "jaxmoe.weights.shards.sync", 30, "cannot write to .*out.partial"),
        (SMOOTH, "jaxmoe.ptq.work.publish", 20, "cannot keep intermediate results in .*out.partial"),
    ],
)
def test_disk_full(
    recipe: str, target: str, calls: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One clear error; with space again the run goes on."""
    out = tmp_path / "out"
    place, name = target.rsplit(".", 1)
    with monkeypatch.context() as patch:
        patch.setattr(target, failing_after(calls, getattr(sys.modules[place], name)))
        with pytest.raises(WeightsError, match=f"{message}.*No space left on device"):
            run(job_of(recipe), out, data_of(recipe))
    assert not out.exists()
    assert run(job_of(recipe), out, data_of(recipe), resume=True).resumed > 0
    check_finished(out, recipe)


@pytest.mark.parametrize("step", ["publish", "side files", "report", "config", "rename", "unlink", "clean"])
def test_killed_at_the_end(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two steps of finishing: taken up, or complete under its final name with no file too many."""
    out = tmp_path / "out"

    def dying(where: str, function: Callable[..., Any], at: Callable[..., bool]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if step == where and at(*arguments):
                raise Stopped
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        of_name = {"report": "jaxmoe_report.json", "config": "config.json"}.get(step)
        patch.setattr(module, "_copy_side_files", dying("side files", module._copy_side_files, lambda *_: True))
        write = module.write_text_atomic
        patch.setattr(
            module,
            "write_text_atomic",
            lambda path, text: dying(step, write, lambda p, _: p.name == of_name)(path, text),
        )
        publish = ShardFiles.publish
        patch.setattr(ShardFiles, "publish", dying("publish", publish, lambda _: True))
        rename, unlink, remove = Path.rename, Path.unlink, shutil.rmtree
        patch.setattr(Path, "rename", dying("rename", rename, lambda _, target: target == out))
        patch.setattr(Path, "unlink", dying("unlink", unlink, lambda path, *_: path.name == "run.json"))
        patch.setattr(shutil, "rmtree", dying("clean", remove, lambda path, *_: path == partial_folder(out)))
        with pytest.raises(Stopped):
            run(job_of(PLAIN), out)
    if step in ("unlink", "clean"):
        assert digest(out) == digest(finished(GLM, PLAIN))
        with pytest.raises(ConfigError, match="exists already"):
            run(job_of(PLAIN), out, resume=True)
        return
    ended = run(job_of(PLAIN), out, resume=True)
    assert ended.summary.tasks == 0 and ended.resumed > 0
    check_finished(out)


def test_a_removed_result_is_not_made_of_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when the result had its name, and then somebody removed it: nothing is left to take up."""
    out = tmp_path / "out"
    unlink = Path.unlink

    def kept(path: Path, **options: bool) -> None:
        if path.name == "run.json":
            raise Stopped
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", kept)
        with pytest.raises(Stopped):
            run(job_of(PLAIN), out)
    shutil.rmtree(out)
    with pytest.raises(ConfigError, match="has lost files of the unfinished run"):
        run(job_of(PLAIN), out, resume=True)


def test_an_empty_folder_may_be_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(Stopped):
        quantize(job_of(PLAIN), out, progress=stop_after(40))
    assert not list(out.iterdir())
    result: Result = run(job_of(PLAIN), out, resume=True)
    assert result.resumed >= 40
    check_finished(out)
