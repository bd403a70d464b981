"""A Gaussian over the weights of a network that leaves the network itself as it is.

q(θ) = N(m, V),  minimising  (N/T) E_q[mean loss + ½δ|θ|²] - entropy of q,  δ = λ/N
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchngvi.arguments import read_flag
from torchngvi.errors import InputError
from torchngvi.interfaces import Coordinates
from torchngvi.networks.evidence import NetworkEvidence
from torchngvi.networks.families import Diagonal
from torchngvi.networks.laplace import LaplaceResult, settle_
from torchngvi.networks.layout import PriorPrecision, Structure
from torchngvi.networks.likelihoods import OutputLikelihood
from torchngvi.networks.predictions import Predictive, Read, drawn_outputs, mean_density, warn_of_no_data
from torchngvi.networks.weights import TEMPERATURE, refuse_replaced
from torchngvi.posteriors import CholeskyGaussian, DiagonalGaussian
from torchngvi.posteriors.gaussian import CovarianceRoot
from torchngvi.structures import block_diagonal


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
        told = f"{sizes} weights of {type(self.model).__name__}, num_data={self.num_data:,}, {kind}"
        return f"NetworkGaussian({told}, temperature={self.temperature:g}, steps={self.draw:,})"

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
