"""The posterior of a network as a posterior of the library: the same density, divergence and variances."""

import math

import pytest
import torch
from torch import nn

import torchngvi
from torchngvi import CholeskyGaussian, DiagonalGaussian
from torchngvi.errors import InputError
from torchngvi.structures import Dense, EqualBlocks

STRUCTURES = {
    "diagonal": "diagonal",
    "kronecker": "kronecker",
    "rows": {"2.*": "rows"},
    "dense": {"2.*": "dense", "*": "diagonal"},
    "all": {"0.*": "kronecker", "2.*": "rows"},
}


def trained(structure, temperature=0.3):
    """A posterior whose covariance is that of data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    q = torchngvi.network(model, 30, STRUCTURES[structure], prior_precision=2.0, temperature=temperature)
    q.laplace([(torch.randn(30, 3, dtype=torch.float64), torch.zeros(30))])
    return q


def flat(q, tensors):
    """The numbers of all parameters as `as_gaussian` has them."""
    found, at = [], 0
    for family in q.each():
        found.append(family.vector(tensors[at : at + len(family.names)]))
        at += len(family.names)
    return torch.cat(found)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_density_is_that_of_the_families(structure):
    """log q(θ) = -½|C⁻¹(θ - m)|²/T - ½ log|T C Cᵀ| - ½ D log 2π, at points that all weights set apart."""
    q = trained(structure)
    gaussian = q.as_gaussian()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        moves = [0.1 * torch.randn(m.shape, generator=generator, dtype=m.dtype) for m in q.mean.values()]
        squared, log_det, at = 0.0, 0.0, 0
        for family in q.each():
            part, at = moves[at : at + len(family.names)], at + len(family.names)
            squared += sum(w.square().sum() for w in family.whitened(part))
            log_det += family.log_det()
        dim = gaussian.dim
        expected = -0.5 * (squared / q.temperature + log_det + dim * math.log(q.temperature * 2 * math.pi))
        torch.testing.assert_close(gaussian.log_prob(gaussian.mean + flat(q, moves)), expected)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_divergence_and_variances_agree(structure):
    q = trained(structure)
    gaussian = q.as_gaussian()
    prior = DiagonalGaussian(gaussian.dim, scale=torch.full((gaussian.dim,), 2.0**-0.5, dtype=torch.float64))
    torch.testing.assert_close(gaussian.kl(prior), q.kl())
    torch.testing.assert_close(gaussian.mean, flat(q, list(q.mean.values())))
    torch.testing.assert_close(gaussian.variance, flat(q, list(q.variance.values())))
    margins = q.as_gaussian(marginals=True)
    assert type(margins) is DiagonalGaussian
    torch.testing.assert_close(margins.variance, gaussian.variance)
    torch.testing.assert_close(margins.mean, gaussian.mean)


def test_a_draw_of_the_network_is_a_draw_of_the_posterior():
    """Coloured by the roots of q, noise has the covariance of `as_gaussian`: C Cᵀ from the images of unit vectors."""
    q = trained("all")
    sizes = [m.numel() for m in q.mean.values()]
    columns = []
    for unit in torch.eye(sum(sizes), dtype=torch.float64):
        noise = [e.view_as(m) for e, m in zip(unit.split(sizes), q.mean.values(), strict=True)]
        colored, at = [], 0
        for family in q.each():
            part, at = noise[at : at + len(family.names)], at + len(family.names)
            colored += family.colored(part)
        columns.append(flat(q, colored))
    C = torch.stack(columns, 1)
    torch.testing.assert_close(q.temperature * C @ C.mT, q.as_gaussian().covariance)


def test_the_structure_has_a_block_for_weights_that_depend_on_one_another():
    assert type(trained("diagonal").as_gaussian()) is DiagonalGaussian
    found = trained("rows").as_gaussian()
    assert type(found) is CholeskyGaussian
    assert found.structure == EqualBlocks(2, 5)
    assert trained("all").as_gaussian().structure.sizes == (12, 1, 1, 1, 1, 5, 5)
    whole = torchngvi.network(nn.Linear(2, 2), 10, "dense").as_gaussian()
    assert whole.structure == Dense(6)


def test_a_large_kronecker_product_is_not_written_out():
    q = torchngvi.network(nn.Linear(100, 30), 10, "kronecker")
    with pytest.raises(InputError, match=r"for 2,000 weights at most, and weight has 3,000; say as_gaussian\(marg"):
        q.as_gaussian()
    assert q.as_gaussian(marginals=True).dim == 3030
