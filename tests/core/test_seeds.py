"""Whole numbers that are drawn alike on every version of PyTorch that the library runs on."""

import pytest
import torch

from torchngvi.expectations import Quasi
from torchngvi.expectations.draws import drawn_seed, whole_numbers


@pytest.mark.parametrize(
    ("bits", "golden"), [(28, [130329135, 136432832]), (30, [398764591, 404868288]), (31, [398764591, 1478610112])]
)
def test_golden_values(bits, golden):
    """As PyTorch 2.6 and 2.13 have drawn them; torch.randint itself gives others on the first."""
    numbers = whole_numbers(bits, (2,), torch.Generator().manual_seed(0))
    assert numbers.tolist() == golden
    assert ((numbers >= 0) & (numbers < 2**bits)).all()


def test_seeds_are_of_the_default_generator():
    torch.manual_seed(0)
    assert (drawn_seed(), drawn_seed()) == (398764591, 1478610112)
    assert torch.rand(()).item() == pytest.approx(0.30742282, abs=1e-7)  # the generator has moved on as far


def test_sobol_points_of_a_seed():
    z = Quasi(4)(torch.zeros(2, dtype=torch.float64))
    first = torch.tensor([-2.4423455590982854, -0.17786738630274096], dtype=torch.float64)
    torch.testing.assert_close(z[0], first, rtol=0, atol=1e-12)
