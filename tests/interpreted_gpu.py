"""The Hopper kernel run by Pallas' interpreter on a CPU: memory full of NaN, races between warpgroups and copies found.

The interpreter of jax 0.10.2 is private; all that is used of it is in this file. What it lacks is put right here:
copies give zeros outside of an array, as TMA does; a product may take a transposed operand, and what it reads is
checked for races; loads from the memory of the GPU. It runs products and copies at once, one program after the other, so
that it says nothing of a block that is released while a product still reads it, nor of clusters.
"""

import contextlib
import importlib

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

_PACKAGE = "jax._src.pallas.mosaic_gpu.interpret"
_callbacks = importlib.import_module(f"{_PACKAGE}.gpu_callbacks")
_Transpose = importlib.import_module("jax._src.state.types").TransposeTransform
PARAMS = importlib.import_module(f"{_PACKAGE}.params").InterpretGPUParams(
    detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="uninitialized"
)


def _zeros_outside(found, full_shape, shape, dtype, *_):
    whole = np.zeros(full_shape, dtype)
    if found is not None:
        whole[tuple(slice(size) for size in found.shape)] = found
    return whole


def _product(
    *,
    token,
    device_id,
    grid_point_coords,
    thread_id,
    acc_allocation_key_as_array,
    acc_transforms,
    acc_dtype,
    a_allocation_key_as_array,
    a_transforms,
    b_allocation_key_as_array,
    b_transforms,
    source_info,
):
    place = {"device_id": device_id, "grid_point_coords": grid_point_coords, "thread_id": thread_id}

    def read(key, transforms):
        turned = [t for t in transforms if isinstance(t, _Transpose)]
        kept = tuple(t for t in transforms if not isinstance(t, _Transpose))
        _, value = _callbacks._get(
            token, **place, allocation_key_as_array=key, transforms=kept, source_info=source_info
        )
        value = np.asarray(value).astype(np.float32)
        return value.T if turned else value

    total = read(acc_allocation_key_as_array, acc_transforms)
    total = total + read(a_allocation_key_as_array, a_transforms) @ read(b_allocation_key_as_array, b_transforms)
    _callbacks._swap(
        token,
        **place,
        allocation_key_as_array=acc_allocation_key_as_array,
        transforms=acc_transforms,
        val=jnp.asarray(total, acc_dtype),
        mask=None,
        source_info=source_info,
    )
    return token


@contextlib.contextmanager
def interpreter():
    changes = [
        (_callbacks, "_handle_out_of_bounds_read", _zeros_outside),
        (_callbacks, "wgmma", _product),
        (plgpu, "load", lambda ref, index, optimized: ref[index]),
    ]
    before = [getattr(place, name) for place, name, _ in changes]
    for place, name, value in changes:
        setattr(place, name, value)
    try:
        yield
    finally:
        for (place, name, _), value in zip(changes, before, strict=True):
            setattr(place, name, value)


def races():
    return _callbacks.get_races().races_found
