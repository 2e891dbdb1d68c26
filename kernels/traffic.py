"""What the operator moves between devices among which the vocabulary is divided, from compiled programs.

    python kernels/traffic.py                 # a minute

Compiles for virtual CPU devices and runs nothing. "Bound": the least that a device receives on a ring if dh [N, D] is
to be summed in float32, 2 (S - 1) / S times its bytes for S devices; a pass without dh has no such bound.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from calibjax.kernels import VocabSharding, vocab_stats
from calibjax.runtime.hlo import collectives
from calibjax.runtime.sharding import make_mesh

TOKENS, WIDTH, VOCAB = 4_096, 4_096, 128_256
DEVICES = (2, 8, 64, 256)
TASKS = {"statistics": (), "temperature training": (2,), "dh, W frozen": (0,), "dh and dW": (0, 1)}
"""Task -> which of (hidden, unembedding, scale) are differentiated."""


def received(count: int, differentiated: tuple[int, ...]) -> int:
    """Bytes that each of `count` devices receives."""
    split = VocabSharding(make_mesh((1, 1, count), jax.devices()[:count]))

    def loss(hidden, unembedding, scale, targets):
        stats = vocab_stats(hidden, unembedding, targets, scale=scale, sharding=split)
        return -jnp.sum(stats.log_prob())

    arguments = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(split.mesh, spec))
        for shape, dtype, spec in (
            ((TOKENS, WIDTH), jnp.bfloat16, P()),
            ((VOCAB, WIDTH), jnp.bfloat16, P(split.vocab)),
            ((TOKENS,), jnp.float32, P()),
            ((TOKENS,), jnp.int32, P()),
        )
    ]
    function = jax.grad(loss, differentiated) if differentiated else loss
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    found, unknown = collectives(text)
    assert not unknown, "a loop of unknown length"
    return sum(kind.bytes for kind in found.values())


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    print(f"MB that a device receives: N {TOKENS:,}, D {WIDTH:,}, V {VOCAB:,}, bfloat16\n")
    print("| task | " + " | ".join(f"{count} devices" for count in DEVICES) + " |")
    print("|---" * (len(DEVICES) + 1) + "|")
    for task, differentiated in TASKS.items():
        cells = [f"{received(count, differentiated) / 1e6:.2f}" for count in DEVICES]
        print(f"| {task} | " + " | ".join(cells) + " |", flush=True)
    bounds = [2 * (count - 1) / count * 4 * TOKENS * WIDTH / 1e6 for count in DEVICES]
    print("| bound of a sum of dh | " + " | ".join(f"{bound:.2f}" for bound in bounds) + " |")
