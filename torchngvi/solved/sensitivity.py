"""By how much a conclusion hangs on the prior: the optimum's derivative in the precision of its prior.

With the precision λΛ, the gradient r = (Cᵀg, tril(CᵀHC) - γI) of L in (m, C) moves at λ = 1 by that of the prior alone,
and the optimum follows as in `torchngvi.solved.differentiable`:

    H (δ, T) = -γ (CᵀΛ(m - m₀), tril(CᵀΛC))        dm/d log λ = Cδ        dC/d log λ = CT

One system serves all conclusions (Giordano, Broderick and Jordan 2018, on covariances and robustness).
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import read_names
from torchngvi.errors import InputError, PairError
from torchngvi.expectations import Quadrature
from torchngvi.fitting.fit import fit
from torchngvi.fitting.records import FitResult, read_result
from torchngvi.interfaces import AdditiveTractable
from torchngvi.models import checks
from torchngvi.numerics.inference_mode import tracked
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.rules.root_system import Direction
from torchngvi.solved.system import response
from torchngvi.structures import FullAlgebra

_AT_OPTIMUM = 1e-3  # natural-gradient norm of q above which it is no optimum
_FINEST = 1e-8  # relative residual of the system


class Sensitivity(NamedTuple):
    """How the conclusions move if the precision of the prior doubles, in the standard deviations that they have now.

    Attributes:
        shift: of their means, to first order, log 2 times the derivative, (K,).
        spread: of their standard deviations, as a share of these, to first order, (K,).
        true_shift: of their means by a fit with the doubled precision, (K,).
        true_spread: of their standard deviations by that fit, (K,).
        names: of the conclusions.

    >>> print(Sensitivity(*torch.tensor([[0.1, -0.3], [-0.2, -0.1], [0.1, -0.28], [-0.2, -0.1]]), ("age", "weight")))
    If the precision of the prior doubles, weight moves most: by -0.30 of its standard deviations to first order, by \
-0.28 in a fit. Standard deviations change by -20 % to -10 %.
    """

    shift: Tensor  # (K,)
    spread: Tensor  # (K,)
    true_shift: Tensor  # (K,)
    true_spread: Tensor  # (K,)
    names: tuple[str, ...]

    def __str__(self) -> str:
        most = int(self.true_shift.abs().argmax())
        low, high = (100 * float(part) for part in self.true_spread.aminmax())
        return (
            f"If the precision of the prior doubles, {self.names[most]} moves most: by {float(self.shift[most]):.2f} "
            f"of its standard deviations to first order, by {float(self.true_shift[most]):.2f} in a fit. Standard "
            f"deviations change by {low:.0f} % to {high:.0f} %."
        )


@tracked
def sensitivity(result: FitResult, of: Any = None, names: Sequence[str] | None = None) -> Sensitivity:
    """Tell by how much conclusions move if the precision of the prior doubles, in their own standard deviations.

    One wants it before a conclusion is reported: what moves by a good part of its standard deviation was said by the
    prior as much as by the data.  The derivative takes one linear system, and a fit with the doubled precision from
    there stands beside it, which shows how far the derivative can be trusted.  For another change of the prior, or of
    one part of it, see `torchngvi.solved.solve`.

    Args:
        result: of `torchngvi.fit`, of a Gaussian over a structure with all products and a `torchngvi.GeneralizedLinear`
            or `torchngvi.models.SoftmaxRegression`; it stays as it is.
        of: the conclusions, linear in the coefficients, (K, D), such as contrasts or rows whose predictor is looked at;
            by default each coefficient.
        names: of the conclusions, K of them; by default those of the result, or their numbers.

    Returns:
        How each conclusion moves.

    Raises:
        PairError: a target or a posterior without known changes.
        InputError: a q that is not at its optimum; conclusions of another size or about nothing; names of another
            number.

    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear, fit
    >>> model = GeneralizedLinear(torch.ones(3, 1).double(), [1.0, 2.0, 3.0], "gaussian")
    >>> result = fit(CholeskyGaussian(1, dtype=torch.float64), model, progress=False)
    >>> print(sensitivity(result))  # 6/4 and 6/5, in units of 1/2
    If the precision of the prior doubles, coefficient 0 moves most: by -0.52 of its standard deviations to first \
