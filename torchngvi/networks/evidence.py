"""What the training data say of a posterior and of its prior: an ELBO, Laplace's log evidence, and MacKay's rule."""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_size
from torchngvi.diagnostics.importance import Estimate
from torchngvi.errors import InputError
from torchngvi.networks.families import Kronecker
from torchngvi.networks.layout import matched
from torchngvi.networks.predictions import Read, batches, called, drawn_outputs, evaluating, warn_of_no_data
from torchngvi.networks.weights import NetworkWeights


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
        count = 0.0
        for inputs, y in batches(loader):
            if samples:
                found = drawn_outputs(self, inputs, samples, read)
            else:
                with self.at_mean(), evaluating(self.model), torch.no_grad():
                    found = called(self.model, inputs, read)[None]
            each, weights = likelihood.log_prob(found, y), likelihood.weigh(found, y)
            count += each[0].numel() if weights is None else float(weights.sum())
            total.append((each if weights is None else each * weights).flatten(1).sum(1, dtype=torch.float64))
        if not count:
            raise InputError("The loader is empty; give the training data, or a part of them.")
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
