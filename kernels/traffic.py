"""What the operator moves between devices among which the vocabulary is divided, from compiled programs.

    python kernels/traffic.py                 # N 4,096, D 4,096, V 128,256; a minute

Compiles for virtual CPU devices and runs nothing. "Bound": the least that a device receives on a ring if dh [N, D] is
to be summed in float32, 2 (S - 1) / S times its bytes for S devices; a pass without dh has no such bound.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from calibjax.commands.parser import parse_script
from calibjax.kernels import VocabSharding, vocab_stats
from calibjax.runtime.hlo import collectives
from calibjax.runtime.sharding import make_mesh

TASKS = {"statistics": (), "temperature training": (2,), "dh, W frozen": (0,), "dh and dW": (0, 1)}
"""Task -> which of (hidden, unembedding, scale) are differentiated."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a device receives, for each number of devices and task.

    Attributes:
        tokens: N.
        width: D.
        vocab_size: V.
        devices: numbers of devices, each a column.
    """

    tokens: int = 4_096
    width: int = 4_096
    vocab_size: int = 128_256
    devices: tuple[int, ...] = (2, 8, 64, 256)


def received(given: Traffic, count: int, differentiated: tuple[int, ...]) -> int:
    """Bytes that each of `count` devices receives."""
    split = VocabSharding(make_mesh((1, 1, count), jax.devices()[:count]))

    def loss(hidden, unembedding, scale, targets):
        stats = vocab_stats(hidden, unembedding, targets, scale=scale, sharding=split)
        return -jnp.sum(stats.log_prob())

    def argument(shape: tuple[int, ...], dtype: type, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(split.mesh, spec))

    arguments = (
        argument((given.tokens, given.width), jnp.bfloat16, P()),
        argument((given.vocab_size, given.width), jnp.bfloat16, P(split.vocab)),
        argument((given.tokens,), jnp.float32, P()),
        argument((given.tokens,), jnp.int32, P()),
    )
    function = jax.grad(loss, differentiated) if differentiated else loss
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    found, unknown = collectives(text)
    assert not unknown, "a loop of unknown length"
    return sum(kind.bytes for kind in found.values())


def main(given: Traffic) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(given.devices))
    print(f"MB that a device receives: N {given.tokens:,}, D {given.width:,}, V {given.vocab_size:,}, bfloat16\n")
    print("| task | " + " | ".join(f"{count} devices" for count in given.devices) + " |")
    print("|---" * (len(given.devices) + 1) + "|")
    for task, differentiated in TASKS.items():
        cells = [f"{received(given, count, differentiated) / 1e6:.2f}" for count in given.devices]
        print(f"| {task} | " + " | ".join(cells) + " |", flush=True)
    bounds = [2 * (count - 1) / count * 4 * given.tokens * given.width / 1e6 for count in given.devices]
    print("| bound of a sum of dh | " + " | ".join(f"{bound:.2f}" for bound in bounds) + " |")


if __name__ == "__main__":
    main(parse_script(Traffic))
