"""Simulation-based calibration: is a way of fitting right on data from the model's own prior?

Draw θ* from the prior and data from the model at θ*, fit, and count the draws of the fitted posterior that are below
θ*.  Where the fit is the posterior this rank is uniform on 0..L, for every coordinate and every function of θ and the
data (Cook, Gelman and Rubin 2006; Talts, Betancourt, Simpson, Vehtari and Gelman 2018, arXiv:1804.06788; Modrák et al.
2023).  Ranks that pile up at both ends belong to a posterior that is too narrow, at one end to one that is shifted.
"""

import bisect
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchngvi.arguments import (
    read_callable,
    read_count,
    read_instance,
    read_names,
    read_seed,
    read_size,
    read_tensor,
    shown,
)
from torchngvi.diagnostics.verdict import BLUE, FAINT, RED, new_figure
from torchngvi.errors import InputError, PairError
from torchngvi.numerics.arrays import writable

ALPHA = 0.05  # chance that anything at all is flagged where everything is calibrated
Quantity = Callable[[Tensor, Any], Tensor]  # theta (*, D) and the data -> (*)

# An exact test that ranks are uniform, by the simultaneous bands of their empirical distribution function
#
# With N ranks on 0..L, the count X_k of those below t_k is binomial with the probability z_k = t_k/(L + 1) at each
# level alone, and along the levels a Markov chain: X_{k+1} - X_k ~ Bin(N - X_k, (z_{k+1} - z_k)/(1 - z_k)).  The chance
# that a path stays within given bounds is therefore a product of N + 1 by N + 1 matrices (Säilynoja, Bürkner and
# Vehtari 2022, Statistics and Computing 32, section 2.2), and nothing has to be simulated.


