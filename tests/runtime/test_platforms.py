"""The TPU plugin is left out where it is installed and no TPU is, and nowhere else."""

import importlib.util
import os
import subprocess
import sys

import pytest

from calibjax.runtime.platforms import compilation_cache, platforms_without_tpu


@pytest.fixture
def installed(monkeypatch):
    """libtpu is there, whatever else is."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "libtpu" else real(name))


def test_without_a_tpu(installed, tmp_path):
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()  # the control node, which machines without a TPU have too
    (tmp_path / "nvidia0").touch()
    assert platforms_without_tpu({"PATH": "/bin", "TPU_LIBRARY_PATH": "x"}, tmp_path) in ("cpu", "cuda,cpu")


def test_a_tpu_and_what_the_user_sets_are_left_alone(installed, monkeypatch, tmp_path):
    for name in ("JAX_PLATFORMS", "TPU_NAME", "TPU_WORKER_ID", "JAX_FORCE_TPU_INIT"):
        assert platforms_without_tpu({name: "1"}, tmp_path) is None
    for number, node in enumerate(("accel0", "accel_x", "vfio/0", "vfio/devices/vfio0")):
        (tmp_path / str(number) / node).parent.mkdir(parents=True)
        (tmp_path / str(number) / node).touch()
        assert platforms_without_tpu({}, tmp_path / str(number)) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert platforms_without_tpu({}, tmp_path / "none") is None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("first", ["", "import jax; "])
def test_no_noise(first):
    """A notebook's first cell: nothing on standard error."""
    code = f"{first}from calibjax.runtime.errors import UserError; import jax; print(jax.devices()[0].platform)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_PLATFORMS", "TPU_"))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "cpu", "")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_transformers_of_a_command_finds_no_torch():
    """Only where nothing in the process needs it; PyTorch itself can still be imported."""
    code = (
        "import importlib.util, sys\n"
        "from calibjax.runtime.platforms import leave_out_torch, torch_left_out\n"
        "with torch_left_out(): print('torch' in sys.modules)\n"
        "leave_out_torch()\n"
        "with torch_left_out(): from transformers import AutoConfig, AutoTokenizer\n"
        "AutoConfig.for_model('llama'), AutoTokenizer.from_pretrained\n"
        "print('torch' in sys.modules, importlib.util.find_spec('torch') is None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False\nFalse False", done.stdout + done.stderr


def test_compiled_programs_are_kept_for_each_kind_of_processor(tmp_path, monkeypatch):
    """And number of cores, where the user has configured no cache."""
    directories = set()
    for flags, cores in (("flags\t: sse avx", 4), ("flags\t: sse avx avx512f", 4), ("flags\t: sse avx", 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: range(cores), raising=False)
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nflags\t: of another\n")
        variables = compilation_cache({"XDG_CACHE_HOME": "/cache"}, tmp_path / "cpuinfo")
        directories.add(variables["JAX_COMPILATION_CACHE_DIR"])
    assert len(directories) == 3
    assert all(directory.startswith("/cache/calibjax/compiled/") for directory in directories)
    home = compilation_cache({"HOME": "/home/me"}, tmp_path / "none")["JAX_COMPILATION_CACHE_DIR"]
    assert home.startswith("/home/me/.cache/calibjax/compiled/")
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE"):
        assert compilation_cache({name: "0"}) == {}


@pytest.mark.parametrize("first", ["", "import jax; "])
def test_programs_are_kept_also_where_jax_is_imported(tmp_path, first):
    code = f"{first}from calibjax.runtime import platforms; platforms.keep_compiled_programs(); "
    code += "import jax; jax.jit(lambda x: x + 1)(1.0).block_until_ready()"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_COMP", "JAX_PERS"))}
    subprocess.run([sys.executable, "-c", code], check=True, env={**environment, "XDG_CACHE_HOME": str(tmp_path)})
    assert list(tmp_path.rglob("*-cache"))


def test_a_platform_without_devices():
    command = [sys.executable, "-m", "calibjax", "eval", "bounds", "--model", "nowhere"]
    done = subprocess.run(command, env={**os.environ, "JAX_PLATFORMS": "none"}, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n"), "JAX_PLATFORMS" in done.stderr) == (2, 1, True), done.stderr
