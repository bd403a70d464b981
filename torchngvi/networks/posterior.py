"""A Gaussian over the weights of a network that leaves the network itself as it is.

q(θ) = N(m, V),  minimising  (N/T) E_q[mean loss + ½δ|θ|²] - entropy of q,  δ = λ/N
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchngvi.arguments import read_flag, read_number, read_size
from torchngvi.diagnostics.importance import Estimate
from torchngvi.errors import CalibrationWarning, InputError
from torchngvi.interfaces import Coordinates
from torchngvi.networks.families import Diagonal, Kronecker
from torchngvi.networks.laplace import (
    LaplaceResult,
    Predictive,
    Read,
    batches,
    called,
    drawn_outputs,
    evaluating,
    mean_density,
    settle_,
    warn_of_more_labels,
    warn_of_no_data,
)
from torchngvi.networks.layout import PriorPrecision, Structure, matched
from torchngvi.networks.likelihoods import OutputLikelihood
from torchngvi.networks.weights import TEMPERATURE, NetworkWeights, refuse_replaced
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian
from torchngvi.posteriors.gaussian import CovarianceRoot
from torchngvi.structures import block_diagonal


class NetworkEvidence(NetworkWeights):
    """A posterior over a network's weights, with what the training data say of it; arguments as in the base class."""

    def kl(self) -> Tensor:
        """Return KL(q‖prior) in nats, a number, at the temperature that V has; infinite at 0."""
        if self.temperature == 0:
            return torch.tensor(math.inf, device=self.parameters_of_network[0].device)
        total = []
        for family in self.each():
            each = zip(family.mean, family.centers, family.variances(), family.prior, strict=True)
            for mean, center, variance, delta in each:
                precision = torch.as_tensor(delta, dtype=mean.dtype, device=mean.device) * self.num_data
                away = mean if center is None else mean - center
                squares = precision * (away.square() + self.temperature * variance)
                total.append(0.5 * (squares - 1 - (self.temperature * precision).log()).sum())
            total.append(-0.5 * family.log_det())
        return torch.stack(total).sum()

    def elbo(self, loader: Iterable[Any], samples: int = 16, read: Read | None = None) -> Estimate:
        """Estimate a lower bound of the log evidence, E_q[Σᵢ log p(yᵢ | θ)] - KL(q‖prior), in nats.

        q at a temperature T is a point of its family like any other, so that this bounds log p(y) at every T: it is the
        objective of the training at T = 1, where it is largest if q has settled.  It says how well q does for one
        network and prior.  The noise is that of the training, without the factor that :func:`calibrate` chooses.

        Args:
            loader: batches (inputs, labels) of the training data; of a part of them the sum is scaled to all N labels.
                With weights of the classes it is N times the weighted mean.
            samples: the number of draws of the weights, those of predictions, 2 or more.
            read: where the tensor of outputs is in what the network returns.

        Returns:
            The bound, with the standard error of the mean over draws; minus infinity at the temperature 0.

        Raises:
            InputError: if the loader is empty, or samples is less than 2.
        """
        samples = read_size("samples", samples, "is the number of draws of the weights", at_least=2)
        each = self._log_likelihoods(loader, samples, read)
        return Estimate(each.mean() - self.kl(), each.std() / samples**0.5)

    def log_evidence(self, loader: Iterable[Any], read: Read | None = None) -> float:
        """Return Laplace's approximation of the log evidence of network and prior, in nats (MacKay 1992).

        It compares networks or priors on the same data, after `laplace` or a training, whatever the temperature is:

            log p(y) ≈ Σᵢ log p(yᵢ | m) - ½ Σ λ(m - m₀)² + ½ Σ log λ + ½ log|V|,   V⁻¹ = N (H + δ) at T = 1.

        It is exact for a linear model with Gaussian noise and structure="dense".  Other families have the largest ELBO
        of theirs under the same quadratic, hence a smaller number (Immer et al. 2021).  It takes m for a mode.

        Args:
            loader, read: as in `elbo`.

        Returns:
            The log evidence.

        Raises:
            InputError: if the loader is empty, or for a Kronecker family after a training, whose factors are on their
                way from the start; call `laplace` first.
        """
        for family in self.each():
            if isinstance(family, Kronecker) and family.bounded:
                raise InputError(
                    "log_evidence of structure='kronecker' needs q.laplace(loader) first: after a training its factors "
                    "still have a part of their start, which no data have said. q.elbo(loader) holds for any q."
                )
        fit = self._log_likelihoods(loader, 0, read)[0]
        with _at_one(self):
            return float(fit - self.kl() - 0.5 * sum(self._determined().values()))

    @torch.no_grad()
    def fit_prior_precision_(self, groups: Sequence[str] | None = None, rounds: int = 100) -> dict[str, float]:
        """Choose the precision of the prior by the evidence at the present mean, with MacKay's rule (1992).

        For each group of weights it solves, with V at T = 1,

            λ = γ/|m - m₀|²,   γ = D - λ tr V,

        γ of the D weights being determined by the data: the maximum of `log_evidence` over λ with m and H held.  H is
        stored, so that no data are needed, and q is then as wide as the new prior makes it.  The mean stays: a second
        :func:`torchngvi.network` with what is returned as `prior_precision` trains with it.  Within a training the rule
        would prune units, whose weights and precision drive one another to 0 and to infinity.

        Args:
            groups: patterns of names of parameters, each of one precision, as ``["*"]`` or ``["head.*", "*"]``; names
                that fit none keep theirs.  None for one precision a layer, its bias included.
            rounds: of the rule at most; it ends where no log λ moves by more than 1e-6.

        Returns:
            λ by the name of the parameter.  A group keeps its own where the data determine none of its weights or all
            are at the prior's mean, and a parameter where its prior is a posterior.

        Raises:
            InputError: for a Kronecker family, whose factors hold the prior.

        >>> import torchngvi
        >>> model = torch.nn.Linear(1, 2)
        >>> q = torchngvi.network(model, num_data=20)
        >>> _ = q.laplace([(torch.ones(20, 1), torch.arange(20) % 2)])
        >>> sorted(q.fit_prior_precision_(["*"]))
        ['bias', 'weight']
        """
        warn_of_no_data(self)
        if any(isinstance(family, Kronecker) for family in self.each()):
            raise InputError(
                "The factors of structure='kronecker' hold the prior, so that its precision cannot be chosen after the "
                "curvature was observed. Choose it for a q with structure='diagonal', after its laplace(loader), and "
                "pass what fit_prior_precision_ returns as prior_precision to torchngvi.network."
            )
        self.finish_step()
        numbers = {name: delta for name, delta in self.prior.items() if isinstance(delta, float)}
        layers = {name: name.rpartition(".")[0] for name in numbers}
        chosen = layers if groups is None else matched(list(numbers), {p: p for p in groups}, "groups")
        with self.at_mean(), _at_one(self):
            centers = [center for family in self.each() for center in family.centers]
            each = zip(self.mean.items(), centers, strict=True)
            lengths = {name: float((m if c is None else m - c).square().sum()) for (name, m), c in each}
            for _ in range(rounds):
                known, before = self._determined(), dict(numbers)
                for group in set(chosen.values()):
                    own = [name for name in chosen if chosen[name] == group]
                    gamma, squares = sum(known[name] for name in own), sum(lengths[name] for name in own)
                    if gamma > 1e-6 * sum(self.mean[name].numel() for name in own) and squares > 0:
                        for name in own:  # half a step in log λ, which never goes past the solution
                            numbers[name] = (before[name] * gamma / squares / self.num_data) ** 0.5
                for family in self.each():
                    family.take_prior_(numbers)
                if all(abs(math.log(numbers[name] / before[name])) < 1e-6 for name in numbers):
                    break
        return {name: delta * self.num_data for name, delta in numbers.items()}

    def _determined(self) -> dict[str, float]:
        """γ = D - Σ λ v, the number of weights that the data determine, by the name of the parameter."""
        variances = self._named([family.variances() for family in self.each()])
        each = {name: v.numel() - float((self.num_data * self.prior[name] * v).sum()) for name, v in variances.items()}
        return {name: max(gamma, 0.0) for name, gamma in each.items()}

    def _log_likelihoods(self, loader: Iterable[Any], samples: int, read: Read | None) -> Tensor:
        """N times the mean of log p(y | θ) over the labels of a loader, for each draw, or at the mean for 0 draws."""
        warn_of_no_data(self)
        likelihood = copy.copy(self.likelihood)
        likelihood.factor = 1.0
        total: list[Tensor] = []
        count, labels = 0.0, 0
        for inputs, y in batches(loader):
            if samples:
                found = drawn_outputs(self, inputs, samples, read)
            else:
                with self.at_mean(), evaluating(self.model), torch.no_grad():
                    found = called(self.model, inputs, read)[None]
            each, weights = likelihood.log_prob(found, y), likelihood.weigh(found, y)
            labels += each[0].numel()
            count += each[0].numel() if weights is None else float(weights.sum())
            total.append((each if weights is None else each * weights).flatten(1).sum(1, dtype=torch.float64))
        if not count:
            raise InputError("The loader is empty; give the training data, or a part of them.")
        warn_of_more_labels(self, labels, "their mean log likelihood is multiplied")
        return torch.stack(total).sum(0) * (self.num_data / count)


