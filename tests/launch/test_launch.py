"""The launchers are thin, are valid bash, and pass on what they are given."""

import os
import subprocess
from pathlib import Path

import pytest

_LAUNCH = Path(__file__).resolve().parents[2] / "launch"
_SCRIPTS = sorted(_LAUNCH.glob("*.sh"))


def _run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda path: path.name)
def test_a_launcher_is_thin_valid_bash(script: Path):
    lines = script.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 40
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert lines[-1].startswith("exec ")
    assert os.access(script, os.X_OK)
    assert _run("bash", "-n", script).stderr == ""


def test_every_launcher_is_in_the_readme():
    text = (_LAUNCH / "README.md").read_text(encoding="utf-8")
    assert [script.name for script in _SCRIPTS if f"`{script.name}`" not in text] == []


def test_local_passes_on_the_command_and_the_devices(tmp_path: Path):
    echo = tmp_path / "python"
    echo.write_text("#!/usr/bin/env bash\nprintf '<%s>' \"$@\"\n", encoding="utf-8")
    echo.chmod(0o755)
    run = _run(_LAUNCH / "local.sh", "8", "serve", "--model", "a b", PYTHON=str(echo))
    assert run.returncode == 0, run.stderr
    assert run.stdout == "<-m><jaxmoe><serve><--model><a b><--devices><8>"


@pytest.mark.parametrize("arguments", [(), ("8",), ("0", "serve"), ("serve", "8"), ("-1", "serve")])
def test_local_refuses_what_makes_no_sense(arguments: tuple[str, ...]):
    run = _run(_LAUNCH / "local.sh", *arguments, PYTHON="false")
    assert run.returncode == 2
    assert "usage:" in run.stderr
