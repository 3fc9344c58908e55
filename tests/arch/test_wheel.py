"""The wheel holds the package and its data, nothing else, and works where there is no checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_DATA = ("configs", "sharding")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def unpacked(wheel: Path) -> Path:
    """The folder that a wheel's files are in, as if installed."""
    folder = wheel.parent / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path, unpacked: Path):
    top = {path.name for path in unpacked.iterdir()}
    assert top == {"jaxmoe", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}
    assert not [name for name in _files(unpacked) if "__pycache__" in name or name.endswith((".pyc", ".so"))]


def test_every_module_is_in_the_wheel(unpacked: Path):
    expected = {path.relative_to(_ROOT / "jaxmoe").as_posix() for path in (_ROOT / "jaxmoe").rglob("*.py")}
    assert expected - _files(unpacked / "jaxmoe") == set()


@pytest.mark.parametrize("name", _DATA)
def test_the_data_folders_are_in_the_wheel(unpacked: Path, name: str):
    assert _files(unpacked / "jaxmoe" / "_assets" / name) == _files(_ROOT / name)


def test_assets_are_found_without_a_checkout(unpacked: Path, tmp_path: Path):
    code = f"""
import sys
sys.path.insert(0, {str(unpacked)!r})
from jaxmoe.assets import asset
from jaxmoe.errors import ConfigError
for name in {_DATA!r}:
    print(asset(name))
    print(asset(name, "README.md"))
try:
    asset("configs", "nothing.toml")
except ConfigError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assets = unpacked / "jaxmoe" / "_assets"
    *paths, message = run.stdout.splitlines()
    assert paths == [str(assets / part) for name in _DATA for part in (name, f"{name}/README.md")]
    assert str(assets / "configs" / "nothing.toml") in message
    assert str(unpacked / "configs" / "nothing.toml") in message