@contextmanager
def _at_one(q: NetworkWeights) -> Iterator[None]:
    """Let q be (N (H + δ))⁻¹ wide until the block ends: at T = 1, and with what was observed alone."""
    before = q.temperature, [family.bounded for family in q.each()]
    q.temperature = 1.0
    for family in q.each():
        family.bounded = False
        family.refresh_()
    try:
        yield
    finally:
        q.temperature = before[0]
        for family, bounded in zip(q.each(), before[1], strict=True):
            family.bounded = bounded
            family.refresh_()


class NetworkGaussian(NetworkEvidence):
    """A Gaussian posterior over the weights of a network; `torchngvi.network` makes one.

    Its buffers are what a checkpoint must hold beside those of the network and of the optimizer: the means, the running
    curvatures, and a few integers.  Noise is a function of a seed and the number of the draw and is never stored.

    Args:
        model: the network, whose parameters are the ones that q moves; it does not become a part of q.
        num_data: the number N of independent labels in the training data.
        structure, prior_precision, temperature, likelihood, seed, prior, prior_weight: as in :func:`network`.

    Raises:
        InputError: for arguments that cannot be used, each with its sentence.
    """

    def __repr__(self) -> str:
        """Name the families with their numbers of weights, the likelihood, and how far the training is."""
        sizes = ", ".join(
            f"{sum(m.numel() for m in family.mean):,} {type(family).__name__.lower()}" for family in self.each()
        )
        kind = type(self.likelihood).__name__
        text = f"{sizes} weights of {type(self.model).__name__}, num_data={self.num_data:,}, {kind}"
        return f"NetworkGaussian({text}, temperature={self.temperature:g}, steps={self.draw:,})"

    # predictions

    def outputs(self, inputs: Any, samples: int = 16, read: Read | None = None) -> Tensor:
        """Return the outputs of the network under draws of its weights, the same for every batch until q moves.

        Args:
            inputs, samples, read: as in `predict`.

        Returns:
            (samples, *labels, ...).
        """
        warn_of_no_data(self)
        return drawn_outputs(self, inputs, samples, read)

    def predict(self, inputs: Any, samples: int = 16, read: Read | None = None) -> Tensor:
        """Predict by the average over draws of the weights.

        Args:
            inputs: a batch as the network takes it: a tensor, a tuple of arguments or a dict of keywords.
            samples: the number of draws.
            read: where the tensor of outputs is in what the network returns; that itself, or its entry ``logits``, by
                default.

        Returns:
            The probabilities of the classes, with the classes last, or the means of numbers.

        Raises:
            InputError: if samples is less than 1.
        """
        return self.predictive(inputs, samples, read).mean

    def predictive(self, inputs: Any, samples: int = 16, read: Read | None = None) -> Predictive:
        """Predict with the two parts of the uncertainty, epistemic and aleatoric.

        Args:
            inputs, samples, read: as in `predict`.

        Returns:
            Mean, epistemic and aleatoric uncertainty of each label.
        """
        each = map(self.likelihood.moments, self.outputs(inputs, samples, read))
        means, given = map(torch.stack, zip(*each, strict=True))
        return Predictive(means.mean(0), *self.likelihood.total(means, given))

    def log_prob(self, inputs: Any, y: Tensor, samples: int = 16, read: Read | None = None) -> Tensor:
        """Return log E_q[p(y | θ)] of each label; minus its mean is the negative log likelihood.

        Args:
            inputs, samples, read: as in `predict`.
            y: the labels.

        Returns:
            One number a label.
        """
        return mean_density(self.likelihood.log_prob(self.outputs(inputs, samples, read), y))

    def laplace(self, loader: Iterable[Any], labels: int | None = None, read: Read | None = None) -> LaplaceResult:
        """Make q the Laplace approximation at the weights that the network has, which stay as they are.

        Use it for a network that has been trained already, by any loop and without a posterior: its weights are
        the mean, and one pass over the training data gives the covariance,

            V⁻¹ = (N (H + δ))/T,   H = Σᵢ Jᵢᵀ Λᵢ Jᵢ/n,

        H the generalised Gauss-Newton matrix a datum, Jᵢ the derivatives of the outputs and Λᵢ the Hessian of -log p in
        them; of it the family takes the diagonal or its blocks (MacKay 1992; Ritter, Botev and Barber 2018), and a
        Kronecker family makes the product that is nearest in KL(q‖N(m, V)), by five passes.  The
        network is evaluated in evaluation mode, at its mean.  T is the temperature of q, 0.05 unless
        :func:`torchngvi.network` was given another one, so that the standard deviations are 4.5 times smaller than
        those of the posterior itself, at T = 1; :func:`calibrate` chooses T on validation data.
        An optimizer that is attached goes on from this covariance.

        Args:
            loader: batches (inputs, labels) of the training data, or of a part of them; the labels are not looked at.
                A warning says so where there are more labels than num_data.
                Several processes take a part each.
            labels: None for the expectation over all labels, which costs a backward pass of single examples for every
                class; or the number of labels that are drawn for each output, 1 for many classes or large networks.
            read: where the tensor of outputs is in what the network returns.

        Returns:
            How many labels there were, and how wide q is.

        Raises:
            InputError: if the loader is empty, or can be read only once for a Kronecker family, labels is less than 1,
                or the curvature is not finite.

        >>> model = nn.Linear(2, 3)
        >>> q = network(model, num_data=20, temperature=1.0)
        >>> q.laplace([(torch.zeros(20, 2), torch.zeros(20))])
        LaplaceResult(labels=20, num_data=20, temperature=1: standard deviations are the posterior's)
        >>> q.variance["weight"].unique()  # inputs of zero say nothing of their weights: the prior's
        tensor([1.])
        """
        refuse_replaced(self.model, self.names, self.parameters_of_network)
        self.agree_()  # on what the network has
        with self.at_mean():
            count = settle_(self, loader, labels, read)
            self._seen.clear()
            self.observed = max(self.observed, self.num_data)  # of every label
        return LaplaceResult(count, self.num_data, self.temperature)

    def release(self) -> None:
        """Take the hooks off the network, which then holds the mean as any other does, and let its optimizers go."""
        if self.detach is not None:
            self.detach()
        self.sampling = self.pinned = False
        self.settle(False)
        self._hooks.remove()

    # what q says

    def as_gaussian(self, marginals: bool = False) -> CovarianceRoot:
        """Return q as a posterior of `torchngvi.posteriors`, for all that those can do, such as `torchngvi.examine`.

        It is over the flattened weights in the order of `names`, those of the structure "rows" row by row: a
        `DiagonalGaussian` of independent weights, and otherwise a `CholeskyGaussian` with a block for the weights that
        depend on one another; a Kronecker product is written out.

        Args:
            marginals: whether to leave all covariances out, for networks whose blocks would not fit.

        Returns:
            The posterior, of dimension D, the number of weights.

        Raises:
            InputError: at the temperature 0, where q is a point, or for Kronecker products of more than 2,000 weights.

        >>> network(nn.Linear(2, 3), num_data=20, structure="rows").as_gaussian().structure
        EqualBlocks(count=3, size=3)
        """
        marginals = read_flag("marginals", marginals)
        if self.temperature == 0:
            raise InputError(
                "At the temperature 0 q is a point and no Gaussian; choose its width by calibrate or temper_ first."
            )
        mean = torch.cat([family.vector(family.mean) for family in self.each()])
        if marginals or all(isinstance(family, Diagonal) for family in self.each()):
            variance = torch.cat([family.vector(family.variances()) for family in self.each()])
            return DiagonalGaussian(len(mean), mean=mean, scale=(self.temperature * variance).sqrt())
        roots = [root for family in self.each() for root in family.blocks()]
        structure = block_diagonal([root.shape[-1] for root in roots for _ in root])
        by_size = sorted(roots, key=lambda root: root.shape[-1])  # as the structure stores them
        matrix = self.temperature**0.5 * torch.cat([root.flatten() for root in by_size]).view(structure.shape)
        found = CholeskyGaussian(len(mean), structure=structure, dtype=mean.dtype, device=mean.device)
        found.assign(Coordinates(mean, matrix), torch.tensor(True, device=mean.device))
        return found

    def update_bn(self, loader: Iterable[Any], device: torch.device | None = None) -> None:
        """Estimate the running statistics of batch normalisation again, at the mean weights.

        Args:
            loader: batches of inputs, or of tuples whose first entry is the inputs.
            device: where the inputs are moved to.
        """
        with self.at_mean():
            torch.optim.swa_utils.update_bn(loader, self.model, device)


