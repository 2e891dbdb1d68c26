"""The floors of the house, what importing it drags in, and the examples in its docstrings."""

import ast
import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_model

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "calibjax"
FLOORS = {
    **dict.fromkeys(("_checks", "_tpu_compiler", "sharding", "distributed"), 0),
    "kernels": 1,
    **dict.fromkeys(
        ("bounds", "horizon", "splash", "attention", "layers", "cache", "heads", "losses", "recalibrate", "metrics"), 2
    ),
    **dict.fromkeys(("models", "data"), 3),
    **dict.fromkeys(("train", "eval"), 4),
    **dict.fromkeys(("runs", "calibrate", "compare", "finetune", "lhts", "evaluate", "commands", "quickstart"), 5),
    **dict.fromkeys(("analyse", "reports", "studies", "lm_eval", "benchmarks", "plan", "cli", "__init__"), 5),
}
LAZY = ("transformers", "datasets", "huggingface_hub", "tokenizers", "torch")
FILES = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in sorted(PACKAGE.rglob("*.py"))}


def room(module):
    """`calibjax.train.ats` -> "train"; `calibjax` and `calibjax.__init__` -> "__init__"."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(module):
    """Every import of a module: (full name, whether it is carried out when the module is imported)."""
    tree = ast.parse(FILES[module].read_text())
    lazy = set()
    for node in ast.walk(tree):
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lazy |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES or f"{name}.__init__" in FILES else node.module for name in full]
        else:
            continue
        yield from ((name, id(node) not in lazy) for name in names)


def inner_imports(module):
    return {name for name, _ in imports(module) if name.split(".")[0] == "calibjax"}


def test_every_module_has_its_floor():
    assert {room(module) for module in FILES} == set(FLOORS)


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down_only(module):
    here = room(module)
    for name in inner_imports(module):
        there = room(name)
        assert FLOORS[there] <= FLOORS[here], f"{module} (floor {FLOORS[here]}) imports {name} (floor {FLOORS[there]})"
        assert {here, there} != {"train", "eval"}, f"{module} imports {name}"
        assert there != "__init__", f"{module} imports the package's public names"


def test_no_module_imports_itself_in_a_circle():
    def resolve(name):
        return name if name in FILES else f"{name}.__init__"

    edges = {module: {resolve(name) for name in inner_imports(module)} for module in FILES}
    done, path = set(), []

    def visit(module):
        assert module not in path, f"circle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            path.append(module)
            for other in sorted(edges[module]):
                visit(other)
            done.add(path.pop())

    for module in FILES:
        visit(module)


@pytest.mark.parametrize("module", FILES)
def test_heavy_packages_stay_on_their_floor(module):
    for name, at_once in imports(module):
        top = name.split(".")[0]
        assert top != "torch", f"{module} imports torch"
        if top in LAZY:
            assert not at_once, f"{module} imports {top} at once"
            assert room(module) in ("models", "data", "eval"), f"{module} imports {top}"


@pytest.mark.parametrize("module", ["calibjax", "calibjax.cli"])
def test_importing_is_light(module):
    heavy = (*LAZY, "matplotlib")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_public_names_are_exports_only():
    for module in (name for name in FILES if name.endswith("__init__")):
        body = ast.parse(FILES[module].read_text()).body
        for node in body:
            fine = (
                isinstance(node, ast.ImportFrom | ast.Expr)
                or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
                or (isinstance(node, ast.FunctionDef) and node.name == "__dir__")
            )
            assert fine, f"{module}: {ast.unparse(node)}"


@pytest.mark.parametrize("folder", ["kernels", "train", "eval", "tests"])
def test_top_folders_are_no_packages(folder):
    assert not (ROOT / folder / "__init__.py").exists()


def test_transformers_beside_our_folders(tmp_path):
    """A top-level package `kernels` would be taken by transformers for the one of Hugging Face."""
    write_model(tmp_path / "model")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from transformers import AutoConfig; print(AutoConfig.from_pretrained(sys.argv[2]).model_type)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(tmp_path / "model")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert done.stdout.strip() == "llama", done.stderr


WITH_EXAMPLES = [module for module, file in FILES.items() if ">>>" in file.read_text()]


def test_there_are_examples():
    assert {"calibjax.kernels.api", "calibjax.metrics.errors"} <= set(WITH_EXAMPLES)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0
