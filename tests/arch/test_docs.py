"""The commands in README.md are commands that work: the parser takes them, and .ci/run runs the tests with them."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^(?:<!-- command: (?P<name>\S+) -->\n+)?```bash\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks() -> list[tuple[str | None, list[str]]]:
    """(name in the comment before it, commands) of each bash block; a trailing backslash joins lines."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    blocks = []
    for match in _BLOCK.finditer(text):
        body = match["body"].replace("\\\n", " ")
        commands = [line for line in map(str.strip, body.splitlines()) if line and not line.startswith("#")]
        blocks.append((match["name"], commands))
    return blocks


def _named(name: str) -> str:
    found = [commands for block_name, commands in _blocks() if block_name == name]
    assert len(found) == 1, f"README.md has {len(found)} bash blocks after <!-- command: {name} -->, not one"
    assert len(found[0]) == 1, f"the block {name} in README.md holds {len(found[0])} commands, not one"
    return found[0][0]


def _ci_lines() -> list[str]:
    return [line.strip() for line in (_ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()]


def _programs(command: str) -> list[list[str]]:
    """The words of each program in a line: `a && uv run --extra demo jaxmoe b` -> [[a], [jaxmoe, b]]."""
    programs: list[list[str]] = [[]]
    for word in shlex.split(command, comments=True):
        if word in ("&&", "&", "||", "|", ";"):
            programs.append([])
        else:
            programs[-1].append(word)
    return [_without_uv(words) for words in programs if words]


def _without_uv(words: list[str]) -> list[str]:
    if words[:2] != ["uv", "run"]:
        return words
    words = words[2:]
    while words and words[0].startswith("-"):
        words = words[1:] if "=" in words[0] or words[0].startswith("--no-") else words[2:]
    return words


def _parse(arguments: list[str]) -> argparse.Namespace:
    from jaxmoe.cli import build_parser

    return build_parser().parse_args(arguments)


def test_ci_runs_the_test_command_of_the_readme():
    assert _named("tests") in _ci_lines()


def test_every_pytest_command_of_the_readme_is_run_by_ci():
    commands = [line for _, lines in _blocks() for line in lines]
    for command in commands:
        if any(words[0] == "pytest" for words in _programs(command)):
            assert command in _ci_lines()


def test_the_quickstart_command_is_understood(capsys: pytest.CaptureFixture[str]):
    program = _programs(_named("quickstart"))[-1]
    assert program[:2] == ["jaxmoe", "quickstart"]
    _parse(program[1:])
    with pytest.raises(SystemExit) as stop:
        _parse(["quickstart", "--help"])
    assert stop.value.code == 0
    assert "quickstart" in capsys.readouterr().out


def test_every_jaxmoe_command_of_the_readme_is_understood(capsys: pytest.CaptureFixture[str]):
    for _, commands in _blocks():
        for command in commands:
            for words in _programs(command):
                if words[0] != "jaxmoe":
                    continue
                try:
                    _parse(words[1:])
                except SystemExit as stop:
                    assert stop.code == 0, f"README.md: {command}: {capsys.readouterr().err}"


def test_uv_options_are_set_aside():
    assert _programs("pip install uv && uv run --extra demo jaxmoe quickstart") == [
        ["pip", "install", "uv"],
        ["jaxmoe", "quickstart"],
    ]
    assert _programs("uv run --extra=demo --no-dev pytest -q  # quick") == [["pytest", "-q"]]
