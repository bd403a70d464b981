"""Exact expectations of targets that know their own, and estimators on the cliques of a forest."""

from typing import Self, final

from torch import Tensor

from torchngvi.arguments import read_instance
from torchngvi.errors import PairError
from torchngvi.expectations.draws import Fixed
from torchngvi.interfaces import Cost, Estimator, Expectation, Posterior, Target, TractableTarget
from torchngvi.models.factors import FactorTarget
from torchngvi.posteriors.precision import clique_marginals

# Exact expectations, for targets that know their own


@final
class Quadrature(Estimator):
    """E_q[ℓ] and its derivative as the target computes them, without draws: the default where the target knows them.

    For generalised linear models E_q[ℓ] is a sum of scalar expectations, and the packet is `Sites`: for each row α =
    ∂F/∂e and β = 2 ∂F/∂v, from which each posterior builds what it needs, a D x D curvature or less.  The derivative is
    that of the computed value, so that steps can be found by trial.

    >>> import torch
    >>> from torchngvi import CholeskyGaussian, GeneralizedLinear
    >>> q = CholeskyGaussian(1)
    >>> model = GeneralizedLinear(torch.ones(1, 1), [2.0], "gaussian")  # y = 2 with noise 1, prior N(0, 1)
    >>> e = Quadrature()(q, model)
    >>> e.derivative.raw().g.item(), e.derivative.raw().H.item()  # -2, and 1 of the data with 1 of the prior
    (-2.0, 2.0)
    """

    comparable = True
    needs = TractableTarget

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate E_q[ℓ] and its derivative at q, as the target gives them."""
        assert isinstance(target, TractableTarget)
        value, derivative = target.expected_energy(q.frame())
        return Expectation(value, derivative, target.temperature, target.comparable, Cost(1, 1))


# Expectations term by term: any estimator, on the cliques of a forest as the members of one batch
#
# For a factor f_c of the coordinates θ_c of a node and its ancestors, E_q[log f_c] is that under the marginal of q,
# N(m_c, C_c C_cᵀ).  With C upper triangular, C_c is the part of C in the clique, and the derivative in the frame of q
# is a sum over cliques:
#
#     a = Σ_c a_c      W = Σ_c W_c,      a_c = C_cᵀ g_c,  W_c = C_cᵀ H_c C_c, each in the places of its clique.


@final
class PerFactor(Estimator):
    """The expectation of a `FactorTarget`, each factor on its own cliques.

    Wanted for models with many groups: k coordinates of a clique take the place of D.  `Fixed` draws determine the fit
    with 2k of them, not 2D, and second derivatives are k x k.  Give each group draws of its own by ``apart=True``:
    where all see the same ones, their errors in the global coordinates add up.  `torchngvi.fit` does so by itself.

    Args:
        estimator: of the factors, ``Stein(Fixed(64, apart=True))`` for example; those that know their expectation are
            exact.

    Raises:
        PairError: on use, a q that is not over the forest of the target, or an estimator whose derivative is that of
            its value up to noise only, as `SampleAverage`, with draws that the cliques share: the noise of their sum is
            then not the sum of theirs.

    >>> import torch
    >>> from torchngvi import VN, PrecisionCholeskyGaussian
    >>> from torchngvi.expectations import Hessian
    >>> from torchngvi.stepsizes import Constant
    >>> from torchngvi.structures import arrow
    >>> groups, y = arrow(groups=3, local=1, globals=1), torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    >>> def group(theta):  # b_n, g
    ...     return -0.5 * (y - theta[..., 0]) ** 2 - 0.5 * (theta[..., 0] - theta[..., 1]) ** 2
    >>> target = FactorTarget(groups, [(0, group), (-1, lambda theta: -0.5 * theta[..., 0] ** 2)])
    >>> q = PrecisionCholeskyGaussian(4, structure=groups, dtype=torch.float64)
    >>> opt = VN(q, lr=1.0, step_size=Constant(), estimator=PerFactor(Hessian(draws=2)))
    >>> loss = [opt.step(target) for _ in range(2)]
    >>> [round(x, 9) for x in q.mean.tolist()]
    [0.4, -0.35, 1.15, 0.3]
    """

    needs = FactorTarget

    def __init__(self, estimator: Estimator) -> None:
        what = "is that of the factors, such as Stein(16)"
        self.estimator = read_instance("estimator", estimator, Estimator, what, error=PairError)
        self.comparable, self.unbiased = estimator.comparable, estimator.unbiased
        self.generator = getattr(estimator, "generator", None)  # the optimizer saves its state

    @property
    def fixed(self) -> bool:
        """Whether the estimator of the factors sees the same draws at every call."""
        return self.estimator.fixed

    def fresh(self, number: int) -> Self:
        """Return the estimator on other draws, where those of the factors are fixed."""
        return type(self)(self.estimator.fresh(number))

    def __call__(self, q: Posterior, target: Target) -> Expectation:
        """Evaluate at q."""
        assert isinstance(target, FactorTarget)
        structure, exact = target.structure, Quadrature()
        if q.structure != structure or not q.upper:
            raise PairError(
                f"PerFactor needs a q whose precision has the pattern of its target, {structure}; got a "
                f"{type(q).__name__} over {q.structure}. Use PrecisionCholeskyGaussian({q.dim}, structure=...)."
            )
        cliques, seen, packets = clique_marginals(q), [], []
        for kind, factor in target.by_kind():
            clique, estimator = cliques[kind], exact if isinstance(factor, TractableTarget) else self.estimator
            seen.append(estimator(clique, factor))
            packets.append((kind, seen[-1].derivative.framed(clique.frame())))
        values = [e.value.sum(-1) for e in seen]
        return Expectation(
            sum(values[1:], values[0]),
            target.assembled(packets),
            target.temperature,
            self.comparable and target.comparable,
            Cost(*(max(parts) for parts in zip(*(e.cost for e in seen), strict=True))),  # a pass sees each clique once
            self._noise2(seen),
        )

    def _noise2(self, seen: list[Expectation]) -> Tensor | None:
        """The noise of independent terms adds up, in the coordinates of a group and in those that groups share."""
        noises = [e.noise2.sum(-1) for e in seen if e.noise2 is not None]
        if not noises:
            return None
        draws = getattr(self.estimator, "draws", None)
        if not isinstance(draws, Fixed) or not draws.apart:
            raise PairError(
                f"{type(self.estimator).__name__} has its steps judged by its noise, which does not add up over "
                "cliques that share their draws. Give each its own: Fixed(64, apart=True)."
            )
        return sum(noises[1:], noises[0])
