"""Which implementation runs, and what `explain` says of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from calibjax.kernels import VocabSharding, api, chunked, explain, vocab_stats
from calibjax.kernels.platforms import Platform, platform
from calibjax.runtime.sharding import make_mesh

HIDDEN, UNEMBEDDING = np.ones((6, 4), np.float32), np.eye(10, 4, dtype=np.float32)
TARGETS = np.arange(6, dtype=np.int32)
V6E = type(make_mesh().abstract_mesh.abstract_device)("TPU v6 lite", 1, platform="tpu")


@pytest.fixture
def picky(monkeypatch):
    """An implementation first in the table that runs float32 in eights of rows, without chunk_size; notes its runs."""
    runs = []

    class Picky(chunked.Chunked):
        def forward(self, *args):
            runs.append(args[-1].unembedding.shape)
            return super().forward(*args)

        def check(self, options, inputs, platform):
            if platform.name != "cpu":
                raise NotImplementedError(f"needs a CPU, not {platform.device_kind}")
            if inputs.hidden.dtype != jnp.float32:
                raise NotImplementedError(f"takes float32, not {inputs.hidden.dtype}")
            if options.chunk_size is not None:
                raise NotImplementedError("takes no chunk_size")
            return f"{inputs.hidden.shape[0]} x {inputs.unembedding.shape[0]} at once"

    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"picky": Picky(), **api.IMPLEMENTATIONS})
    return runs


def test_the_first_that_can_runs(picky):
    def run(dtype=jnp.float32, **options):
        jax.jit(lambda *x: vocab_stats(*x, **options))(HIDDEN.astype(dtype), UNEMBEDDING.astype(dtype))

    run()
    assert picky == [(10, 4)]
    run(chunk_size=3)
    run(jnp.bfloat16)
    assert len(picky) == 1, "fell through"


def test_an_explicit_name_never_falls_back(picky):
    with pytest.raises(NotImplementedError, match="implementation='picky' cannot run this call here: takes no chunk"):
        vocab_stats(HIDDEN, UNEMBEDDING, chunk_size=3, implementation="picky")
    with pytest.raises(NotImplementedError, match="'reference' cannot run this call here: it is dense"):
        vocab_stats(HIDDEN, UNEMBEDDING, save_logits=True, implementation="reference")
    with pytest.raises(ValueError, match=r"expected one of \['chunked'.*'reference'\] or None, got 'fastest'"):
        explain(HIDDEN, UNEMBEDDING, implementation="fastest")
    vocab_stats(HIDDEN, UNEMBEDDING, implementation="chunked")
    assert not picky


def test_nothing_can_run(monkeypatch):
    monkeypatch.setattr(api, "IMPLEMENTATIONS", {"reference": api.IMPLEMENTATIONS["reference"]})
    with pytest.raises(NotImplementedError, match=r"'reference' cannot run this call here.*chunk_size"):
        vocab_stats(HIDDEN, UNEMBEDDING, chunk_size=3)
    assert "vocab_stats raises NotImplementedError" in explain(HIDDEN, UNEMBEDDING, chunk_size=3)


def test_over_a_mesh_the_part_of_a_device_is_asked_about(picky):
    split = VocabSharding(make_mesh((2, 1, 4)))
    assert "chosen: 3 x 2 at once" in explain(HIDDEN, UNEMBEDDING, sharding=split)
    vocab_stats(HIDDEN, UNEMBEDDING, sharding=split)
    assert set(picky) == {(2, 4)}  # 8 rows over 4 devices, and the last 2 for all of them


def test_platform():
    here = Platform("cpu", "cpu")
    assert platform() == platform(make_mesh()) == platform(AbstractMesh((2,), ("x",))) == here
    with jax.default_device(jax.devices()[3]):
        assert platform() == here
    with jax.set_mesh(make_mesh()):
        assert platform() == here


def test_a_program_for_tpus_is_planned_on_a_cpu(picky):
    """The mesh says what is compiled for, not the machine."""
    mesh = AbstractMesh((1, 1, 1), ("data", "fsdp", "tensor"), abstract_device=V6E)
    assert platform(mesh) == Platform("tpu", "TPU v6 lite")
    text = explain(HIDDEN, UNEMBEDDING, sharding=VocabSharding(mesh))
    assert "for tpu (TPU v6 lite)" in text
    assert "picky       cannot run this call here: needs a CPU, not TPU v6 lite" in text
    assert re.search(r"pallas_tpu  chosen: blocks of \d+ tokens by \d+ columns", text), text


SMOOTHED, EXPECTED = ["log_normalizer", "target_logit", "mean_logit"], ["log_normalizer", "expected_logit"]
ON_TPU = {"sharding": VocabSharding(AbstractMesh((1, 1, 1), ("data", "fsdp", "tensor"), abstract_device=V6E))}
PRODUCTS = [  # of nothing, hidden, unembedding, both; on a TPU dh comes first, but not under a soft-cap
    (SMOOTHED, {}, "1 + 0, 2 + 0, 1 + 2, 1 + 3"),
    (EXPECTED, {}, "1 + 0, 1 + 2, 1 + 2, 1 + 3"),
    (EXPECTED, {"save_logits": True}, "1 + 0, 1 + 1, 1 + 1, 1 + 2"),
    (SMOOTHED, {"implementation": "reference"}, "1 + 0, 1 + 1, 1 + 1, 1 + 2"),
    (SMOOTHED, ON_TPU, "1 + 0, 2 + 0, 1 + 2, 2 + 2"),
    (SMOOTHED, {"softcap": 30.0, **ON_TPU}, "1 + 0, 1 + 2, 1 + 2, 1 + 4"),
    (SMOOTHED, {"save_logits": True, **ON_TPU}, "1 + 0, 2 + 0, 1 + 1, 1 + 2"),
]


@pytest.mark.parametrize(("statistics", "options", "products"), PRODUCTS, ids=str)
def test_explain_counts_products(statistics, options, products):
    text = explain(HIDDEN, UNEMBEDDING, TARGETS, statistics=statistics, **options)
    assert ", ".join(line[-5:] for line in text.splitlines()[-4:]) == products
    assert ("saved logits, where the backward pass needs them: 0 MiB" in text) == ("save_logits" in options)
