"""Forests: each verb against dense matrices, the verbs of cliques, what moves q, and that all of it is linear in n."""

import copy
import math
import pickle
import re

import pytest
import torch
from cases import DTYPE, EXACT, IDENTITY, close, randn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchngvi import (
    VN,
    CholeskyGaussian,
    NaturalGaussian,
    NaturalGradientVI,
    PrecisionCholeskyGaussian,
    Snngm,
    fit,
    rules,
)
from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Cost, Expectation, Framed, Raw
from torchngvi.numerics import small_blocks
from torchngvi.posteriors import DiagonalGaussian
from torchngvi.rules import LocalExponential, NaturalGradient, VariationalNewton
from torchngvi.structures import Dense, EqualBlocks, Forest, arrow, forest, nested
from torchngvi.testing import check_structure
from torchngvi.testing.matrices import definite_in, mask, root_in, symmetric_in

FORESTS = {
    "arrow": arrow(groups=3, local=2, globals=2),
    "unequal arrow": arrow(local=[1, 2, 1], globals=3),
    "large blocks": arrow(groups=2, local=5, globals=6),
    "three levels": nested([0, 0, 1, 2], [0, 0, 1], local=[1, 2, 1], globals=2),
    "ragged": forest(parents=[4, 5, 4, 6, 6, 7, 7, -1], sizes=[2, 1, 1, 1, 2, 1, 1, 2]),
    "two trees": nested([0, 1, 1, 0], local=[2, 1]),
    "chain": forest(parents=[1, 2, 3, -1], sizes=[1, 2, 1, 1]),
    "roots": Forest((-1, -1, -1), (2, 1, 2)),
}
forests = pytest.mark.parametrize("name", FORESTS)
PRECISION = [PrecisionCholeskyGaussian, NaturalGaussian]


def posterior_in(kind, pattern, batch=(), seed=0):
    """Away from zero and the identity: mean random, S = T Tᵀ of a random root."""
    q = kind(pattern.dim, batch, structure=pattern, dtype=DTYPE)
    T, mean = pattern.from_dense(root_in(pattern, batch, seed)), randn(*batch, pattern.dim, seed=seed + 1)
    S = pattern.congruence(T, pattern.eye(mean))
    new = (mean, T) if kind is PrecisionCholeskyGaussian else (pattern.smv(S, mean), S)
    q.assign(type(q.coordinates)(*new), torch.ones(batch, dtype=torch.bool))
    return q


def packet(a, W, temperature=1.0):
    value = torch.zeros(a.shape[:-1], dtype=a.dtype)
    return Expectation(value, Framed(a, W), temperature, True, Cost(1, 1))


@forests
class TestAlgebra:
    def test_it_keeps_the_contract(self, name):
        check_structure(FORESTS[name])

    def test_marginals_go_down_the_forest(self, name):
        """The entries of V = T⁻ᵀT⁻¹, from those of T⁻¹."""
        pattern = FORESTS[name]
        T = root_in(pattern, (2,), 1)
        inverse = pattern.inverse(pattern.from_dense(T))
        V = torch.linalg.inv(T @ T.mT)
        close(pattern.full(pattern.marginals(inverse, transposed=True)), V * mask(pattern), IDENTITY)

    def test_the_frame_of_a_packet_is_that_of_its_cliques(self, name):
        """g and H as sums over all nodes with their ancestors, framed at once and clique by clique."""
        pattern, batch = FORESTS[name], (2,)
        T = pattern.from_dense(root_in(pattern, batch, 1))
        C = torch.linalg.inv(root_in(pattern, batch, 1)).mT
        g, H, vectors, matrices = 0.0, 0.0, [], []
        places = pattern.gather(torch.arange(pattern.dim))
        for k, (place, root) in enumerate(zip(places, pattern.cliques(T), strict=True)):
            n, size = place.shape
            g_c, X = randn(*batch, n, size, seed=10 + k), randn(*batch, n, size, size, seed=20 + k)
            C_c = torch.linalg.inv(root).mT
            vectors.append((C_c.mT @ g_c[..., None])[..., 0])
            matrices.append(C_c.mT @ (X + X.mT) @ C_c)
            to = torch.nn.functional.one_hot(place, pattern.dim).to(DTYPE)  # (n, k, D)
            g = g + torch.einsum("...nk,nkd->...d", g_c, to)
            H = H + torch.einsum("...nkl,nkd,nle->...de", X + X.mT, to, to)
        a, W = pattern.scatter(vectors, matrices)
        close(a, (C.mT @ g[..., None])[..., 0], IDENTITY)
        close(pattern.full(W), C.mT @ H @ C, IDENTITY)  # no mask: where H has the pattern, so has its frame

    def test_a_clique_is_a_marginal(self, name):
        """(T_c T_cᵀ)⁻¹ is the covariance of the coordinates of the clique."""
        pattern = FORESTS[name]
        T = root_in(pattern, (2,), 1)
        V = torch.linalg.inv(T @ T.mT)
        places = pattern.gather(torch.arange(pattern.dim))
        for place, root in zip(places, pattern.cliques(pattern.from_dense(T)), strict=True):
            close(root.tril(), root, 0.0)
            close(torch.linalg.inv(root @ root.mT), V[:, place[:, :, None], place[:, None, :]], IDENTITY)

    def test_gather_takes_samples(self, name):
        pattern, x = FORESTS[name], randn(3, 2, FORESTS[name].dim, seed=1)
        for place, rows in zip(pattern.gather(torch.arange(pattern.dim)), pattern.gather(x), strict=True):
            close(rows, x[..., place], 0.0)

    @pytest.mark.parametrize("kind", PRECISION)
    def test_a_posterior_over_it_is_copied_saved_and_moved(self, name, kind):
        q = posterior_in(kind, FORESTS[name], (2,))
        twin = copy.deepcopy(q)
        assert twin.structure == q.structure
        other = kind(q.dim, (2,), structure=FORESTS[name], dtype=DTYPE)
        other.load_state_dict(q.state_dict())
        for x in (twin, other):
            close(x.mean, q.mean, 0.0)
            close(x.covariance, q.covariance, 0.0)
        close(q.to(torch.float32).variance, twin.variance.float(), 1e-4)
