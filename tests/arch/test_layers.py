"""The architecture as a test: who may import whom, what stays pure, how long a module may be."""

import ast
import dataclasses
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]

_TIERS: tuple[frozenset[str], ...] = (
    frozenset({"", "axes", "errors", "decode", "assets", "log"}),
    frozenset({"quant"}),
    frozenset({"ops", "parallel"}),
    frozenset({"nn"}),
    frozenset({"models"}),
    frozenset({"weights", "planner"}),
    frozenset({"ptq", "engine"}),
    frozenset({"server", "evals", "bench", "demo"}),
    frozenset({"cli", "commands", "__main__"}),
)
"""Parts of jaxmoe from the bottom up ("" is jaxmoe/__init__.py). A part imports those below, and in its own
tier what does not import it back (the top tier is one program and may do as it likes)."""

_SIBLINGS: tuple[frozenset[str], ...] = (frozenset({"ops", "parallel"}), frozenset({"ptq", "engine"}))
"""Parts of one tier that never import each other."""

_PURE = frozenset().union(*_TIERS[:5]) - {"log", "__main__"}
"""Parts below weights: they do not open files, read the environment or look at the clock."""

_MAY_IMPORT_TRANSFORMERS = ("engine/llm.py", "engine/tokenizer.py", "server/chat.py", "commands/", "cli.py")
_MAY_MAKE_MESH = ("parallel/mesh.py",)
_WITHOUT_JAX = ("weights/safetensors.py", "weights/writer.py")

_MAX_LINES = 400
_MAX_KERNEL_LINES = 600


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Module:
    """One source file. `path` is relative to the package folder; `part` is its first component."""

    path: str
    name: str
    part: str
    text: str
    tree: ast.Module


def _modules(package: Path) -> dict[str, _Module]:
    found = {}
    for file in sorted(package.rglob("*.py")):
        relative = file.relative_to(package)
        if "__pycache__" in relative.parts:
            continue
        parts = relative.with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        text = file.read_text(encoding="utf-8")
        name = ".".join((package.name, *parts))
        found[name] = _Module(
            path=relative.as_posix(), name=name, part=parts[0] if parts else "", text=text, tree=ast.parse(text)
        )
    return found


