"""The layout of the package: packages and layers, what importing it loads, and the examples in its docstrings."""

import ast
import doctest
import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import mutate
import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    {"runtime", "torch"},
    {"kernels"},
    {"nn", "heads", "losses", "metrics", "recalibrate"},
    {"plot"},
    {"data", "models"},
    {"train", "eval"},
    {"commands", "lm_eval"},
    {"cli"},
    {"__main__"},
)
"""A package imports from its own layer and from those before it; see CONTRIBUTING.md."""
PACKAGES, DEPTH, LONGEST, WIDEST = 16, 10, 80, 7
"""Limits: packages, layers, lines of a function without its docstring, parameters beside arrays."""
PUBLIC = "__init__"  # calibjax/__init__.py: re-exports, imported by no other module
LAZY = ("transformers", "datasets", "huggingface_hub", "tokenizers", "torch")
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted((ROOT / "calibjax").rglob("*.py"))
}


def package_of(module):
    """`calibjax.train.ats` -> "train"; `calibjax` -> "__init__"; `calibjax.__main__` belongs to "cli"."""
    name = [*module.split("."), PUBLIC][1]
    return "cli" if name == "__main__" else name


@functools.cache
def tree_of(module):
    return ast.parse(FILES[module].read_text())


@functools.cache
def imports(module):
    """Every import of a module: (full name, whether it runs when the module is imported)."""
    tree = tree_of(module)
    lazy = set()
    for node in ast.walk(tree):
        checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            lazy |= {id(inner) for inner in ast.walk(node)}
    names_and_times = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else node.module for name in full]
        else:
            continue
        names_and_times += [(name, id(node) not in lazy) for name in names]
    return names_and_times


def inner_imports(module):
    return {name for name, _ in imports(module) if name.split(".")[0] == "calibjax"}


def depths(edges):
    """The longest chain of imports below each node; fails, with the chain, where there is a cycle."""
    done, path = {}, []

    def visit(node):
        assert node not in path, f"cycle: {' -> '.join([*path[path.index(node) :], node])}"
        if node not in done:
            path.append(node)
            done[node] = 1 + max(map(visit, sorted(edges[node])), default=-1)
            path.pop()
        return done[node]

    for node in edges:
        visit(node)
    return done


def imports_of_packages():
    """Package -> the other packages that it imports."""
    packages = {}
    for module in FILES:
        packages.setdefault(package_of(module), set()).update(package_of(name) for name in inner_imports(module))
    return {here: there - {here} for here, there in packages.items()}


def test_layers_and_the_direction_of_imports():
    layer_of = {name: layer for layer, names in enumerate(LAYERS) for name in names}
    depths({module: inner_imports(module) for module in FILES})
    for module in FILES:
        here = package_of(module)
        for name in inner_imports(module):
            there = package_of(name)
            assert there != PUBLIC, f"{module} imports the package's public names"
            assert {here, there} != {"train", "eval"}, f"{module} imports {name}"
            if here != PUBLIC:
                assert layer_of[there] <= layer_of[here], f"{module} imports {name}, which is in a higher layer"
    packages = imports_of_packages()
    assert set(packages) - {PUBLIC} <= set(layer_of)
    assert len(packages) - 1 <= PACKAGES
    assert 1 + max(depths(packages).values()) <= DEPTH


def test_heavy_packages_load_late():
    for module in FILES:
        for name, at_once in imports(module):
            top = name.split(".")[0]
            assert top not in ("torch", "vllm") or package_of(module) == "torch", f"{module} imports {top}"
            if top in LAZY and package_of(module) != "torch":
                assert not at_once, f"{module} imports {top} when it is imported"
                assert package_of(module) in ("models", "data", "eval"), f"{module} imports {top}"


def test_files_are_written_by_one_helper():
    """`Path.write_text` and `write_bytes` write through symbolic links, and leave a part of a file behind a kill."""
    for module in FILES:
        names = {node.attr for node in ast.walk(tree_of(module)) if isinstance(node, ast.Attribute)}
        assert not names & {"write_text", "write_bytes"}, f"{module}: use calibjax.runtime.files"


