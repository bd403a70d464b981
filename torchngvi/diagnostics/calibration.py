"""Simulation-based calibration: is a way of fitting right on data from the model's own prior?

Draw θ* from the prior and data from the model at θ*, fit, and count the draws of the fitted posterior that are below
θ*.  Where the fit is the posterior this rank is uniform on 0..L, for every coordinate and every function of θ and the
data (Cook, Gelman and Rubin 2006; Talts, Betancourt, Simpson, Vehtari and Gelman 2018, arXiv:1804.06788; Modrák et al.
2023).  Ranks that pile up at both ends belong to a posterior that is too narrow, at one end to one that is shifted.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_callable, read_count, read_instance, read_names, read_seed, read_size, shown
from torchngvi.diagnostics.figures import calibration_figure, new_figure
from torchngvi.diagnostics.uniformity import ALPHA, Power, Uniformity, holm, power
from torchngvi.errors import InputError, PairError
from torchngvi.numerics.arrays import writable

# What a calibration is given: functions that take what they are called with, and names of all quantities


def takes(name: str, function: Callable[..., Any], arguments: str) -> None:
    """Refuse a function that cannot be called as a calibration calls it.

    >>> takes("prior", lambda generator: None, "generator")
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of some built-in functions it is not known
        return
    try:
        signature.bind(*arguments.split(", "))
    except TypeError as error:
        raise InputError(
            f"{name} is called as {name}({arguments}), with a torch.Generator to draw from; got a function of "
            f"{signature}. Add the generator, even if it draws from that of torch, which is seeded too."
        ) from error


def labels_of(
    theta: Tensor, names: Sequence[str] | None, quantities: Mapping[str, Any], known: tuple[str, ...]
) -> tuple[str, ...]:
    """Name all quantities, after a check of θ.

    >>> import torch
    >>> labels_of(torch.zeros(2), None, {"log likelihood": None}, ())
    ('theta[0]', 'theta[1]', 'log likelihood')
    """
    if not isinstance(theta, Tensor) or theta.ndim != 1 or not theta.is_floating_point():
        raise InputError(f"prior must return one theta, a tensor of numbers (D,); got {shown(theta)}.")
    if names is not None and len(names) != len(theta):
        raise InputError(f"names must have one for each of the {len(theta)} coordinates; got {len(names)}.")
    coordinates = tuple(names) if names is not None else tuple(f"theta[{i}]" for i in range(len(theta)))
    labels = (*coordinates, *quantities)
    if known and labels != known:
        raise InputError(f"what is resumed had the quantities {', '.join(known)}; got {', '.join(labels)}.")
    return labels


_ROWS = 12  # of the table, and lines of the picture that have a name
_POWERFUL = 200  # simulations up to which it is said what they could find

Quantity = Callable[[Tensor, Any], Tensor]  # theta (*, D) and the data -> (*)


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
            few = f", and {self.power}" if len(self.ranks) <= _POWERFUL else ""
            word = f"nothing speaks against it in {_quantities(len(self.names))}{few}"
        else:
            shown = ", ".join(self.flagged[:_ROWS]) + (", ..." if len(self.flagged) > _ROWS else "")
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
        for i in columns[0].argsort()[:_ROWS].tolist():
            p, adjusted, shift, spread, symmetric = (float(column[i]) for column in columns)
            lines.append(
                f"  {self.names[i]:{width}}  {p:9.2g}{adjusted:10.2g}{shift:9.2f}{spread:17.2f}{symmetric:13.2g}"
            )
        left = len(self.names) - _ROWS
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
        calibration_figure(figure, self.uniformity, self.ranks[:, order], [self.names[i] for i in order], self.flagged)
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
    takes("prior", read_callable("prior", prior, "is a function of a generator that draws θ"), "generator")
    takes("simulate", read_callable("simulate", simulate, "is a function of θ and a generator"), "theta, generator")
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
                labels = labels_of(theta, names, quantities, labels)
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