def _imports(module: _Module, nodes: Iterator[ast.AST]) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name) of each import; name is None for `import module`. Relative imports are made absolute."""
    is_package = module.path.endswith("__init__.py")
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = module.name.split(".")
                base = parts[: len(parts) - node.level + is_package]
                source = ".".join([*base, source] if source else base)
            for alias in node.names:
                yield node.lineno, source, alias.name


def _at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not in functions, not under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _at_import_time(child)


def _is_of(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _tier(part: str) -> int | None:
    return next((index for index, tier in enumerate(_TIERS) if part in tier), None)


def _target_part(source: str, name: str | None, package: str, parts: frozenset[str]) -> str:
    """The part of jaxmoe that an import reaches: `from jaxmoe import engine` reaches engine."""
    rest = source.removeprefix(package).lstrip(".")
    if rest:
        return rest.split(".")[0]
    return name if name in parts else ""


def _layer_problems(modules: dict[str, _Module], package: str) -> Iterator[str]:
    parts = frozenset(module.part for module in modules.values())
    edges: dict[str, set[str]] = {part: set() for part in parts}
    for module in modules.values():
        own = _tier(module.part)
        if own is None:
            yield f"{module.path}: {module.part} is in no tier; add it to _TIERS and to the design"
            continue
        for line, source, name in _imports(module, ast.walk(module.tree)):
            if not _is_of(source, package):
                continue
            target = _target_part(source, name, package, parts)
            reached = _tier(target)
            if target == module.part or reached is None:
                continue
            edges[module.part].add(target)
            if reached > own:
                yield f"{module.path}:{line}: {module.part or package} imports {target}, which is above it"
            if any({module.part, target} <= siblings for siblings in _SIBLINGS):
                yield f"{module.path}:{line}: {module.part} imports its sibling {target}"
    for part, targets in sorted(edges.items()):
        if part in _TIERS[-1]:
            continue
        for target in sorted(targets):
            if part < target and part in edges.get(target, ()) and _tier(part) == _tier(target):
                yield f"{part} and {target} import each other"


def _import_problems(modules: dict[str, _Module]) -> Iterator[str]:
    for module in modules.values():
        for line, source, name in _imports(module, ast.walk(module.tree)):
            if _is_of(source, "jax._src") or (source, name) == ("jax", "_src"):
                yield f"{module.path}:{line}: jax._src is private"
            if _is_of(source, "transformers") and not module.path.startswith(_MAY_IMPORT_TRANSFORMERS):
                yield f"{module.path}:{line}: transformers belongs in {', '.join(_MAY_IMPORT_TRANSFORMERS)}"
            if _is_of(source, "jax") and name == "make_mesh" and module.path not in _MAY_MAKE_MESH:
                yield f"{module.path}:{line}: make_mesh belongs in {', '.join(_MAY_MAKE_MESH)}"
            if module.part == "server" and _is_of(source, "jax"):
                yield f"{module.path}:{line}: the server never imports jax"
            if module.part in _PURE and (
                _is_of(source, "time") or (source, name) in (("os", "environ"), ("os", "getenv"))
            ):
                yield f"{module.path}:{line}: {source}: below weights nothing reads the clock or the environment"


def _use_problems(modules: dict[str, _Module]) -> Iterator[str]:
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute):
                dotted = ast.unparse(node)
                if dotted == "jax._src":
                    yield f"{module.path}:{node.lineno}: jax._src is private"
                if dotted.startswith("jax.") and node.attr == "make_mesh" and module.path not in _MAY_MAKE_MESH:
                    yield f"{module.path}:{node.lineno}: make_mesh belongs in {', '.join(_MAY_MAKE_MESH)}"
                if module.part in _PURE and dotted in ("os.environ", "os.getenv"):
                    yield f"{module.path}:{node.lineno}: below weights nothing reads the environment"
            if isinstance(node, ast.Call) and module.part in _PURE and ast.unparse(node.func) in ("open", "io.open"):
                yield f"{module.path}:{node.lineno}: below weights nothing opens a file"


def _shape_problems(modules: dict[str, _Module]) -> Iterator[str]:
    for module in modules.values():
        if not (ast.get_docstring(module.tree) or "").strip():
            yield f"{module.path}: no docstring"
        allowed = _MAX_KERNEL_LINES if module.part == "ops" else _MAX_LINES
        lines = len(module.text.splitlines())
        if lines > allowed:
            yield f"{module.path}: {lines} lines, {allowed} at most"
        if "utils" in module.name.split("."):
            yield f"{module.path}: a name that says nothing; put the function where it is used"


def _closure(start: str, modules: dict[str, _Module], package: str) -> dict[str, list[str]]:
    """The modules of the package that importing `start` runs -> the outside modules each of them imports."""
    todo, found = [start], {}
    while todo:
        name = todo.pop()
        if name in found or name not in modules:
            continue
        outside = found[name] = []
        parents = name.split(".")
        todo += [".".join(parents[:depth]) for depth in range(1, len(parents))]
        for _, source, item in _imports(modules[name], _at_import_time(modules[name].tree)):
            if _is_of(source, package):
                todo += [source, f"{source}.{item}"]
            else:
                outside.append(source)
    return found


def _jax_problems(modules: dict[str, _Module], package: str) -> Iterator[str]:
    heavy = ("jax", "jaxlib", "flax", "orbax")
    for path in _WITHOUT_JAX:
        start = ".".join((package, *Path(path).with_suffix("").parts))
        for name, outside in sorted(_closure(start, modules, package).items()):
            for source in outside:
                if any(_is_of(source, one) for one in heavy):
                    yield f"{path} must not need JAX, but {name} imports {source}"


def _problems(package: Path) -> list[str]:
    modules = _modules(package)
    return [
        *_layer_problems(modules, package.name),
        *_import_problems(modules),
        *_use_problems(modules),
        *_shape_problems(modules),
        *_jax_problems(modules, package.name),
    ]


def test_the_package_keeps_its_architecture():
    problems = _problems(_ROOT / "jaxmoe")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", _WITHOUT_JAX)
def test_files_are_read_and_written_without_jax(path: str):
    if not (_ROOT / "jaxmoe" / path).exists():
        pytest.fail(f"jaxmoe/{path} is gone: correct _WITHOUT_JAX")
    name = "jaxmoe." + path.removesuffix(".py").replace("/", ".")
    code = f"import sys; sys.modules['jax'] = sys.modules['flax'] = None; import {name}"
    run = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def _tree(folder: Path, files: dict[str, str]) -> Path:
    """A package named jaxmoe with the given files, and a docstring in each that has none."""
    package = folder / "jaxmoe"
    for path, text in {"__init__.py": "", **files}.items():
        file = package / path
        file.parent.mkdir(parents=True, exist_ok=True)
        text = textwrap.dedent(text)
        file.write_text(text if text.startswith(("'", "#")) else f"'''Doc.'''\n{text}", encoding="utf-8")
    return package


_WRONG = {
    "upward": ("nn/a.py", "from jaxmoe.models import family", "which is above it"),
    "upward by name": ("quant/a.py", "from jaxmoe import nn", "which is above it"),
    "upward, relative": ("ops/linear/a.py", "from ...nn import mlp", "which is above it"),
    "upward, in a function": ("planner/a.py", "def f():\n    import jaxmoe.engine.llm", "which is above it"),
    "siblings": ("ops/a.py", "from jaxmoe.parallel.mesh import x", "ops imports its sibling parallel"),
    "siblings above": ("engine/a.py", "from jaxmoe.ptq import x", "engine imports its sibling ptq"),
    "unknown part": ("misc/a.py", "", "misc is in no tier"),
    "private jax": ("ops/a.py", "from jax._src import core", "jax._src is private"),
    "private jax by name": ("ops/a.py", "from jax import _src", "jax._src is private"),
    "private jax in use": ("ops/a.py", "import jax\njax._src.core.x()", "jax._src is private"),
    "mesh": ("engine/a.py", "import jax\njax.make_mesh((2,), ('x',))", "make_mesh belongs in"),
    "mesh by name": ("engine/a.py", "from jax import make_mesh", "make_mesh belongs in"),
    "transformers": ("models/a.py", "def f():\n    import transformers.models", "transformers belongs in"),
    "jax in the server": ("server/a.py", "import jax.numpy as jnp", "the server never imports jax"),
    "open": ("nn/a.py", "open('x')", "nothing opens a file"),
    "environment": ("parallel/a.py", "import os\nos.environ['X']", "reads the environment"),
    "environment by name": ("parallel/a.py", "from os import environ", "reads the clock or the environment"),
    "clock": ("models/a.py", "import time", "reads the clock or the environment"),
    "no docstring": ("nn/a.py", "# nothing", "no docstring"),
    "too long": ("nn/a.py", "x = 1\n" * 400, "401 lines, 400 at most"),
    "kernel too long": ("ops/a.py", "x = 1\n" * 600, "601 lines, 600 at most"),
    "utils": ("nn/utils.py", "", "a name that says nothing"),
}


@pytest.mark.parametrize("case", _WRONG)
def test_a_breach_is_caught(tmp_path: Path, case: str):
    path, text, message = _WRONG[case]
    others = {f"{part}/__init__.py": "" for part in ("nn", "models", "engine", "ptq", "parallel", "ops")}
    assert _problems(_tree(tmp_path, others)) == []
    problems = _problems(_tree(tmp_path, {**others, path: text}))
    assert len(problems) == 1
    assert message in problems[0]
    assert path.split("/")[0] in problems[0]


def test_parts_of_one_tier_do_not_import_each_other_in_a_circle(tmp_path: Path):
    one_way = {"evals/a.py": "", "bench/a.py": "import jaxmoe.evals.a"}
    assert _problems(_tree(tmp_path, one_way)) == []
    assert _problems(_tree(tmp_path, {**one_way, "evals/a.py": "import jaxmoe.bench.a"})) == [
        "bench and evals import each other"
    ]


def test_jax_behind_another_module_is_found(tmp_path: Path):
    files = {
        "weights/__init__.py": "",
        "weights/safetensors.py": "from jaxmoe.weights import helper",
        "weights/helper.py": "import typing\nif typing.TYPE_CHECKING:\n    import jax\ndef f():\n    import jax",
        "weights/writer.py": "",
    }
    assert _problems(_tree(tmp_path, files)) == []
    wrong = {**files, "weights/helper.py": "try:\n    import jax.numpy\nexcept ImportError:\n    pass"}
    assert _problems(_tree(tmp_path, wrong)) == [
        "weights/safetensors.py must not need JAX, but jaxmoe.weights.helper imports jax.numpy"
    ]
    inside_package = {**files, "weights/__init__.py": "import flax"}
    assert len(_problems(_tree(tmp_path, inside_package))) == 2


def test_allowed_imports_are_allowed(tmp_path: Path):
    files = {
        "errors.py": "",
        "quant/int8.py": "from jaxmoe.errors import E",
        "ops/__init__.py": "from ..quant import int8",
        "ops/kernel.py": "x = 1\n" * 599,
        "parallel/mesh.py": "import jax\njax.make_mesh((1,), ('x',))",
        "engine/llm.py": "import time\nimport transformers\nfrom jaxmoe.parallel.mesh import make_mesh",
        "weights/x.py": "import os\nos.environ.get('X')\nopen('x')",
        "commands/quickstart.py": "import transformers\nfrom jaxmoe import engine, cli",
        "cli.py": "def main():\n    from jaxmoe.commands import quickstart",
    }
    assert _problems(_tree(tmp_path, files)) == []
