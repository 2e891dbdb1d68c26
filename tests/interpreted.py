"""The TPU kernels run by Pallas' interpreter on a CPU: two cores, memory full of NaN, races found."""

import importlib

import pytest
from jax.experimental.pallas import tpu as pltpu

from calibjax.kernels import api, pallas_tpu
from calibjax.kernels.pallas_tpu.blocks import Blocks

NAME = "pallas_tpu_interpreted"
WITH_ITS_BLOCKS = "pallas_tpu_interpreted_with_its_blocks"
APART = "pallas_tpu_interpreted_apart"
PARAMS = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
# Blocks far below a chip's: they compile soon on a CPU, and small shapes have several, ragged ones too.
SMALL = {
    "statistics": (Blocks(128, 128, 32),),
    "rows": (Blocks(128, 256, 128),),
    "unembedding": (Blocks(128, 128, 128),),
    "fused": (Blocks(128, 256, 128),),
}
IMPLEMENTATIONS = {
    NAME: pallas_tpu.make(PARAMS, SMALL),
    WITH_ITS_BLOCKS: pallas_tpu.make(PARAMS),
    APART: pallas_tpu.make(PARAMS, {kernel: sizes for kernel, sizes in SMALL.items() if kernel != "fused"}),
}


@pytest.fixture
def tpu(monkeypatch):
    """Lets `implementation=NAME` run the interpreted kernels, and fails the test if the last of them had a race.

    `WITH_ITS_BLOCKS` runs them with the blocks that a chip gets; `APART` has a kernel each for dh and dW.
    """
    for name, implementation in IMPLEMENTATIONS.items():
        monkeypatch.setitem(api.IMPLEMENTATIONS, name, implementation)
    yield NAME
    # jax keeps what the detector saw in a private place.
    state = importlib.import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call").races
    assert state is None or not state.races_found