def test_importing_is_light():
    heavy = (*LAZY, "matplotlib")
    code = (
        "import sys, calibjax, calibjax.cli; loaded = list(sys.modules)\n"
        "dir(calibjax), calibjax.load_model; model = list(sys.modules); calibjax.fit_ats\n"
        "print([name for name in ('jax', 'numpy') if name in loaded])\n"
        "print([name for name in ('orbax.checkpoint', 'jax.experimental.pallas') if name in model])\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.stdout.split() == ["[]"] * 3, done.stdout + done.stderr


def test_packages_only_re_export():
    for module in (name for name, file in FILES.items() if file.name == "__init__.py"):
        for node in ast.parse(FILES[module].read_text()).body:
            fine = (
                isinstance(node, ast.ImportFrom | ast.Expr)
                or (isinstance(node, ast.Assign) and "__all__" in ast.unparse(node.targets[0]))
                or (module == "calibjax" and ast.unparse(node) in ("import lazy_loader", "import calibjax.runtime"))
                or (module == "calibjax.runtime" and ast.unparse(node) == "skip_absent_tpu()")
                or (isinstance(node, ast.FunctionDef) and node.name == "__dir__")
            )
            assert fine, f"{module}: {ast.unparse(node)}"
    assert not [name for name in ("kernels", "train", "eval", "tests") if (ROOT / name / "__init__.py").exists()]


ARRAY_NAMES = (
    "AnyArray Array ArrayLike _ArrayOrShape ndarray PRNGKeyArray AbstractRef "
    "Params FrozenArrays Sequences TrainState _State Cache Inputs Cotangents Gradients Exponentials"
)
ARRAYS = re.compile(rf"\b({'|'.join(ARRAY_NAMES.split())})\b")
TREES = {"params", "head_params", "frozen", "frozens", "head_arrays", "batch", "source", "carry", "state"}
"""Trees of arrays that are annotated as `Any`."""
WIDE = {"calibjax.lm_eval.CalibjaxLM.__init__": "its keywords are the names in --model_args, which lm-eval passes"}


def functions(node, name):
    """Every function in a tree: (full name, node)."""
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}" if hasattr(child, "name") and not isinstance(child, ast.alias) else name
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner, child
        yield from functions(child, inner)


def parameters_beside_arrays(function):
    given = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return [
        each.arg
        for each in given
        if each.arg not in ("self", "cls", *TREES)
        and not each.arg.endswith("_ref")
        and not (each.annotation and ARRAYS.search(ast.unparse(each.annotation)))
    ]


def lines_of(function):
    """Lines from the signature to the end, without the docstring."""
    text = function.body[0] if ast.get_docstring(function) else None
    return function.end_lineno - function.lineno + 1 - (text.end_lineno - text.lineno + 1 if text else 0)


@functools.cache
def measured():
    """Every function of the package: full name -> (parameters beside arrays, lines)."""
    return {
        name: (len(parameters_beside_arrays(function)), lines_of(function))
        for module in FILES
        for name, function in functions(tree_of(module), module)
    }


def test_signatures_and_lengths():
    assert {name for name, (wide, _) in measured().items() if wide > WIDEST} == set(WIDE)
    assert not {name for name, (_, long) in measured().items() if long > LONGEST}


def print_figures():
    """The figures of CONTRIBUTING.md."""
    packages, sizes = imports_of_packages(), measured()
    wide = max((wide, name) for name, (wide, _) in sizes.items() if name not in WIDE)
    long = max((long, name) for name, (_, long) in sizes.items())
    print(f"packages: {len(packages) - (PUBLIC in packages)} (at most {PACKAGES})")
    print(f"layers: {1 + max(depths(packages).values())} (at most {DEPTH})")
    print(f"imports between packages: {sum(map(len, packages.values()))}")
    print(f"lines of code: {sum(len(file.read_text().splitlines()) for file in FILES.values()):,}")
    print(f"longest function: {long[0]} lines of at most {LONGEST} ({long[1]})")
    print(f"widest signature: {wide[0]} parameters of at most {WIDEST} ({wide[1]})")


def test_mutations_fit_the_sources():
    mutate.check()


EXAMPLES = [module for module, file in FILES.items() if ">>>" in file.read_text()]
HEAVY = tuple(
    f"calibjax.{name}" for name in ("eval", "kernels", "losses.long_horizon", "metrics.scores", "models", "nn", "train")
)
"""Packages and modules whose examples train or compile for seconds."""


@pytest.mark.parametrize("module", [pytest.param(m, marks=[pytest.mark.slow] * m.startswith(HEAVY)) for m in EXAMPLES])
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0
    assert result.failed == 0


if __name__ == "__main__":
    print_figures()