@dataclass(frozen=True)
class Uniformity:
    """The test for N ranks on 0..L.

    The statistic is the smallest two-sided binomial p-value over the levels, min_k 2 min(P(X_k ≤ x_k), P(X_k ≥ x_k)).

    Attributes:
        count: N.
        draws: L.

    >>> import torch
    >>> even = torch.arange(100)[:, None]
    >>> Uniformity(100, 99).p_values(even).item()  # nothing could be nearer
    1.0
    """

    count: int
    draws: int

    @property
    def thresholds(self) -> Tensor:
        """The t_k, integers from 1 to L, (K,), 19 where there are as many."""
        size = self.draws + 1
        return torch.tensor(sorted({round(k * size / 20) for k in range(1, 20)} & set(range(1, size))), device="cpu")

    @property
    def levels(self) -> Tensor:
        """The z_k = t_k/(L + 1), (K,)."""
        return self.thresholds.double() / (self.draws + 1)

    def counts(self, ranks: Tensor) -> Tensor:
        """The ranks (N, Q) below each threshold, (K, Q)."""
        return (ranks < self.thresholds[:, None, None]).sum(1)

    def differences(self, ranks: Tensor) -> Tensor:
        """The empirical distribution function less the uniform one, (K, Q)."""
        return self.counts(ranks) / self.count - self.levels[:, None]

    def histogram(self, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Counts of ranks (N,) between neighbouring levels (K + 1,), and the edges in [0, 1], (K + 2,)."""
        pad = torch.nn.functional.pad
        below = pad(pad(self.counts(ranks[:, None])[:, 0], (1, 0)), (0, 1), value=self.count)
        return below.diff(), pad(pad(self.levels, (1, 0)), (0, 1), value=1.0)

    def p_values(self, ranks: Tensor) -> Tensor:
        """The chance of a statistic as small or smaller where ranks are uniform, (Q,); 1 without ranks."""
        tails, counts = self._tails(), self.counts(ranks)
        smallest, member = tails.gather(1, counts).amin(0).unique(return_inverse=True)  # there are few different ones
        return (1 - self._inside(tails, smallest)).clamp(0.0, 1.0)[member]

    def band(self, alpha: float) -> tuple[Tensor, Tensor]:
        """The lowest and highest difference at each level, (K,) each, that no path leaves with more than a chance α.

        A path leaves it exactly where its p-value is at most α.
        """
        tails = self._tails()
        grid = torch.linspace(math.log(1e-300), 0.0, 64, dtype=torch.float64, device="cpu")
        for _ in range(4):
            outside = 1 - self._inside(tails, grid.exp())
            last = int((outside <= alpha).sum()) - 1
            low, high = float(grid[max(last, 0)]), float(grid[min(last + 1, len(grid) - 1)])
            grid = torch.linspace(low, high, len(grid), dtype=torch.float64, device="cpu")
        kept = self._above(tails, grid[0].exp())
        every = torch.arange(self.count + 1, device="cpu").expand_as(kept)
        lowest = torch.where(kept, every, self.count).amin(1)
        highest = torch.where(kept, every, 0).amax(1)
        return lowest / self.count - self.levels, highest / self.count - self.levels

    def _log_binomial(self, trials: Tensor, probability: Tensor) -> Tensor:
        """log P(X = x), x = 0..N, for trials (...) and a probability that broadcasts with it, (..., N + 1)."""
        x = torch.arange(self.count + 1, dtype=torch.float64, device="cpu")
        n, p = trials[..., None].double(), probability[..., None]
        rest = n - x
        choose = torch.lgamma(n + 1) - torch.lgamma(x + 1) - torch.lgamma(rest.clamp_min(0) + 1)
        return torch.where(rest >= 0, choose + torch.xlogy(x, p) + torch.xlogy(rest.clamp_min(0), 1 - p), -torch.inf)

    def _tails(self) -> Tensor:
        """Two-sided p-values of each count at each level, (K, N + 1)."""
        mass = self._log_binomial(torch.full_like(self.levels, self.count), self.levels).exp()
        below, above = mass.cumsum(1), mass.flip(1).cumsum(1).flip(1)
        return (2 * torch.minimum(below, above)).clamp_max(1.0)

    def _inside(self, tails: Tensor, limit: Tensor) -> Tensor:
        """The chance that the p-values of a path stay above each limit (Q,) at all levels, (Q,)."""
        state = torch.zeros(len(limit), self.count + 1, dtype=torch.float64, device="cpu")
        state[:, 0] = 1
        before, start = torch.zeros((), dtype=torch.float64, device="cpu"), torch.arange(self.count + 1, device="cpu")
        for level, tail in zip(self.levels, tails, strict=True):
            step = self._log_binomial(self.count - start, (level - before) / (1 - before)).exp()  # of increments
            moved = torch.zeros_like(step)
            to = start[:, None] + start
            ok = to <= self.count
            moved[start[:, None].expand_as(to)[ok], to[ok]] = step[ok]
            state = torch.where(self._above(tail, limit[:, None]), state @ moved, 0.0)
            before = level
        return state.sum(1)

    @staticmethod
    def _above(tails: Tensor, limit: Tensor) -> Tensor:
        """Where p-values are above a limit, by more than rounding."""
        return tails > limit * (1 + 1e-9)


def holm(p_values: Tensor) -> Tensor:
    """Holm's adjusted p-values, (Q,): below α with a chance of at most α for any of those that are true.

    >>> holm(torch.tensor([0.01, 0.04, 0.03])).tolist()
    [0.029999999329447746, 0.05999999865889549, 0.05999999865889549]
    """
    p_values = read_tensor("p_values", p_values, shape=(None,))
    ordered, order = p_values.sort()
    raised = ordered * torch.arange(len(ordered), 0, -1, dtype=ordered.dtype, device=ordered.device)
    return torch.empty_like(p_values).scatter(0, order, raised.cummax(0).values.clamp_max(1.0))


# What a calibration by so many simulations could find: the smallest errors that it flags four times in five
#
# A posterior that is normal with a mean δ and a standard deviation 1, where the right ones are 0 and f, has ranks that
# are binomial with the probability Φ(f ε - δ) given ε ~ N(0, 1).  How often they leave the band of the exact test is
# counted on ranks that are drawn so.


class Power(NamedTuple):
    """The smallest errors of one quantity that would be flagged four times in five.

    Attributes:
        sd: a factor by which its standard deviations are too small; infinite where 16 is not found.
        mean: of its means in posterior standard deviations; infinite where 4 are not found.
    """

    sd: float
    mean: float

    def __str__(self) -> str:
        """A clause."""
        found = []
        if self.sd < math.inf:
            found.append(f"an sd {self.sd:.2g} times too small")
        if self.mean < math.inf:
            found.append(f"a mean {self.mean:.2g} sd off")
        if not found:
            return "so few can hardly speak against anything: raise runs"
        return f"so many would find {' or '.join(found)} four times in five, smaller errors less often"


@functools.cache
def power(test: Uniformity, alpha: float, repeats: int = 500, share: float = 0.8) -> Power:
    """Find the smallest errors that a test of ranks flags in that share of calibrations, of as many that are drawn."""
    low, high = (edge[:, None] for edge in test.band(alpha))
    generator = torch.Generator().manual_seed(0)
    size = (test.count, repeats)
    noise = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    draws = torch.full(size, float(test.draws), dtype=torch.float64, device="cpu")

    def found(below: Tensor) -> bool:
        """Whether ranks are flagged often enough, given the probability of each draw to be below the truth."""
        ranks = torch.binomial(draws, below, generator=torch.Generator().manual_seed(1))
        differences = test.differences(ranks)
        outside = (differences < low - 1e-12) | (differences > high + 1e-12)
        return float(outside.any(0).double().mean()) >= share

    def smallest(sizes: Tensor, below: Callable[[Tensor], Tensor]) -> float:
        """The smallest size that is found, infinite where the largest is not."""
        place = bisect.bisect_left(sizes.tolist(), True, key=lambda size: found(below(size)))
        return float(sizes[place]) if place < len(sizes) else math.inf

    factors = 1.05 ** torch.arange(1, 58, dtype=torch.float64, device="cpu")  # up to 16
    shifts = 0.05 * torch.arange(1, 81, dtype=torch.float64, device="cpu")  # up to 4 posterior standard deviations
    return Power(
        smallest(factors, lambda factor: torch.special.ndtr(factor * noise)),
        smallest(shifts, lambda shift: torch.special.ndtr(noise - shift)),
    )


# The ranks of simulations, and what they say


@dataclass(frozen=True, eq=False)
class Calibration:
    """The ranks of a simulation-based calibration, and what they say.

    Attributes:
        names: of the coordinates and test quantities, Q of them.
        ranks: draws of the posterior below the truth, 0 to L, (N, Q); a row for each fit that did not fail.
        draws: L, of each posterior.
        runs: simulations that were tried, N and those that failed.
        seed: of all of them.
        failed: why a fit failed, by the number of its simulation.
        unconverged: fits that say themselves that they have not converged; their ranks count.
        interrupted: whether an interrupt from the keyboard ended it before the last simulation.
    """

    names: tuple[str, ...]
    ranks: Tensor
    draws: int
    runs: int
    seed: int
    failed: dict[int, str] = field(default_factory=dict)
    unconverged: int = 0
    interrupted: bool = False
    _rows = 12  # of the table, and names in the sentence

    @property
    def uniformity(self) -> Uniformity:
        """The exact test of uniformity for so many ranks."""
        return Uniformity(len(self.ranks), self.draws)

    @property
    def p_values(self) -> Tensor:
        """Of uniform ranks, each quantity alone, (Q,): the chance that any point of the ECDF is as far out or more."""
        return self.uniformity.p_values(self.ranks)

    @property
    def adjusted(self) -> Tensor:
        """The p-values after Holm's correction for Q quantities, (Q,)."""
        return holm(self.p_values)

    @property
    def flagged(self) -> tuple[str, ...]:
        """The quantities whose adjusted p-value is below 0.05, worst first.

        Where all Q are calibrated the chance that this is not empty is at most 5 %, however they depend on one another.
        """
        order = self.p_values.argsort().tolist()
        adjusted = self.adjusted
        return tuple(self.names[i] for i in order if float(adjusted[i]) < ALPHA)

    @property
    def calibrated(self) -> bool:
        """Whether nothing is flagged, which says no more than that so many simulations do not speak against it."""
        return len(self.ranks) > 0 and not self.flagged

    @property
    def power(self) -> Power:
        """The smallest errors of one quantity among these that so many simulations flag four times in five."""
        return power(self.uniformity, ALPHA / len(self.names))

    @property
    def shift(self) -> Tensor:
        """How far the mean of the posterior is above the truth, in posterior standard deviations, (Q,).

        It is minus the median of the normal scores Φ⁻¹((rank + ½)/(L + 1)), so that what is beyond the last draw, of
        which ranks know nothing, does not matter; its standard error is about 1.25 spread/√N.
        """
        scores = torch.special.ndtri((self.ranks.double() + 0.5) / (self.draws + 1))
        return -scores.quantile(0.5, 0)

    @property
    def spread(self) -> Tensor:
        """How often the standard deviation of the posterior goes into the right one, (Q,): 2 where it is half of it.

        By the share of ranks in the middle half of 0..L, which is Φ(0.67/spread) - Φ(-0.67/spread) for normal
        posteriors whose means are right; its standard error is about 1.2 spread/√N near 1, more above.
        """
        middle = ((self.ranks.double() - self.draws / 2).abs() < (self.draws + 1) / 4).double().mean(0)
        half = 0.5 / max(len(self.ranks), 1)
        normal = torch.special.ndtri(torch.tensor(0.75, dtype=torch.float64, device="cpu"))
        return normal / torch.special.ndtri(0.5 + 0.5 * middle.clamp(half, 1 - half))

    @property
    def symmetry(self) -> Tensor:
        """P-values of ranks that are symmetric about L/2, (Q,), by Wilcoxon's signed-rank test.

        A family that is too narrow by its nature, such as a mean field, cannot have uniform ranks; but with means that
        are right they are symmetric (Yao, Vehtari, Simpson and Gelman 2018, arXiv:1802.02538, section 3.2).
        """
        away = self.ranks.double() - self.draws / 2
        size = away.abs()
        below = (size[:, None] > size).sum(1) + 0.5 * ((size[:, None] == size).sum(1) + 1)
        place = torch.where(away == 0, 0.0, below.double())
        z = (place * away.sign()).sum(0) / place.square().sum(0).sqrt().clamp_min(1e-300)
        return torch.special.erfc(z.abs() / math.sqrt(2))

    def __str__(self) -> str:
        count = f"{len(self.ranks)} of {self.runs} simulations"
        if not len(self.ranks):
            word = "not known"
        elif self.calibrated:
            few = f", and {self.power}" if len(self.ranks) <= 200 else ""
            word = f"nothing speaks against it in {_quantities(len(self.names))}{few}"
        else:
            shown = ", ".join(self.flagged[: self._rows]) + (", ..." if len(self.flagged) > self._rows else "")
            word = f"NOT CALIBRATED in {len(self.flagged)} of {_quantities(len(self.names))}: {shown}"
        return f"calibration over {count}: {word}{self._reservations()}"

    def _reservations(self) -> str:
        """What keeps the sentence from being the whole truth."""
        said = []
        if self.failed:
            said.append(f"{len(self.failed)} fits failed and are left out, first: {next(iter(self.failed.values()))}")
        if self.unconverged:
            said.append(f"{self.unconverged} fits did not converge, and count")
        if self.interrupted:
            said.append("interrupted; give it as resume= to go on")
        return "".join(f"; {one}" for one in said) + "."

    def summary(self) -> str:
        """The sentence, and a table of the quantities with the smallest p-values.

        Columns: the p-value of uniform ranks, the same after Holm's correction, the shift of the mean in posterior
        standard deviations, how often too small the standard deviation is, and the p-value of symmetric ranks.
        """
        if len(self.ranks) < 2:
            return str(self)
        columns = (self.p_values, self.adjusted, self.shift, self.spread, self.symmetry)
        width = max(8, *(len(name) for name in self.names))
        head = f"  {'quantity':{width}}  p uniform  adjusted    shift  sd too small by  p symmetric"
        lines = [str(self), head]
        for i in columns[0].argsort()[: self._rows].tolist():
            p, adjusted, shift, spread, symmetric = (float(column[i]) for column in columns)
            lines.append(
                f"  {self.names[i]:{width}}  {p:9.2g}{adjusted:10.2g}{shift:9.2f}{spread:17.2f}{symmetric:13.2g}"
            )
        left = len(self.names) - self._rows
        return "\n".join([*lines, *([f"  and {left} others with larger p-values"] if left > 0 else [])])

    def plot(self, figure: Any = None) -> Any:
        """Draw the ECDF differences of all quantities, and the rank histogram of the worst.

        The band holds all lines at once with a probability of at least 95 % where everything is calibrated
        (Säilynoja, Bürkner and Vehtari 2022, Statistics and Computing 32); a line that leaves it is flagged.

        Args:
            figure: a matplotlib figure without axes; a new one by default.

        Returns:
            The figure.

        Raises:
            InputError: fewer than two fits that did not fail; matplotlib is not installed.
        """
        if len(self.ranks) < 2:
            raise InputError(f"a picture needs the ranks of two fits or more; got {len(self.ranks)}. Raise runs.")
        figure = new_figure("a calibration", 9.0, 3.6) if figure is None else figure
        order = self.p_values.argsort().tolist()
        _draw(figure, self.uniformity, self.ranks[:, order], [self.names[i] for i in order], self.flagged)
        return figure


def simulation_based_calibration(
    prior: Callable[[torch.Generator], Tensor],
    simulate: Callable[[Tensor, torch.Generator], Any],
    fit: Callable[[Any], Any],
    *,
    quantities: Mapping[str, Quantity] | None = None,
    names: Sequence[str] | None = None,
    runs: int = 100,
    draws: int = 99,
    seed: int = 0,
    resume: Calibration | None = None,
) -> Calibration:
    """Check a way of fitting on simulated data: the ranks of the truths among draws of the fitted posteriors.

    It answers what no check of a single fit can: whether intervals hold what they promise, over the prior.  Among ten
    quantities 100 simulations find one whose standard deviations are halved always, and divided by 1.5 in three of
    four cases; 200 find it in 99 of 100, and those divided by 1.3 in six of ten.

    Args:
        prior: draws θ, (D,), with a generator.
        simulate: draws data given θ, with a generator.
        fit: data to a posterior: one of this library or of torch.distributions, the result of `fit`, of `laplace`, of
            `refine` or of a mixed model, or draws (n, D) with n >= ``draws``, of which the first count; they must be
            independent, so thin a chain.
        quantities: functions of (θ, data) beside the coordinates, by name; they get θ as (D,) and as (L, D). The log
            likelihood is a sharp one.
        names: of the coordinates, D of them.
        runs: simulations in all.
        draws: L, of each posterior; L + 1 with many divisors makes even bins.
        seed: simulation i depends on the seed and i alone, torch's default generator, which `fit` may use, included;
            that generator is as before in the end.
        resume: what was found before with the same arguments; the simulations that it has are not done again.

    Returns:
        The ranks, with ``summary()`` and ``plot(figure)``.  An interrupt from the keyboard ends it with what is done.

    Raises:
        InputError: counts that are too small, a prior or a simulator that takes no generator, no fit at all that gave
            draws to be ranked, with the reason of the first; names of another number than coordinates, θ that is no
            vector, a quantity of another shape, draws of another width, or something to resume from other settings.
        PairError: ``fit`` returned something that cannot be sampled.

    >>> def prior(generator):
    ...     return torch.randn(1, generator=generator)
    >>> def simulate(theta, generator):
    ...     return theta + torch.randn(1, generator=generator)
    >>> def fit(y):  # the posterior is N(y/2, 1/2)
    ...     return 0.5 * y + 0.5**0.5 * torch.randn(99, 1)
    >>> print(simulation_based_calibration(prior, simulate, fit, runs=50))  # doctest: +ELLIPSIS
    calibration over 50 of 50 simulations: nothing speaks against it in 1 quantity, and so many would find an sd 1.6 ...
    """
    runs = read_count("runs", runs, "counts simulations")
    draws = read_size("draws", draws, "counts draws of each posterior")
    seed = read_seed("seed", seed)
    _check(draws, seed, resume)
    _check_drawing("prior", prior, "is a function of a generator that draws θ", "generator")
    _check_drawing("simulate", simulate, "is a function of θ and a generator", "theta, generator")
    read_callable("fit", fit, "is a function of the data that returns a posterior")
    quantities = _checked_quantities(quantities)
    if names is not None:
        names = read_names("names", names, "are those of the coordinates, a list of texts")
    done = resume or Calibration((), torch.zeros(0, 0, dtype=torch.long, device="cpu"), draws, 0, seed)
    labels, ranks, failed, unconverged = done.names, list(done.ranks), dict(done.failed), done.unconverged
    interrupted, i, cause = False, done.runs, None
    try:
        for i in range(done.runs, runs):  # noqa: B007
            with torch.random.fork_rng():
                torch.manual_seed(_seed_of(seed, i, 1))  # what fit draws is independent of the truth
                generator = torch.Generator().manual_seed(_seed_of(seed, i))
                theta = prior(generator)
                labels = _labels(theta, names, quantities, labels)
                data = simulate(theta, generator)
                try:
                    fitted = fit(data)
                except Exception as error:  # a failing fit is a result
                    failed[i], cause = f"{type(error).__name__}: {error}", cause or error
                    continue
                sample = _sample(fitted, draws, theta)
                if not bool(sample.isfinite().all()):
                    failed[i] = "draws of the posterior are not finite"
                    continue
                ranks.append(_ranks(theta, sample, quantities, data, generator))
                unconverged += getattr(fitted, "converged", True) is False
    except KeyboardInterrupt:
        interrupted = True
    else:
        i = max(runs, done.runs)
    if not ranks and not interrupted:
        raise InputError(
            f"none of the {i} fits gave draws to be ranked. Call fit(simulate(theta, generator)) by itself; the first "
            f"reason was {next(iter(failed.values()))}"
        ) from cause
    stacked = torch.stack(ranks) if ranks else torch.zeros(0, len(labels), dtype=torch.long, device="cpu")
    return Calibration(labels, stacked, draws, i, seed, failed, unconverged, interrupted)


def _draw(figure: Any, test: Uniformity, ranks: Tensor, names: Sequence[str], flagged: Sequence[str]) -> None:
    """Draw the ECDF differences, the worst first, of ranks (N, Q) with their band, and a histogram of the worst."""
    left, right = figure.subplots(1, 2)
    at, differences = test.levels, test.differences(ranks)
    low, high = test.band(ALPHA / len(names))
    ends = [0.0, *at.tolist(), 1.0]
    left.fill_between(ends, [0, *low.tolist(), 0], [0, *high.tolist(), 0], color=FAINT, alpha=0.3, linewidth=0)
    for i in reversed(range(len(names))):
        red = names[i] in flagged
        line = [0, *differences[:, i].tolist(), 0]
        left.plot(ends, line, color=RED if red else BLUE, alpha=1.0 if red else 0.5, linewidth=1.2)
        if red and i < 5:
            peak = int(differences[:, i].abs().argmax())
            left.annotate(names[i], (float(at[peak]), float(differences[peak, i])), fontsize=8, color=RED)
    left.set(xlabel="rank / (L + 1)", ylabel="ECDF - uniform", title=f"{_quantities(len(names))}, band of 95 %")
    counts, edges = test.histogram(ranks[:, 0])
    right.bar(edges[:-1].tolist(), counts.tolist(), edges.diff().tolist(), align="edge", color=BLUE, edgecolor="white")
    right.axhline(len(ranks) / len(counts), color=FAINT)
    worst = ", the worst" if len(names) > 1 else ""
    right.set(xlabel="rank / (L + 1)", ylabel="simulations", title=f"ranks of {names[0]}{worst}")


def _check_drawing(name: str, function: Any, what: str, arguments: str) -> None:
    """Refuse what is no function, or takes no generator."""
    try:
        read_callable(name, function, what, arguments=arguments)
    except InputError as error:
        raise InputError(
            f"{error} It draws as {name}({arguments}), from a torch.Generator: take it, even if you draw from that of "
            "torch, which is seeded too."
        ) from error


def _labels(
    theta: Tensor, names: Sequence[str] | None, quantities: Mapping[str, Any], known: tuple[str, ...]
) -> tuple[str, ...]:
    """Name all quantities, after a check of θ."""
    if not isinstance(theta, Tensor) or theta.ndim != 1 or not theta.is_floating_point():
        raise InputError(f"prior must return one theta, a tensor of numbers (D,); got {shown(theta)}.")
    if names is not None and len(names) != len(theta):
        raise InputError(f"names must have one for each of the {len(theta)} coordinates; got {len(names)}.")
    coordinates = tuple(names) if names is not None else tuple(f"theta[{i}]" for i in range(len(theta)))
    labels = (*coordinates, *quantities)
    if known and labels != known:
        raise InputError(f"what is resumed had the quantities {', '.join(known)}; got {', '.join(labels)}.")
    return labels


def _quantities(count: int) -> str:
    return "1 quantity" if count == 1 else f"{count} quantities"


def _checked_quantities(quantities: Mapping[str, Quantity] | None) -> dict[str, Quantity]:
    """The quantities by name, after a check."""
    what = "are functions of θ and the data by name, such as {'mean': lambda theta, data: theta.mean(-1)}"
    given = {} if quantities is None else dict(read_instance("quantities", quantities, Mapping, what))
    if not all(isinstance(name, str) and callable(function) for name, function in given.items()):
        raise InputError(f"quantities {what}; got {shown(quantities)}.")
    return given


def _check(draws: int, seed: int, resume: Calibration | None) -> None:
    if resume is not None:
        read_instance("resume", resume, Calibration, "is what was found before, a Calibration, or None")
    if resume is not None and (resume.draws, resume.seed) != (draws, seed):
        raise InputError(
            f"what is resumed had draws={resume.draws} and seed={resume.seed}; got draws={draws} and seed={seed}. "
            "Give the same, or begin again without resume."
        )


def _seed_of(seed: int, i: int, stream: int = 0) -> int:
    """A seed of simulation i, another for each, and for each stream of numbers that it draws."""
    return (seed * 1_000_003 + i + stream * 500_000) % 2**63  # torch reads 32 bits of it


def _sample(fitted: Any, draws: int, theta: Tensor) -> Tensor:
    """Draws of whatever was fitted, (L, D): its own, or those of its posterior."""
    source = fitted if hasattr(fitted, "sample") else getattr(fitted, "posterior", fitted)
    if isinstance(source, Tensor):
        sample = source[:draws]
    elif hasattr(source, "sample"):
        sample = source.sample((draws,) if isinstance(source, torch.distributions.Distribution) else draws)
    else:
        raise PairError(
            f"fit must return something that can be sampled: a posterior, a result of fit or refine, or draws (n, D); "
            f"got {type(fitted).__name__}."
        )
    if sample.shape != (draws, len(theta)):
        raise InputError(f"a posterior must give {draws} draws of {len(theta)} coordinates; got {tuple(sample.shape)}.")
    return sample.to(theta.device)


def _ranks(
    theta: Tensor, sample: Tensor, quantities: Mapping[str, Quantity], data: Any, generator: torch.Generator
) -> Tensor:
    """The ranks of a simulation, (Q,); ties are broken at random."""
    truths, values = [*theta], [*sample.mT]
    for name, quantity in quantities.items():
        truth, value = (torch.as_tensor(writable(quantity(at, data))) for at in (theta, sample))
        if truth.shape != () or value.shape != sample.shape[:1]:
            raise InputError(
                f"the quantity {name!r} must map theta (D,) to () and (L, D) to (L,); got {tuple(truth.shape)} and "
                f"{tuple(value.shape)}."
            )
        truths.append(truth)
        values.append(value)
    truth, value = torch.stack([one.double() for one in truths]), torch.stack([one.double() for one in values], -1)
    below, equal = (value < truth).sum(0).cpu(), (value == truth).sum(0).cpu()
    return below + (torch.rand(len(equal), generator=generator, device="cpu") * (equal + 1)).floor().long()