order, by -0.60 in a fit. Standard deviations change by -11 % to -11 %.
    """
    q, target = _of(result)
    rows = torch.eye(q.dim, dtype=q.dtype, device=q.mean.device) if of is None else checks.numbers("of", of, q.mean)
    if rows.ndim != 2 or rows.shape[1] != q.dim or not len(rows):
        raise InputError(f"conclusions are rows (K, {q.dim}) of factors of the coefficients; got {tuple(rows.shape)}.")
    if bool((rows == 0).all(-1).any()):
        raise InputError("a conclusion whose factors are all 0 is about no coefficient; leave it out.")
    words = _named(result, names, len(rows), of is None)
    mean, covariance = _derivative(q, target)
    sd = _sd(rows, q.covariance)
    doubled = copy.copy(target)
    doubled.prior = target.prior.scaled(2.0)
    other = copy.deepcopy(q)
    fit(other, doubled, tolerance=_FINEST if q.dtype == torch.float64 else None, progress=False)
    factor = math.log(2)
    return Sensitivity(
        factor * (rows @ mean) / sd,
        factor * ((rows @ covariance) * rows).sum(-1) / (2 * sd.square()),
        rows @ (other.mean - q.mean) / sd,
        _sd(rows, other.covariance) / sd - 1,
        words,
    )


def _of(result: FitResult) -> tuple[Gaussian, AdditiveTractable]:
    """The posterior and the target of a result."""
    result = read_result("sensitivity", result)
    q, target = result.posterior, result.target
    if not isinstance(target, AdditiveTractable) or not target.curved or not target.prior_alone:
        raise PairError(
            "sensitivity is for models with a Gaussian prior whose packets tell how they change with q: a "
            "GeneralizedLinear with a dense X and a log-concave likelihood, or a SoftmaxRegression; got "
            f"{'a copy of a result, without its model' if target is None else type(target).__name__}."
        )
    if not isinstance(q, Gaussian) or q.batch_shape or not isinstance(q.structure, FullAlgebra):
        raise PairError(
            f"sensitivity is of one Gaussian over a structure with all products: dense, diagonal or blocks; got {q!r}."
        )
    return q, target


def _named(result: FitResult, names: Sequence[str] | None, count: int, coefficients: bool) -> tuple[str, ...]:
    if names is None and coefficients and result.names:
        names = result.names
    if names is None:
        names = [f"{'coefficient' if coefficients else 'conclusion'} {k}" for k in range(count)]
    words = read_names("names", names, f"must have one entry a conclusion, {count}")
    if len(words) != count:
        raise InputError(f"names must have one entry a conclusion, {count}; got {names!r}.")
    return words


@torch.no_grad()
def _derivative(q: Gaussian, target: AdditiveTractable) -> tuple[Tensor, Tensor]:
    """The derivatives of mean and covariance in log λ, (D,) and (D, D)."""
    frame, structure = q.frame(), q.structure
    assert isinstance(structure, FullAlgebra)
    norm = float(q.norm2(q.local(Quadrature()(q, target))).sqrt())
    if not norm <= _AT_OPTIMUM:
        raise InputError(
            f"sensitivity is that of an optimum, and the natural-gradient norm of q is {norm:.2g}: fit it to this "
            f"model first, below {_AT_OPTIMUM:g}{'' if q.dtype == torch.float64 else ', in float64'}."
        )
    prior = target.prior.scaled(target.temperature)
    u = Direction(-frame.pull(prior.force(q.mean)), structure.tril(-prior.framed(frame)))
    x = response(q, target, u, max(norm, _FINEST) if q.dtype == torch.float64 else _AT_OPTIMUM)
    root = frame.root
    moved = structure.matmul(x.T, root) if frame.upper else structure.matmul(root, x.T)
    half = replace(frame, root=moved).dense() @ frame.dense().mT
    return frame.push(x.delta), half + half.mT


def _sd(rows: Tensor, covariance: Tensor) -> Tensor:
    """The standard deviations of the conclusions, (K,)."""
    return ((rows @ covariance) * rows).sum(-1).sqrt()
