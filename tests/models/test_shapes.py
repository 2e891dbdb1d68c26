"""Published models by shape alone: nothing is computed or held."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from published_sizes import PUBLISHED

from calibjax import models
from calibjax.models.shapes import SHAPES

ALIKE = ("mixtral", "qwen3_moe", "olmoe")
FIRST = {config.family: name for name, config in reversed(SHAPES.items())}
"""Of each family one; the others differ in sizes. By default, without the families that are `ALIKE`."""


def test_every_shape_has_a_published_count():
    assert SHAPES.keys() == PUBLISHED.keys()
    assert {config.family for config in SHAPES.values()} <= models.FAMILIES.keys()
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    table = page.split("| sizes for `plan` |")[1].split("\n\n")[0]
    cells = [row.rsplit("|", 2)[1].strip() for row in table.splitlines()[2:]]
    assert sorted(SHAPES) == sorted(name for cell in cells if cell for name in cell.split(", "))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FIRST.values() and config.family not in ALIKE else pytest.mark.slow)
        for name, config in SHAPES.items()
    ],
)
def test_parameters_of_published_models(name):
    config = SHAPES[name]
    params = models.abstract_params(config, jnp.bfloat16)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    print(f"| {name} | {config.family} | {PUBLISHED[name]:,} | {count:,} |")
    assert count == PUBLISHED[name]
    tokens = jax.ShapeDtypeStruct((2, 512), jnp.int32)
    logits = jax.eval_shape(lambda p, t: models.logits(config, p, t, dtype=jnp.bfloat16), params, tokens)
    assert (logits.shape, logits.dtype) == ((2, 512, config.vocab_size), jnp.float32)
