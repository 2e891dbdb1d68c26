"""The Hopper kernels run by Pallas' interpreter on a CPU: memory full of NaN, races of warpgroups and copies found.

With JAX_PLATFORMS=cuda,cpu the same names run the compiled kernels.

The interpreter is private to jax: all that is used of it is in this file, with what it lacks. Copies give zeros for
what lies outside an array, as TMA does; loads from the memory of the GPU are reads; in 0.10.2 a product takes a
transposed operand, and what it reads is checked for races (0.11.2 takes one too, and does not check). It runs copies
and products at once, and one program after the other: it misses a block that is given back while a product reads it.
"""

import faulthandler
import importlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import compile_threads_once
from jax.experimental.pallas import mosaic_gpu as plgpu

from calibjax.kernels import api
from calibjax.kernels.pallas_gpu.implementation import PallasGpu
from calibjax.kernels.pallas_gpu.schedule import Blocks

NAME = "pallas_gpu_interpreted"
TWO_PROGRAMS = "pallas_gpu_interpreted_by_two_programs"
WITH_ITS_BLOCKS = "pallas_gpu_interpreted_with_its_blocks"
BY_CHUNKS = "pallas_gpu_interpreted_by_chunks"

ON_GPU = os.environ["JAX_PLATFORMS"].startswith("cuda")
_PATIENCE = 400  # seconds
_PACKAGE = "jax._src.pallas.mosaic_gpu.interpret"
_callbacks = importlib.import_module(f"{_PACKAGE}.gpu_callbacks")
_Transpose = importlib.import_module("jax._src.state.types").TransposeTransform
PARAMS = importlib.import_module(f"{_PACKAGE}.params").InterpretGPUParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="uninitialized"
)
# Each program is compiled anew for each of its warpgroups: one is enough but for one test.
_BLOCKS = {
    NAME: Blocks(columns=64, stages=2, programs=1),
    TWO_PROGRAMS: Blocks(columns=64, stages=3, programs=2),
    BY_CHUNKS: Blocks(columns=64, stages=2, programs=1, chunk=64),
    WITH_ITS_BLOCKS: Blocks() if ON_GPU else Blocks(programs=1),
}
IMPLEMENTATIONS = {name: PallasGpu(None if ON_GPU else PARAMS, blocks) for name, blocks in _BLOCKS.items()}


def _zeros_outside(values, full_shape, shape, dtype, *_):
    whole = np.zeros(full_shape, dtype)
    if values is not None:
        whole[tuple(slice(size) for size in values.shape)] = values
    return whole


def _product(*, token, acc_dtype, source_info, **call):
    place = {name: call[name] for name in ("device_id", "grid_point_coords", "thread_id")}

    def where(operand, transforms):
        key = call[f"{operand}_allocation_key_as_array"]
        return {**place, "allocation_key_as_array": key, "transforms": transforms, "source_info": source_info}

    def read(operand):
        transforms = call[f"{operand}_transforms"]
        others = tuple(x for x in transforms if not isinstance(x, _Transpose))
        value = np.asarray(_callbacks._get(token, **where(operand, others))[1]).astype(np.float32)
        return value if len(others) == len(transforms) else value.T

    total = jnp.asarray(read("acc") + read("a") @ read("b"), acc_dtype)
    _callbacks._swap(token, **where("acc", call["acc_transforms"]), val=total, mask=None)
    return token


@pytest.fixture
def gpu(monkeypatch):
    """Lets `implementation=NAME` run the interpreted kernel, and fails the test if the last of them had a race."""
    for name, implementation in IMPLEMENTATIONS.items():
        monkeypatch.setitem(api.IMPLEMENTATIONS, name, implementation)
    if ON_GPU:
        yield NAME
        return
    compile_threads_once(monkeypatch)
    monkeypatch.setattr(_callbacks, "_handle_out_of_bounds_read", _zeros_outside)
    if jax.__version_info__ < (0, 11):  # later it takes transposed operands itself
        monkeypatch.setattr(_callbacks, "wgmma", _product)
    monkeypatch.setattr(plgpu, "load", lambda ref, index, optimized: ref[index])
    # An error inside leaves the other warpgroups waiting for ever: end the process, and say where they are.
    faulthandler.dump_traceback_later(_PATIENCE, exit=True)
    yield NAME
    faulthandler.cancel_dump_traceback_later()
    assert _callbacks._races is None or not _callbacks._races.races_found
