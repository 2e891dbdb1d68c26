"""What compiled programs of the operator cost stays what it was: cycles, memory, products and collectives."""

import importlib.util
import json

import make_static_goldens
import pytest

GOLDENS = json.loads(make_static_goldens.FILE.read_text())
CYCLES = 0.03  # part by which they may grow: more than a compiler's moods, less than a stall in every block
MEMORY = 2**16  # bytes by which temporaries may grow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
    pytest.mark.skipif(
        make_static_goldens.versions() != GOLDENS["versions"],
        reason="the goldens are of another compiler: python tests/make_static_goldens.py",
    ),
]


@pytest.fixture(scope="module")
def costs():
    return make_static_goldens.figures()


@pytest.mark.parametrize("name", make_static_goldens.PROBLEMS)
def test_no_program_costs_more(costs, name):
    now, golden = costs[name], GOLDENS["problems"][name]
    print(f"cycles {now['cycles']:,} ({golden['cycles']:,}), temporaries {now['temporaries']:,} bytes")
    assert now["cycles"] == pytest.approx(golden["cycles"], rel=CYCLES)
    assert now["temporaries"] <= golden["temporaries"] + MEMORY
    for figure in ("kernels", "products", "collectives", "loops of unknown length"):
        assert now[figure] == golden[figure], figure
