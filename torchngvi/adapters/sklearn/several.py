"""Logistic regression of several classes: the softmax likelihood with a prior that treats all classes alike.

With independent priors N(0, 1/(2τ)) of the K coefficients of each column the difference of any two of them has the
prior N(0, 1/τ), which is that of two classes.  The differences to the first class, which the likelihood has, then have
the precision 2τ (I - 11ᵀ/K), and what is predicted does not depend on which class comes first.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchngvi.adapters.sklearn.base import Array
from torchngvi.models import SoftmaxRegression
from torchngvi.posteriors.gaussian import Gaussian

NODES = 512  # of the rule for more than three classes


def softmax_model(design: Array, codes: Array, precision: Array, weights: Array | None) -> SoftmaxRegression:
    """The model of K classes 0, ..., K - 1.

    Args:
        design: the rows, (N, D).
        codes: their classes, (N,).
        precision: of the difference of two classes' coefficients, of each column, (D,).
        weights: factors of the log likelihood of each row, (N,), or None.

    Returns:
        The model, over the K - 1 blocks of D differences to the first class.

    >>> model = softmax_model(np.eye(3), np.arange(3), np.ones(3), None)
    >>> model.dim, [round(entry, 3) for entry in model.prior.precision[0, :4].tolist()]
    (6, [1.333, 0.0, 0.0, -0.667])
    """
    classes = int(codes.max()) + 1
    between = 2 * (np.eye(classes - 1) - 1 / classes)
    return SoftmaxRegression(
        torch.as_tensor(design),
        torch.as_tensor(codes.astype(np.float64)),
        prior_precision=torch.as_tensor(np.kron(between, np.diag(precision))),
        weights=weights,
        num_nodes=max(NODES, 2 * classes),
    )


class Centred(NamedTuple):
    """Coefficients of all K classes, of which those of a column sum to zero over the classes.

    Attributes:
        mean: posterior means, (K, D).
        sd: posterior standard deviations, (K, D).
    """

    mean: Array
    sd: Array


def centring(classes: int) -> Tensor:
    """The matrix (K, K - 1) from differences to the first class to coefficients that sum to zero.

    >>> centring(2)
    tensor([[-0.5000],
            [ 0.5000]], dtype=torch.float64)
    """
    return (torch.eye(classes, dtype=torch.float64) - 1 / classes)[:, 1:]


def centred(q: Gaussian, classes: int) -> Centred:
    """Mean and standard deviation of the coefficients of each class under a q over differences to the first.

    >>> from torchngvi import CholeskyGaussian
    >>> centred(CholeskyGaussian(1, dtype=torch.float64), 2).sd
    array([[0.5],
           [0.5]])
    """
    to_all = centring(classes)
    mean = to_all @ q.mean.unflatten(-1, (classes - 1, -1))
    root = q.frame().dense().unflatten(-2, (classes - 1, -1))  # (K - 1, D, (K - 1) D)
    sd = torch.einsum("kj,jde->kde", to_all, root).square().sum(-1).sqrt()
    return Centred(mean.numpy().copy(), sd.numpy().copy())


def draws_of(q: Gaussian, classes: int, count: int, generator: torch.Generator) -> Array:
    """Draw coefficients of all classes, (count, K, D)."""
    differences: Any = q.sample((count,), generator=generator).unflatten(-1, (classes - 1, -1))
    drawn: Array = (centring(classes) @ differences).numpy()
    return drawn