def network(
    model: nn.Module,
    num_data: int,
    structure: Structure = "diagonal",
    prior_precision: PriorPrecision = 1.0,
    temperature: float = TEMPERATURE,
    likelihood: str | OutputLikelihood = "categorical",
    seed: int = 0,
    prior: NetworkGaussian | Mapping[str, Tensor] | None = None,
    prior_weight: float = 1.0,
) -> NetworkGaussian:
    """Make a Gaussian posterior over the weights of a network, centred at the weights that it has.

    It minimises (N/T) E_q[mean loss + ½δ|θ|²] minus the entropy of q, δ = λ/N, once :func:`attach` has tied an
    optimizer to it; the loss of the training loop is the mean over labels, as in torch.  The network keeps
    its parameters, names and `state_dict()` (of the means), and needs no context manager: its parameters hold a draw in
    training and the mean in evaluation.  A parameter that is frozen, or that no pattern names, stays a plain number.

    Args:
        model: the network, on its device and in its dtype.
        num_data: the number N of independent labels in the training data (of tokens for a sequence model), in the units
            that the mean loss averages over.
        structure: "diagonal" or "kronecker" for all parameters, or by patterns of their names:
            ``{"head.*": "dense", "*": "kronecker"}``; "dense" is one block of a last layer, of 2,000 weights at most,
            and "rows" is a block for each of its classes.
        prior_precision: λ of the prior N(0, λ⁻¹), one number or by patterns of names.
        temperature: T, which tempers likelihood and prior alike; less is narrower.  1 is the posterior, for which
            independent weights are too wide in most networks: the fit suffers from their noise.  0 trains without
            noise: the parameters hold the mean, and what is left is an optimizer whose steps have a radius.
            :func:`calibrate` chooses it again after the training, on validation data.
        likelihood: what the outputs say of the labels: "categorical", "bernoulli", ``networks.Gaussian(scale)``,
            ``networks.HeteroscedasticGaussian()`` or an `OutputLikelihood`.
        seed: of the noise; the same in all processes that train together.
        prior: what was known before these data: the posterior of an earlier training, whose means and precisions
            N (h + δ) are those of the prior, or means alone, by name as ``model.state_dict()`` has them, such as
            pretrained weights, with prior_precision; weights that it does not name have the mean 0.  The network starts
            at its own weights.  Precisions add from one training to the next; of dependent weights that of each given
            the others is kept.  The temperature does not enter, as it divides prior and likelihood alike: a narrow q
            of T = 0.05 knows no more than its data say.
        prior_weight: how often the data of that posterior count, w in N (w h + δ), as the λ of EWC (Kirkpatrick et al.
            2017); its own prior counts once.  1 is Bayes' rule.  The curvature at weights that fit well says little of
            how fast the fit is lost further away, so that tasks in turn want 10 to 1,000.

    Returns:
        The posterior.

    Raises:
        InputError: for arguments that cannot be used, each with its sentence.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> q = network(model, num_data=1000)
    >>> q
    NetworkGaussian(67 diagonal weights of Sequential, num_data=1,000, Categorical, temperature=0.05, steps=0)
    """
    return NetworkGaussian(
        model, num_data, structure, prior_precision, temperature, likelihood, seed, prior, prior_weight
    )


