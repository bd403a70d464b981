"""Logistic regression of several classes: the softmax likelihood with a prior that treats all classes alike.

The K coefficients of each column have independent priors N(0, 1/τ), as those of scikit-learn's ``LogisticRegression``
with C = 1/τ.  The differences to the first class, which the likelihood has, then have the precision τ (I - 11ᵀ/K), and
what is predicted does not depend on which class comes first.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchngvi.adapters.sklearn.base import Array
from torchngvi.models import SoftmaxRegression
from torchngvi.models.standardize import Standardization
from torchngvi.posteriors.gaussian import Gaussian

NODES = 512  # of the rule for more than three classes


def softmax_model(
    design: Array, codes: Array, precision: Array, weights: Array | None, mean: Any = 0.0
) -> SoftmaxRegression:
    """The model of K classes 0, ..., K - 1.

    >>> model = softmax_model(np.eye(3), np.arange(3), np.ones(3), None)
    >>> model.dim, [round(entry, 3) for entry in model.prior.precision[0, :4].tolist()]
    (6, [0.667, 0.0, 0.0, -0.333])
    """
    classes = int(codes.max()) + 1
    between = np.eye(classes - 1) - 1 / classes
    return SoftmaxRegression(
        torch.as_tensor(design),
        torch.as_tensor(codes.astype(np.float64)),
        prior_precision=torch.as_tensor(np.kron(between, np.diag(precision))),
        prior_mean=mean,
        weights=weights,
        num_nodes=max(NODES, 2 * classes),
    )


def log_odds(codes: Array, weights: Array | None) -> Array:
    """The logarithms of the shares of classes 1, ..., K - 1 over that of class 0, (K - 1,); half a row where one is 0.

    >>> log_odds(np.array([0, 1, 1, 2]), None).round(3)
    array([0.693, 0.   ])
    """
    count = np.bincount(codes, weights).astype(np.float64)
    share = np.maximum(count / count.sum(), 0.5 / (len(codes) + 1))
    found: Array = np.log(share[1:] / share[0])
    return found


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


def centred(q: Gaussian, classes: int, units: Standardization | None = None) -> Centred:
    """Mean and standard deviation of the coefficients of each class under a q over differences to the first.

    Args:
        q: the posterior.
        classes: K.
        units: of the columns of q, from which the coefficients go to those of the user.

    >>> from torchngvi import CholeskyGaussian
    >>> centred(CholeskyGaussian(1, dtype=torch.float64), 2).sd
    array([[0.5],
           [0.5]])
    """
    to_all = centring(classes)
    mean = to_all @ q.mean.unflatten(-1, (classes - 1, -1))
    root = q.frame().dense().unflatten(-2, (classes - 1, -1))  # (K - 1, D, (K - 1) D)
    if units is not None:
        mean, root = units.to_user(mean), units.to_user(root, -2)
    sd = torch.einsum("kj,jde->kde", to_all, root).square().sum(-1).sqrt()
    return Centred(mean.numpy().copy(), sd.numpy().copy())


def draws_of(q: Gaussian, classes: int, count: int, generator: torch.Generator) -> Array:
    """Draw coefficients of all classes, (count, K, D)."""
    differences: Any = q.sample((count,), generator=generator).unflatten(-1, (classes - 1, -1))
    drawn: Array = (centring(classes) @ differences).numpy()
    return drawn
