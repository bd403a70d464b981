"""What an average sees of a log joint: the whole at draws of q, or its factors at draws of each clique."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchngvi.derivatives import energy_and_gradient
from torchngvi.diagnostics.flatness import PAIRS, flatness
from torchngvi.diagnostics.linear_response import Residuals
from torchngvi.expectations import PerFactor
from torchngvi.expectations.draws import Fixed, Seen
from torchngvi.expectations.sample_average import SampleAverage
from torchngvi.interfaces import Estimator, Target
from torchngvi.models.guarded import Guarded, guarded_factors
from torchngvi.posteriors import clique_marginals
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.posteriors.precision import forest_of

_NUMBERS = 20_000_000  # of the draws of all cliques, at most
_FEWEST = 32  # draws, whatever the number of cliques


class Sight:
    """How a log joint is evaluated; one in factors, under a q over their forest, is seen factor by factor."""

    def __init__(self, q: Gaussian, target: Guarded) -> None:
        self.q, self.target, self.factors = q, target, guarded_factors(q, target.target)
        self.pattern = forest_of(q) if self.factors is None else None
        self.residuals: Residuals | None = None  # some of those that were seen last, of the whole

    def most(self, most: int) -> int:
        """Return the most draws of one average, that the memory for the cliques' draws allows."""
        if self.factors is None:
            return most
        numbers = sum(kind.nodes * (kind.size + kind.above) for kind in self.factors.structure.kinds)
        pairs = _NUMBERS // (2 * numbers)
        return max(min(most, 2 * pairs), 2 * self.q.structure.widest + 2, _FEWEST)

    @property
    def members(self) -> int:
        """Draws that belong together: a pair has a draw of each clique, and is left out where one of them fails."""
        return 1 if self.factors is None else max(kind.nodes for kind in self.factors.structure.kinds)

    def fixed(self, draws: int, seed: int, left_out: tuple[int, ...]) -> Fixed:
        """Return fixed draws; each clique has its own, or of those of the whole they are whitened in each clique."""
        return Fixed(draws, seed, left_out, apart=self.factors is not None, pattern=self.pattern)

    def estimator(self, fixed: Fixed) -> Estimator:
        """Return the average over draws."""

        def saw(seen: Seen) -> None:
            if self.factors is None and not self.q.batch_shape:
                self.keep(seen.z, seen.pulled)

        average = SampleAverage(fixed, saw)
        return average if self.factors is None else PerFactor(average)

    def keep(
        self,
        z: Tensor,  # (S, D)
        pulled: Tensor,  # (S, D)
    ) -> None:
        """Keep what was seen at some pairs of draws, for `growth`."""
        if self.target.temperature:
            z, pulled = (torch.cat([half[:PAIRS] for half in part.chunk(2)]) for part in (z, pulled))
            self.residuals = Residuals(z, pulled / self.target.temperature - z)

    @property
    def growth(self) -> float:
        """At most how many times half of norm² the distance from the best q is, as far as what was seen last tells."""
        flat = None if self.residuals is None else flatness(self.residuals, self.q.structure)
        return 1.0 if flat is None else flat.growth

    def evaluate(self, do: Callable[[Target], Any]) -> Any:
        """Do it on what is seen, and count it."""
        with self._counted():
            return do(self.target if self.factors is None else self.factors)

    def failing(self, fixed: Fixed) -> Tensor:
        """Find the pairs of mirrored draws at which the log joint, or a factor of it, is NaN or has such a gradient."""
        seen: list[tuple[Gaussian, Target]] = [(self.q, self.target)]
        if self.factors is not None:
            cliques = clique_marginals(self.q)
            seen = [(cliques[kind], term) for kind, term in self.factors.drawn.items()]
        fails = torch.zeros(fixed.num_samples // 2, dtype=torch.bool, device=self.q.device)
        with self._counted():
            for q, target in seen:
                theta = q.push_noise(fixed(q.mean_probe.detach())).detach()
                energy, gradient = energy_and_gradient(target, theta)
                bad = energy.isnan() | (gradient.isnan().any(-1) & energy.isfinite())
                fails |= bad.reshape(2, len(fails), -1).any(-1).any(0)
        return fails

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Calls of the factors, within the budget of the whole, count for it."""
        if self.factors is not None:
            self.factors.allow(self.target)
        try:
            yield
        finally:
            if self.factors is not None:
                self.factors.count_for(self.target)