# ------------------------------------------------------------------------------------ calibration by validation data


_SMALLEST = 2.0**-10  # a posterior 32 times narrower than at the temperature 1 is a point for a network
_FLAT = 0.001  # nats a label: of temperatures that differ by no more the largest is chosen


class Calibrated(NamedTuple):
    """What :func:`calibrate` found.

    Attributes:
        temperature: the one chosen, which q has now.
        nll: its negative log likelihood a label on the validation data, in nats.
        tried: the negative log likelihood by temperature, each with its best factor.
        factor: of the scale of the noise, which the likelihood of q has now; 1 for classes.
    """

    temperature: float
    nll: float
    tried: dict[float, float]
    factor: float = 1.0

    def __repr__(self) -> str:
        """Say what was chosen, and from how many."""
        factor = "" if self.factor == 1 else f", factor={self.factor:.3g}"
        return f"Calibrated(temperature={self.temperature:.4g}, nll={self.nll:.4f}{factor}, of {len(self.tried)} tried)"


def calibrate(
    q: NetworkGaussian,
    loader: Iterable[Any],
    samples: int = 16,
    largest: float = 16.0,
    read: Callable[[Any], Tensor] | None = None,
) -> Calibrated:
    """Choose the temperature of q by the likelihood of validation data, after the training and without any more of it.

    V is proportional to the temperature; the mean stays.  The negative log likelihood of the predictions is computed
    for temperatures a factor of two apart, with the same draws for all of them, from the largest down to 2⁻¹⁰, and the
    best one is kept, the largest of those that are within 0.001 nats of it.  None is left out: where draws are so wide
    that they guess, the likelihood may fall and rise again.
    Mean-field posteriors at T = 1 are too wide for small data, which the ELBO cannot see.
    Where the labels are numbers with Gaussian noise, a factor of its scale in predictions is chosen with each
    temperature, from ¼ to 64: the noise that is learned from the training data makes up for what the draws of the
    training did there, and for a network that has learned its labels by heart.  A temperature at an end of what was
    tried, a factor of 8 or more, or a noise that was to be learned and has not moved, is a `CalibrationWarning`.

    Args:
        q: the posterior; its temperature is changed, and the factor of its likelihood.
        loader: batches (inputs, labels) of validation data, gone through once a temperature.
        samples: draws of the weights for a prediction.
        largest: the temperature to begin with.
        read: where the tensor of outputs is in what the network returns.

    Returns:
        The temperature chosen, its negative log likelihood, and those of the others.

    Raises:
        InputError: for another kind of posterior, if the loader is empty, the likelihood is not finite at any
            temperature, or `largest` is no number from 2⁻¹⁰ on; the temperature is then as it was.

    >>> import torch
    >>> import torchngvi
    >>> model = torch.nn.Linear(1, 2)
    >>> q = torchngvi.network(model, num_data=20)
    >>> x = torch.zeros(20, 1)
    >>> _ = q.laplace([(x, torch.arange(20) % 2)])
    >>> found = torchngvi.calibrate(q, [(x, torch.arange(20) % 2)], largest=0.05)
    >>> q.temperature == found.temperature
    True
    """
    if not isinstance(q, NetworkGaussian):
        raise InputError(
            f"calibrate takes the posterior from torchngvi.network, and then a loader; got a {type(q).__name__}."
        )
    largest = read_number("largest", largest, "is the temperature to begin with", at_least=_SMALLEST)
    warn_of_no_data(q)
    tried: dict[float, float] = {}
    factors: dict[float, float] = {}
    before, temperature = q.temperature, float(largest)
    try:
        while temperature >= _SMALLEST:
            q.temper_(temperature)
            tried[temperature], factors[temperature] = _best(q, loader, samples, read)
            temperature /= 2
    finally:
        q.temper_(before)  # of a loader that fails, as it was
    finite = {t: nll for t, nll in tried.items() if math.isfinite(nll)}
    if not finite:
        raise InputError(f"The likelihood of the validation data is not finite at any temperature tried: {tried}.")
    best = max(t for t, nll in finite.items() if nll <= min(finite.values()) + _FLAT)
    q.temper_(best)
    q.likelihood.factor = factors[best]
    found = Calibrated(best, finite[best], tried, factors[best])
    nearest = min(finite, key=lambda t: abs(math.log(t / before)) if before else t)
    for sentence in filter(None, _ends(found, finite[nearest], q)):
        warnings.warn(sentence, CalibrationWarning, stacklevel=2)
    return found


