"""Writes goldens/static.json: what compiled programs of the operator cost, by the compilers of TPU and CPU.

    python tests/make_static_goldens.py

Nothing runs on a device. `tests/kernels/test_static.py` compares with the file; write it anew where a program is meant
to have changed, or with another jax or libtpu, and look at the difference.
"""

import importlib.metadata
import json
import re
import sys
import tempfile
from pathlib import Path

from calibjax.runtime.compilers import slice_devices, with_compiler

TESTS = Path(__file__).parent
FILE = TESTS / "goldens" / "static.json"
TOKENS, WIDTH, VOCAB = 256, 256, 4096
ALL, NONE = ("hidden", "unembedding"), ()
TPU, CHUNKED = {"implementation": "pallas_tpu"}, {"implementation": "chunked"}
PROBLEMS = {
    # name: chip, shape of the mesh (tokens, vocab), what is differentiated, options
    "v6e statistics": ("v6e", None, NONE, TPU),
    "v6e dh": ("v6e", None, ("hidden",), TPU),
    "v6e dh and dW": ("v6e", None, ALL, TPU),
    "v6e dh and dW, soft-cap": ("v6e", None, ALL, TPU | {"softcap": 30.0}),
    "v6e dh and dW, logits saved": ("v6e", None, ALL, TPU | {"save_logits": True}),
    "v5e statistics": ("v5e", None, NONE, TPU),
    "v5p statistics": ("v5p", None, NONE, TPU),
    "v5e dh and dW": ("v5e", None, ALL, TPU),
    "v5e chunked, dh and dW": ("v5e", None, ALL, CHUNKED | {"chunk_size": 1024}),
    "4 chips, vocabulary": ("v5e", (1, 4), ALL, CHUNKED | {"chunk_size": 512}),
    "4 chips, tokens": ("v5e", (4, 1), ALL, CHUNKED | {"chunk_size": 512}),
    "4 chips, both": ("v5e", (2, 2), ALL, CHUNKED | {"chunk_size": 512}),
}


def _loss(differentiated, mesh, options):
    """Label-smoothed loss of (hidden, unembedding, targets), with gradients; sharded where there is a mesh."""
    import jax
    import jax.numpy as jnp

    from calibjax.kernels import vocab_stats
    from calibjax.kernels.sharded import VocabSharding

    split = None if mesh is None else VocabSharding(mesh, tokens=("tokens",), vocab=("vocab",))
    names = ("log_normalizer", "target_logit", "mean_logit")

    def loss(hidden, unembedding, targets):
        got = vocab_stats(hidden, unembedding, targets, statistics=names, sharding=split, **options)
        return jnp.mean(got.log_normalizer - 0.9 * got.target_logit - 0.1 * got.mean_logit)

    positions = tuple(("hidden", "unembedding").index(name) for name in differentiated)
    return jax.value_and_grad(loss, positions) if positions else loss


def _compile(chip, shape, differentiated, options):
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    from static_profile import CHIPS

    topology = CHIPS[chip].topology if shape is None else f"{chip}:2x2"
    devices = np.array(slice_devices(topology))
    mesh = Mesh(devices[:1, None] if shape is None else devices.reshape(shape), ("tokens", "vocab"))
    arguments = [
        jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, spec))
        for sizes, dtype, spec in (
            ((TOKENS, WIDTH), jnp.bfloat16, P("tokens", None)),
            ((VOCAB, WIDTH), jnp.bfloat16, P("vocab", None)),
            ((TOKENS,), jnp.int32, P("tokens")),
        )
    ]
    with jax.set_mesh(mesh):  # from which Pallas knows the chip that it compiles for
        function = _loss(differentiated, None if shape is None else mesh, options)
        return jax.jit(function).lower(*arguments).compile()


def _compile_all(directory):
    """Figures of every problem; called in the compiler's process."""
    import jax
    from static_profile import profiled_cycles

    from calibjax.runtime.hlo import collectives

    jax.config.update("jax_enable_compilation_cache", False)  # what comes from there is not profiled
    costs = {}
    for name, problem in PROBLEMS.items():
        for file in Path(directory).iterdir():
            file.unlink()
        compiled = _compile(*problem)
        text = compiled.as_text()
        moved, unknown = collectives(text)
        costs[name] = {
            "cycles": sum(profiled_cycles(directory, text).values()),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
            "kernels": len(re.findall('custom_call_target="tpu_custom_call"', text)),
            "products": len(re.findall(r" (?:dot|convolution)\(", text)),
            "collectives": {kind: [each.count, each.bytes] for kind, each in sorted(moved.items())},
            "loops of unknown length": unknown,
        }
    return costs


def figures():
    """Problem -> its figures, of the installed compiler."""
    if (folder := str(TESTS.parent / "kernels")) not in sys.path:
        sys.path.insert(0, folder)
    with tempfile.TemporaryDirectory(prefix="static_goldens_") as directory:
        from static_profile import profile_flags

        return with_compiler(_compile_all, directory, flags=profile_flags(directory), timeout=600.0)


def versions():
    import jax

    return {"jax": jax.__version__, "libtpu": importlib.metadata.version("libtpu")}


if __name__ == "__main__":
    from calibjax.runtime.files import write_file

    write_file(FILE, json.dumps({"versions": versions(), "problems": figures()}, indent=1) + "\n")
    print(FILE)
