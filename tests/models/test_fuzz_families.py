"""Random configurations against PyTorch in float64: a few of `tests/campaigns/fuzz_families.py`."""

import pytest
from campaigns import fuzz_families
from parity import VARIANTS

pytestmark = pytest.mark.usefixtures("quick_compile")


def check(families, seed, numbers):
    pytest.importorskip("torch")
    fuzz_families.quiet()
    assert not fuzz_families.run(families, seed, numbers)


def test_random_configuration():
    check(["mixtral"], 3, [0])


@pytest.mark.slow
@pytest.mark.parametrize("family", VARIANTS)
def test_random_configurations(family):
    check([family], 4, [0, 1])


def test_a_configuration_is_drawn_from_its_number():
    assert fuzz_families.draw("llama", 0, 1) == fuzz_families.draw("llama", 0, 1) != fuzz_families.draw("llama", 0, 2)
    assert set(fuzz_families.DRAWN) == set(VARIANTS)