def _ends(found: Calibrated, trained: float, q: NetworkGaussian, noticed: float = 0.01) -> Iterator[str | None]:
    """What to say of a choice at an end of what was tried, each with what to do."""
    # noticed: nats a label: less between the temperatures of the training and of the choice is not worth a word
    temperature, factor, factors = found.temperature, found.factor, q.likelihood.factors
    smallest, lowest = min(found.tried), min(found.tried.values())
    if trained - found.nll > noticed and temperature == max(found.tried):
        yield (
            f"The temperature chosen, {temperature:g}, is the largest one tried: a wider posterior may predict better. "
            f"Call calibrate with largest={4 * temperature:g}, or train at a higher temperature."
        )
    elif smallest / 2 < _SMALLEST and found.tried[smallest] == lowest < trained - noticed:
        yield (
            f"The temperature chosen, {temperature:g}, is as good as the smallest one tried, to which predictions only "
            "become better: on these validation data the mean alone predicts as well as q does. Its uncertainty is "
            "that of the labels alone; for more of it, train at a lower temperature, or calibrate on more data."
        )
    if len(factors) > 1 and (factor == factors[0] or factor >= 8):
        closely = "the network fits its training labels much more closely than new ones, " if factor >= 8 else ""
        fewer = "Standardise the labels, train for fewer steps or with a larger prior_precision, and train"
        remedy = fewer if factor >= 8 else "Train"
        yield (
            f"The factor of the noise, {factor:.3g}, is far from 1, of {factors[0]:g} to {factors[-1]:g} tried: "
            f"{closely}the scale of the noise is not that of the labels, or the loss is not that of the likelihood. "
            f"{remedy} with networks.Gaussian(scale).loss(output, y), the scale another one or learned."
        )
    yield q.likelihood.doubt()
    yield None if q.ending is None else q.ending()


def _best(
    q: NetworkGaussian, loader: Iterable[Any], samples: int, read: Callable[[Any], Tensor] | None
) -> tuple[float, float]:
    """The mean negative log likelihood of a loader's labels with the best factor of the noise, and that factor."""
    before, factors = q.likelihood.factor, q.likelihood.factors
    totals: list[Tensor | float] = [0.0] * len(factors)
    count: Tensor | float = 0
    try:
        for inputs, y in batches(loader):
            found = drawn_outputs(q, inputs, samples, read)
            for k, factor in enumerate(factors):
                q.likelihood.factor = factor
                each = mean_density(q.likelihood.log_prob(found, y))
                weights = q.likelihood.weigh(found, y)
                totals[k] = totals[k] - (each if weights is None else each * weights).sum()
            count = count + (each.numel() if weights is None else weights.sum())
    finally:
        q.likelihood.factor = before
    if not count:
        raise InputError(
            "The loader of validation data is empty; it is gone through once a temperature, so that it must be a "
            "DataLoader or a list, not a generator."
        )
    means = [float(total) / float(count) for total in totals]
    best = min(range(len(means)), key=lambda k: means[k] if means[k] == means[k] else float("inf"))
    return means[best], factors[best]
