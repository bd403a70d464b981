"""A Gaussian over the weights of a network that leaves the network itself as it is.

q(θ) = N(m, V),  minimising  (N/T) E_q[mean loss + ½δ|θ|²] - entropy of q,  δ = λ/N
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchngvi.errors import InputError
from torchngvi.networks.hooks import refuse_replaced
from torchngvi.networks.laplace import LaplaceResult, settle_
from torchngvi.networks.layout import PriorPrecision, Structure
from torchngvi.networks.likelihoods import OutputLikelihood, read_likelihood
from torchngvi.networks.predictions import Predictive, log_prob, predictive
from torchngvi.networks.weights import NetworkWeights
from torchngvi.posteriors import DiagonalGaussian

Read = Callable[[Any], Tensor]
TEMPERATURE = 0.05  # chosen on validation data of four tasks, with which docs/networks.md says how


class NetworkGaussian(NetworkWeights):
    """A Gaussian posterior over the weights of a network; `torchngvi.network` makes one.

    Its buffers are what a checkpoint must hold beside those of the network and of the optimizer: the means, the running
    curvatures, and a few integers.  Noise is a function of a seed and the number of the draw and is never stored.

    Args:
        model: the network, whose parameters are the ones that q moves; it does not become a part of q.
        num_data: the number N of independent labels in the training data.
        structure, prior_precision, temperature, likelihood, seed, prior: as in :func:`network`.

    Raises:
        InputError: for arguments that cannot be used, each with its sentence.
    """

    def __init__(
        self,
        model: nn.Module,
        num_data: int,
        structure: Structure = "diagonal",
        prior_precision: PriorPrecision = 1.0,
        temperature: float = TEMPERATURE,
        likelihood: str | OutputLikelihood = "categorical",
        seed: int = 0,
        prior: "NetworkGaussian | Mapping[str, Tensor] | None" = None,
    ) -> None:
        self.likelihood = read_likelihood(likelihood)
        super().__init__(model, num_data, structure, prior_precision, temperature, seed, prior)
        self.structure = structure
        self.ending: Callable[[], str | None] | None = None  # what to say of a training that may have ended too early

    def __repr__(self) -> str:
        """Name the families with their numbers of weights, the likelihood, and how far the training is."""
        sizes = ", ".join(
            f"{sum(m.numel() for m in family.mean):,} {type(family).__name__.lower()}" for family in self.each()
        )
        kind = type(self.likelihood).__name__
        told = f"{sizes} weights of {type(self.model).__name__}, num_data={self.num_data:,}, {kind}"
        return f"NetworkGaussian({told}, temperature={self.temperature:g}, steps={self.draw:,})"

    # predictions

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
        return predictive(self, inputs, samples, read).mean

    def predictive(self, inputs: Any, samples: int = 16, read: Read | None = None) -> Predictive:
        """Predict with the two parts of the uncertainty, epistemic and aleatoric.

        Args:
            inputs, samples, read: as in `predict`.

        Returns:
            Mean, epistemic and aleatoric uncertainty of each label.
        """
        return predictive(self, inputs, samples, read)

    def log_prob(self, inputs: Any, y: Tensor, samples: int = 16, read: Read | None = None) -> Tensor:
        """Return log E_q[p(y | θ)] of each label; minus its mean is the negative log likelihood.

        Args:
            inputs, samples, read: as in `predict`.
            y: the labels.

        Returns:
            One number a label.
        """
        return log_prob(self, inputs, y, samples, read)

    def laplace(self, loader: Iterable[Any], labels: int | None = None, read: Read | None = None) -> LaplaceResult:
        """Make q the Laplace approximation at the weights that the network has, which stay as they are.

        One wants it for a network that has been trained already, by any loop and without a posterior: its weights are
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
                More labels than num_data are told by a warning.
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
        """Take the hooks off the network, whose parameters then hold the mean like those of any other network."""
        self.sampling = self.pinned = False
        self.settle(False)
        self._hooks.remove()

    def get_extra_state(self) -> dict[str, Any]:
        """Return what the base class does, and the factor of the noise in predictions."""
        return {**super().get_extra_state(), "factor": self.likelihood.factor}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take it up again."""
        super().set_extra_state(state)
        self.likelihood.factor = float(state.get("factor", 1.0))

    # what q says

    def kl(self) -> Tensor:
        """Return KL(q‖prior) in nats, a number, at the temperature that V has; infinite at 0."""
        if self.temperature == 0:
            return torch.tensor(math.inf, device=self.parameters_of_network[0].device)
        total = []
        for family in self.each():
            each = zip(family.mean, family.centers, family.variances(), family.prior, strict=True)
            for mean, center, variance, delta in each:
                precision = torch.as_tensor(delta).to(mean) * self.num_data
                away = mean if center is None else mean - center
                squares = precision * (away.square() + self.temperature * variance)
                total.append(0.5 * (squares - 1 - (self.temperature * precision).log()).sum())
            total.append(-0.5 * family.log_det())
        return torch.stack(total).sum()

    def as_gaussian(self) -> DiagonalGaussian:
        """Return the marginals of q as a `DiagonalGaussian` over the flattened weights, in the order of `names`.

        One wants it for small networks, for `torchngvi.examine` and all that a posterior of the library can do.

        Returns:
            The posterior, of dimension D, the number of weights.

        Raises:
            InputError: at the temperature 0, where q is a point.
        """
        if self.temperature == 0:
            raise InputError(
                "At the temperature 0 q is a point and no Gaussian; choose its width by calibrate or temper_ first."
            )
        mean = torch.cat([m.flatten() for m in self.mean.values()])
        stddev = torch.cat([v.flatten() for v in self.variance.values()]).sqrt()
        return DiagonalGaussian(mean.numel(), mean=mean, scale=stddev, dtype=mean.dtype, device=mean.device)

    def update_bn(self, loader: Iterable[Any], device: torch.device | None = None) -> None:
        """Estimate the running statistics of batch normalisation anew, at the mean weights.

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
            :func:`calibrate` chooses it anew after the training, on validation data.
        likelihood: what the outputs say of the labels: "categorical", "bernoulli", ``networks.Gaussian(scale)``,
            ``networks.HeteroscedasticGaussian()`` or an `OutputLikelihood`.
        seed: of the noise; the same in all processes that train together.
        prior: what was known before these data: the posterior of an earlier training, whose means and precisions
            N (h + δ) are those of the prior, or means alone, by name as ``model.state_dict()`` has them, such as
            pretrained weights, with prior_precision; weights that it does not name have the mean 0.

    Returns:
        The posterior.

    Raises:
        InputError: for arguments that cannot be used, each with its sentence.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> q = network(model, num_data=1000)
    >>> q
    NetworkGaussian(67 diagonal weights of Sequential, num_data=1,000, Categorical, temperature=0.05, steps=0)
    """
    return NetworkGaussian(model, num_data, structure, prior_precision, temperature, likelihood, seed, prior)
