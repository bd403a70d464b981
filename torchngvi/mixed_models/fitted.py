"""What the results of all mixed models have in common: how the fit went, and what may be said of it."""

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchngvi.diagnostics import separation
from torchngvi.fitting.records import FitResult
from torchngvi.mixed_models import priors, remarks
from torchngvi.mixed_models.asked import TELLING
from torchngvi.mixed_models.integrated import Weighted
from torchngvi.mixed_models.table import Marginals
from torchngvi.models.mixed import MixedLogJoint
from torchngvi.models.mixed_prior import scales_of
from torchngvi.models.multilevel import MultilevelLogJoint
from torchngvi.posteriors import PrecisionCholeskyGaussian
from torchngvi.posteriors.shapes import number_of_draws

_WIDTH = 100  # of a line of a table
TRUSTED = 0.7  # k-hat up to which importance weights are believed


class Joint:
    """The best Gaussian over all coordinates, fitted when it is first asked for where it is not there yet."""

    def __init__(
        self, q: PrecisionCholeskyGaussian | None, make: Callable[[], PrecisionCholeskyGaussian] | None = None
    ) -> None:
        self.q, self.make = q, make

    def __call__(self) -> PrecisionCholeskyGaussian:
        if self.q is None:
            assert self.make is not None
            self.q = self.make()
        return self.q


class Fitted(ABC):
    """The abstract base of results of mixed models.

    Attributes:
        model: what was fitted.
        fit: the `FitResult` of the Gaussian over the global parameters.
        method: what was computed, in one sentence.
        log_evidence: log p(y) by importance sampling; None where the random effects were not integrated out.
        weighted: draws of the global parameters.
        random_names: what the random effects are called, of several factors by the name of each.
        joint_of: what makes the Gaussian over all coordinates.
    """

    model: MixedLogJoint | MultilevelLogJoint
    fit: FitResult
    method: str
    log_evidence: float | None
    weighted: Weighted
    random_names: Any
    joint_of: Callable[[], PrecisionCholeskyGaussian]

    @abstractmethod
    def summary(self, interval: float = 0.95) -> Any:
        """Posterior means, sds and equal-tailed intervals of the parameters, a table; ``str`` prints it."""

    @property
    def converged(self) -> bool:
        """Whether the fit of the global parameters has converged."""
        return self.fit.converged

    @property
    def reason(self) -> str:
        """Why the fit ended, one sentence."""
        return self.fit.reason

    @property
    def joint(self) -> PrecisionCholeskyGaussian:
        """The best Gaussian over all coordinates, the random effects among them.

        A learned parameter of the likelihood is held near its posterior mean. With Gaussian noise it takes a fit of its
        own, at the first call.
        """
        return self.joint_of()

    @property
    def priors(self) -> str:
        """The priors of the fit in one line: of fixed effects, of each grouping factor, of a learned parameter."""
        return priors.described(self.model, getattr(self, "factor", "group"))

    @property
    def k_hat(self) -> float:
        """The Pareto k̂ of the importance weights.

        Where random effects were not integrated out, weights are over all coordinates: with more than 200 of these it
        is large however good the globals are, tells nothing of them, and is left out of the table.
        """
        return self.weighted.k_hat

    @property
    def effective(self) -> float:
        """The effective number of weighted draws."""
        return self.weighted.effective

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw n times from the posterior of the global parameters, θ = (β, ω, log of a learned parameter).

        They are the draws behind `summary`, resampled by their weights, so that some may be equal; ω is that of each
        grouping factor in turn. ``draws`` has them in the units of the data, by name, with the random effects.

        Args:
            n: the number of draws.
            generator: the source of the noise, on the CPU; torch's default generator if None.

        Returns:
            Equally likely draws, (n, P).

        Raises:
            InputError: a number of draws that is none.
        """
        theta = self.weighted.resampled(number_of_draws(n), generator)
        beta, omega, parameter = self._parts(theta)
        omegas = omega.values() if isinstance(omega, dict) else [omega]
        return torch.cat([beta, *omegas, *([] if parameter is None else [parameter.log()[:, None]])], -1)

    @abstractmethod
    def _parts(
        self,
        theta: Tensor,  # (S, P)
    ) -> tuple[Tensor, Any, Tensor | None]:
        """β and ω in the units of the user, and the learned parameter of the likelihood."""

    def __str__(self) -> str:
        return str(self.summary())

    def _foot(self, names: tuple[str, ...], parameter: Marginals | None) -> str:
        lines = [
            textwrap.fill(f"priors: {self.priors}", _WIDTH),
            self.method,
            *self._separated(names),
            *self._unbounded(names),
        ]
        lines += remarks.of_parameter(parameter)
        for effects, sd in self._spreads():
            lines += remarks.of_spreads(effects, sd, self.weighted.weights)
        if not self.converged:
            lines.append(f"NOT CONVERGED: {self.reason}")
        telling = self.log_evidence is not None or self.model.all_dim <= TELLING
        if telling and not self.k_hat < TRUSTED:
            lines.append(f"k-hat {self.k_hat:.2f} is above {TRUSTED}: take means and intervals for rough.")
        return "\n".join(lines)

    def _spreads(self) -> list[tuple[Sequence[str], Tensor]]:
        """Of each grouping factor what its effects are called, and draws of their standard deviations at the means."""
        model, theta = self.model, self.weighted.theta
        if isinstance(model, MultilevelLogJoint):
            rows, first, named = model.rows, model.rows.beta.start, self.random_names
            known = zip(model.names, rows.omegas, rows.factors, strict=True)
            return [
                (
                    [f"{effect} over {name}" for effect in named[name]],
                    scales_of(theta[:, at.start - first : at.stop - first], of.r)[0],
                )
                for name, at, of in known
            ]
        p, r = model.rows.p, model.rows.r
        return [(self.random_names, scales_of(theta[:, p : p + r * (r + 1) // 2], r)[0])]

    def _unbounded(self, names: tuple[str, ...]) -> list[str]:
        """Sentences about fixed effects that hardly anything but the prior bounds."""
        theta, weights, prior = self.weighted.theta, self.weighted.weights, self.model.fixed.prior
        beta = theta[:, : len(names)]
        sd = (weights @ (beta - weights @ beta).square()).sqrt()
        columns = self.model.rows.columns
        unit = torch.ones_like(sd) if columns is None else columns.scales.abs().to(sd)
        return remarks.of_bounds(names, sd / unit, prior.precision.rsqrt() / unit)

    def _separated(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Sentences about columns of the fixed effects that separate two classes."""
        rows = self.model.rows
        part = len(rows.y) < getattr(rows, "all_rows", 0)  # of several processes each has a part
        if part or not rows.likelihood.discrete:
            return ()
        there = rows.weights > 0
        return separation.told(names, separation.separating(rows.X[there], rows.y[there] > 0))
