"""Where arrays lie on a mesh: the lookup of embeddings moves rows, not the table."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calibjax.runtime.sharding import batch_sharding, lookup, make_mesh, param_sharding

V, D = 24, 16
MESHES = [(1, 1, 1), (2, 2, 2), (1, 1, 8)]
MESHES += [pytest.param(shape, marks=pytest.mark.slow) for shape in ((8, 1, 1), (1, 8, 1), (1, 4, 2))]


@pytest.mark.parametrize("shape", MESHES)
def test_lookup(shape):
    """Rows and their gradient equal numpy's; ids beyond the table give NaN, as on one device."""
    mesh = make_mesh(shape, jax.devices()[: math.prod(shape)])
    rng = np.random.default_rng(3)
    table = rng.normal(size=(V, D)).astype(np.float32)
    index = rng.integers(0, V, (8, 5)).astype(np.int32)
    weight = rng.normal(size=(8, 5, D)).astype(np.float32)
    placed = jax.device_put(table, param_sharding(mesh, "embedding", (V, D)))
    ids = jax.device_put(index, batch_sharding(mesh))

    def rows_and_sum(table, ids):
        rows = lookup(table, ids, "embedding", jnp.float32)
        return jnp.vdot(rows, weight), rows

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(rows_and_sum, has_aux=True)).lower(placed, ids).compile()
        gradient, rows = compiled(placed, ids)
        beyond = ids.at[2, 1].set(V).at[7, 4].set(-1)
        wrong = jax.jit(lambda t, i: lookup(t, i, "embedding", jnp.float32))(placed, beyond)
    np.testing.assert_array_equal(rows, table[index])
    expected = np.zeros((V, D))
    np.add.at(expected, index, weight)
    assert np.abs(np.asarray(gradient) - expected).max() < 1e-6 * np.abs(expected).max()
    assert np.argwhere(np.isnan(np.asarray(wrong)).any(axis=2)).tolist() == [[2, 1], [7, 4]]
    assert f"f32[{V},{D}]" not in "".join(line for line in compiled.as_text().splitlines() if "all-gather" in line)


def test_gradient_of_a_lookup_is_allocated_late():
    """Beside a loop whose backward pass takes as much memory as the table, the gradient of the table takes none."""
    table, index = jnp.zeros((4096, 64)), jnp.zeros((16, 64), jnp.int32)

    def temporaries(tied: bool) -> int:
        def loss(table, weights):
            def layer(rows, weight):
                return rows + jnp.tanh(rows @ weight) @ weight.T, None

            rows = lookup(table, index, "embedding", jnp.float32, tied=tied)
            return jnp.sum(jax.lax.scan(jax.checkpoint(layer), rows, weights)[0] ** 2)

        program = jax.jit(lambda *given: sum(jnp.vdot(g, g) for g in jax.grad(loss, argnums=(0, 1))(*given)))
        return program.lower(table, jnp.zeros((3, 64, 256))).compile().memory_analysis().temp_size_in_bytes

    early, late = temporaries(tied=True), temporaries(tied=False)
    assert late < early - 0.9 * table.nbytes, (early, late)
