"""XLA's compiler for NVIDIA GPUs on a machine without one, of JAX's CUDA plugin.

It needs no driver and no other library of CUDA. Functions are called in a process of their own, by
`tpu_compiler.with_compiler`.
"""

import importlib.metadata
import math
from typing import Any

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")

# Of the SXM models, in XLA's format of a target: the limits of the architecture (CUDA C++ Programming Guide, compute
# capabilities) and the figures of the vendor's white papers; the memory of an H100 is what its driver reports.
_LIMITS = """threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536"""
_HOPPER = """cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448"""
_AMPERE = """cuda_compute_capability { major: 8 } core_count: 108 fpus_per_core: 64 l2_cache_size: 41943040
  clock_rate_ghz: 1.41 shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912"""
_CHIPS = {
    "a100": (_AMPERE, 2039000000000, 80000000000, "NVIDIA A100-SXM4-80GB"),
    "h100": (_HOPPER, 3352320000000, 84929347584, "NVIDIA H100 80GB HBM3"),
    "h200": (_HOPPER, 4800000000000, 141000000000, "NVIDIA H200"),
}
_PER_HOST = 8


def compiler_version() -> str | None:
    """The plugin and its version; None if it is not installed."""
    for name in _PLUGINS:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def target(chip: str) -> str:
    """The description of a GPU ("a100", "h100", "h200") that XLA compiles for."""
    architecture, bandwidth, memory, name = _CHIPS[chip]
    return f"""gpu_device_info {{
  {_LIMITS}
  {architecture} memory_bandwidth: {bandwidth} device_memory_size: {memory}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""


def gpu_devices(chip: str, count: int) -> list[Any]:
    """`count` GPUs as a compilation target, 8 on a host; only in the process of `with_compiler`, or without a GPU."""
    from jax.experimental import topologies

    per_host = math.gcd(count, _PER_HOST)
    description: Any = topologies.get_topology_desc(
        platform="cuda",
        topology_name=chip,
        target_config=target(chip),
        topology=f"1x{count // per_host}x{per_host}",
    )
    return description.devices
