"""The TPU kernels run by Pallas' interpreter on a CPU: two cores, memory full of NaN, races found."""

import functools
import importlib
import threading
from types import SimpleNamespace

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from calibjax.kernels import api
from calibjax.kernels.pallas_tpu.blocks import Blocks
from calibjax.kernels.pallas_tpu.implementation import PallasTpu

NAME = "pallas_tpu_interpreted"
WITH_ITS_BLOCKS = "pallas_tpu_interpreted_with_its_blocks"
APART = "pallas_tpu_interpreted_apart"
PARAMS = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
# Blocks far below a chip's: they compile soon on a CPU, and small shapes have several, ragged ones too.
SMALL = {
    "statistics": (Blocks(128, 128, 32),),
    "curves": (Blocks(128, 32, 32),),
    "expected_row": (Blocks(128, 256, 128),),
    "d_hidden": (Blocks(128, 256, 128),),
    "d_unembedding": (Blocks(128, 128, 128),),
}
# Of two units of saved exponentials each is read in two blocks.
_APART = SMALL | {"statistics, saved": (Blocks(128, 512, 256),), "d_hidden, saved": (Blocks(128, 128, 128),)}
IMPLEMENTATIONS = {NAME: PallasTpu(PARAMS, SMALL), WITH_ITS_BLOCKS: PallasTpu(PARAMS), APART: PallasTpu(PARAMS, _APART)}

_threads = importlib.import_module("jax._src.pallas.mosaic.interpret.thread_map")
_compiling = threading.Lock()


@functools.lru_cache(maxsize=8)
def _compiled(jaxpr):
    consts, arguments = (
        [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in variables]
        for variables in (jaxpr.constvars, jaxpr.invars)
    )

    def run(consts, *arguments):
        jax.core.eval_jaxpr(jaxpr, consts, *arguments)

    return jax.jit(run).lower(consts, *arguments).compile()


def compile_threads_once(monkeypatch):
    """Cores and warpgroups run one program: jax's interpreter compiles it for each of them, and again at every call."""

    def run(jaxpr, consts, *arguments):
        with _compiling:
            program = _compiled(jaxpr)
        program(consts, *arguments)

    monkeypatch.setattr(_threads, "_run_jaxpr", run)
    # The arguments of callbacks stay NumPy's: to make JAX's of them costs as much as what is done with them.
    monkeypatch.setattr("jax._src.callback.api", SimpleNamespace(device_put=lambda arguments, device: arguments))


@pytest.fixture
def tpu(monkeypatch):
    """Lets `implementation=NAME` run the interpreted kernels, and fails the test if the last of them had a race.

    `WITH_ITS_BLOCKS` runs them with the blocks that a chip gets; `APART` has smaller ones for saved exponentials.
    """
    compile_threads_once(monkeypatch)
    for name, implementation in IMPLEMENTATIONS.items():
        monkeypatch.setitem(api.IMPLEMENTATIONS, name, implementation)
    yield NAME
    # jax keeps what the detector saw in a private place.
    state = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call").races
    assert state is None or not state.races_found
