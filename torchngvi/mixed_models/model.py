"""`torchngvi.MixedModel`: the log joint of a mixed model, with the fit that a statistician wants of it."""

from typing import Literal, final

from torchngvi.errors import InputError
from torchngvi.fitting.fit import fit
from torchngvi.mixed_models import response
from torchngvi.mixed_models.integrated import Integrated, Weighted, integrated
from torchngvi.mixed_models.locals import ByQuadrature, Conditional, Locals
from torchngvi.mixed_models.result import MixedResult
from torchngvi.models import MixedLogJoint
from torchngvi.models.arguments import count
from torchngvi.numerics.inference_mode import tracked

Marginalise = Literal["quadrature", "response", "none"]

_MOST = 2  # random effects that are integrated out by default
_DEAR = 2e7  # rows times nodes beyond which they are not
_FEWEST = 100  # draws


@final
class MixedModel(MixedLogJoint):
    """A generalised linear mixed model with one grouping factor: y_ij ~ family(x_ijᵀβ + z_ijᵀb_i), b_i ~ N(0, Ω⁻¹).

    One wants it for repeated measurements of patients, pupils of schools, and other data in groups whose levels, and
    perhaps slopes, vary.  `fit` answers in the units of the data, with random effects integrated out where that can be
    done; as a log joint over all coordinates, with closed-form expectations, it is a target for `torchngvi.fit` too.

    Args:
        X: the design of the fixed effects β, (N, p), dense.
        y: the targets, (N,), as in `torchngvi.GeneralizedLinear`.
        random: `torchngvi.models.RandomEffects`, or a pair (Z, groups): the design (N, r) and the group of each row.
        family: the likelihood, "bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian" (noise 1), or a
            `Likelihood` such as ``GaussianNoise(0.1)`` or ``NegativeBinomial(2.0)``.
        prior: `torchngvi.models.MixedPrior`; by default N(0, 10²) of each fixed effect, and of Ω the Wishart prior of
            Kass and Natarajan (2006), see `torchngvi.models.MixedLogJoint`.
        weights: factors of the log likelihood of each row, (N,), not negative.
        offset: what is added to the linear predictor, (N,), as the logarithm of an exposure.

    Raises:
        InputError: as `torchngvi.GeneralizedLinear`; designs of other numbers of rows, groups that are no numbers
            0, ..., n - 1 or have no rows, columns of Z that depend on one another, or a prior out of range.

    >>> import torch
    >>> X = torch.ones(6, 1, dtype=torch.float64)
    >>> model = MixedModel(X, [3, 4, 0, 1, 2, 6], (X, [0, 0, 1, 1, 2, 2]), "poisson_log")
    >>> model.dim  # three effects of groups, a fixed one, and a variance
    5
    """

    @tracked
    def fit(
        self,
        *,
        marginalise: Marginalise | None = None,
        nodes: int | None = None,
        draws: int = 4096,
        seed: int = 0,
        progress: bool = True,
    ) -> MixedResult:
        """Fit the model: fixed effects and variance components with intervals that are theirs, and all random effects.

        A Gaussian over all coordinates makes the posterior of variance components too narrow and, of binary data,
        shifts it. So random effects are integrated out, by adaptive Gauss-Hermite quadrature over the r effects of each
        group; the few global parameters have a Gaussian by natural-gradient variational inference, whose draws are
        weighted to their posterior, with a k-hat; random effects have their moments given the globals.

        Args:
            marginalise: "quadrature" as above, the default up to r = 2 while rows times nodes do not exceed 2e7;
                "response" for the means of a Gaussian over all coordinates and covariances of the globals by linear
                response, the default otherwise; "none" for that Gaussian as it is.
            nodes: quadrature nodes in each dimension; by default as many as make no difference.
            draws: the number of weighted draws of the globals, at least 100.
            seed: of all draws.
            progress: show a bar.

        Returns:
            The result, which prints as a table and says what was used.

        Raises:
            InputError: another word for marginalise, nodes without quadrature, too few draws.

        >>> import torch
        >>> groups = torch.arange(20) // 5
        >>> X = torch.ones(20, 1, dtype=torch.float64)
        >>> y = torch.tensor([1.0, 0, 2, 1, 0, 5, 7, 4, 6, 5, 2, 3, 1, 2, 2, 0, 0, 1, 0, 0])
        >>> result = MixedModel(X, y, (X, groups), "poisson_log").fit(progress=False)
        >>> result.converged, result.k_hat < 0.7
        (True, True)
        >>> low, high = result.summary().sd.low.item(), result.summary().sd.high.item()
        >>> 0.3 < low < 1.0 < high < 4.0
        True
        """
        if marginalise not in (None, "quadrature", "response", "none"):
            raise InputError(f"marginalise must be quadrature, response or none; got {marginalise!r}.")
        if nodes is not None and marginalise in ("response", "none"):
            raise InputError(f"nodes are those of marginalise='quadrature'; got marginalise={marginalise!r}.")
        if count("draws", draws, "counts draws") < _FEWEST:
            raise InputError(f"draws must be at least {_FEWEST}, which say something about a tail; got {draws}.")
        q = self.posterior()
        first = fit(q, self, progress=progress)
        near = Conditional(q)
        way = self._default() if marginalise is None and nodes is None else marginalise or "quadrature"
        if way == "quadrature":
            found = integrated(self, near, nodes=nodes, draws=draws, seed=seed, progress=progress)
            locals_: Locals = ByQuadrature(found.target)
            method = _integrated(found, draws)
            weighted, posterior, result = found.draws, found.posterior, found.fit
            elbo, evidence = found.elbo, found.log_evidence
        else:
            posterior, clause = near.marginal(), "covariances of q"
            if way == "response":
                posterior, clause = response.wider(self, near, progress)
            weighted = response.responded(self, near, posterior, draws, seed)
            method = _joint(weighted, clause, draws)
            locals_, result, elbo, evidence = near, first, -first.loss, None
        return MixedResult(
            self,
            method,
            result,
            elbo,
            evidence,
            posterior,
            q,
            weighted,
            locals_,
            _numbers(self.rows.p),
            _numbers(self.rows.r),
            _numbers(self.rows.n),
        )

    def _default(self) -> Marginalise:
        rows, fewest = self.rows, {1: 9, 2: 25}
        return "quadrature" if rows.r <= _MOST and len(rows.y) * fewest[rows.r] <= _DEAR else "response"


def _numbers(size: int) -> tuple[str, ...]:
    return tuple(str(k) for k in range(size))


def _integrated(found: Integrated, draws: int) -> str:
    nodes, r = found.target.nodes, found.target.rows.r
    power = f"{nodes}" if r == 1 else f"{nodes}^{r}"
    return (
        f"random effects integrated out by adaptive Gauss-Hermite quadrature with {power} nodes; a Gaussian on the "
        f"{found.target.dim}\nglobal parameters, its draws weighted to their posterior: {_weights(found.draws, draws)}"
    )


def _joint(weighted: Weighted, clause: str, draws: int) -> str:
    return (
        f"a Gaussian on all coordinates, random effects among them; {clause};\nits draws are not weighted: "
        f"{_weights(weighted, draws)}"
    )


def _weights(weighted: Weighted, draws: int) -> str:
    return f"k-hat {weighted.k_hat:.2f}, {weighted.effective:.0f} of {draws} draws"
