"""A Gaussian over the weights of a network that leaves the network itself as it is.

    q(θ) = N(m, V),  minimising  (N/T) E_q[mean loss + ½δ|θ|²] - entropy of q,  δ = λ/N

The parameters of the network hold a draw θ in training, once an optimizer is attached, and the mean m in evaluation
and in `state_dict()`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchngvi.distributed import average_over_ranks_
from torchngvi.errors import InputError
from torchngvi.networks.families import Family, Scales
from torchngvi.networks.hooks import Hooks, posterior_of
from torchngvi.networks.layout import PriorPrecision, Structure, families, unwrapped
from torchngvi.networks.likelihoods import OutputLikelihood, read_likelihood
from torchngvi.networks.noise import seed_of
from torchngvi.networks.predictions import Predictive, log_prob, predictive
from torchngvi.posteriors import DiagonalGaussian

Read = Callable[[Any], Tensor]
FORGOTTEN = 100  # observations of the curvature over which the start is forgotten


class NetworkGaussian(nn.Module):
    """A Gaussian posterior over the weights of a network; `torchngvi.network` makes one.

    Its buffers are what a checkpoint must hold beside those of the network and of the optimizer: the means, the running
    curvatures, and a few integers.  Noise is a function of a seed and the number of the draw and is never stored.

    Args:
        model: the network, whose parameters are the ones that q moves; it does not become a part of q.
        num_data: the number N of independent labels in the training data.
        structure, prior_precision, temperature, likelihood, seed: as in :func:`network`.

    Raises:
        InputError: for arguments that cannot be used, each with its sentence.
    """

    def __init__(
        self,
        model: nn.Module,
        num_data: int,
        structure: Structure = "diagonal",
        prior_precision: PriorPrecision = 1.0,
        temperature: float = 1.0,
        likelihood: str | OutputLikelihood = "categorical",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(num_data, int) or num_data < 1:
            raise InputError(f"num_data is the number of labels in the training data, 1 or more; got {num_data!r}.")
        if not 0 < temperature < math.inf:
            raise InputError(f"temperature is larger than 0 and finite; got {temperature}.")
        self.num_data, self.temperature, self.seed = num_data, float(temperature), int(seed)
        self.likelihood = read_likelihood(likelihood)
        self._model = [unwrapped(model)]  # in a list, so that it is not a part of q
        self.families = families(self.model, num_data, structure, prior_precision)
        self.draw, self.observed = 0, 0  # the number of the present draw, and of observations of the curvature
        self.memory = FORGOTTEN
        self.sampling, self.pinned, self.holds_draw = False, False, False
        self.refresh_()
        if posterior_of(self.model) is not None:
            raise InputError("The network has a posterior already; use it, or take it away with its release().")
        self._hooks = Hooks(self)
        self.register_load_state_dict_post_hook(_after_loading)

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self._model[0]

    @property
    def names(self) -> list[str]:
        """The names of the parameters that q is over."""
        return [name for family in self.each() for name in family.names]

    @property
    def mean(self) -> dict[str, Tensor]:
        """The means by name; the network's own parameters hold them in evaluation."""
        return self._named([family.mean for family in self.each()])

    @property
    def variance(self) -> dict[str, Tensor]:
        """The marginal variances by name."""
        return self._named([family.variances() for family in self.each()])

    @property
    def scales(self) -> Scales:
        """N' = N/T with the seed and the number of the present draw."""
        return Scales(self.num_data / self.temperature, self.seed, self.draw)

    def each(self) -> Iterator[Family]:
        """Iterate over the families."""
        return iter(self.families)  # type: ignore[arg-type]

    @property
    def parameters_of_network(self) -> list[nn.Parameter]:
        """The network's parameters that q is over, in the order of `names`."""
        return [p for family in self.each() for p in family.parameters_of_network]

    @property
    def prior(self) -> dict[str, float]:
        """The precision of the prior a datum, δ = λ/N, by name."""
        return {name: delta for f in self.each() for name, delta in zip(f.names, f.prior, strict=True)}

    def _named(self, lists: list[list[Tensor]]) -> dict[str, Tensor]:
        return dict(zip(self.names, (tensor for part in lists for tensor in part), strict=True))

    def __repr__(self) -> str:
        """Name the families with their numbers of weights."""
        counts = {type(f).__name__: sum(m.numel() for m in f.mean) for f in self.each()}
        sizes = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
        return f"NetworkGaussian({sizes}, num_data={self.num_data}, temperature={self.temperature:g})"

    # what the parameters of the network hold

    def mean_(self) -> None:
        """Write the mean into the parameters of the network, where they hold a draw."""
        if self.holds_draw:
            with torch.no_grad():
                for family in self.each():
                    family.mean_()
            self.holds_draw = False

    def draw_(self) -> None:
        """Write the present draw into the parameters of the network; it is the same until the next step."""
        for family in self.each():
            family.draw_(self.scales)
        self.holds_draw = True

    @torch.compiler.disable
    def _switch(self, wanted: bool) -> None:
        """Write the draw or the mean, out of sight of a compiler."""
        with torch.no_grad():
            self.draw_() if wanted else self.mean_()

    def settle(self, training: bool) -> None:
        """Let the parameters hold a draw in training and the mean in evaluation; called before every forward pass.

        Args:
            training: the mode of the network.
        """
        wanted = training and self.sampling
        if not self.pinned and wanted != self.holds_draw:
            self._switch(wanted)

    @contextmanager
    def at_mean(self) -> Iterator[None]:
        """Hold the mean in the parameters, whatever the mode of the network, until the block ends."""
        before = self.pinned
        with torch.no_grad():
            self.mean_()
        self.pinned = True
        try:
            yield
        finally:
            self.pinned = before
            self.settle(self.model.training)

    @contextmanager
    def drawn(self, number: int) -> Iterator[None]:
        """Hold a draw for predictions in the parameters until the block ends; those of the training stay untouched.

        Args:
            number: of the draw, from 0; the same number is the same draw as long as q does not move.
        """
        before = self.pinned
        with torch.no_grad():
            for family in self.each():
                family.draw_(Scales(self.num_data / self.temperature, seed_of(self.seed, 0, "predictions"), number))
        self.pinned = self.holds_draw = True
        try:
            yield
        finally:
            with torch.no_grad():
                self.mean_()
            self.pinned = before
            self.settle(self.model.training)

    def next_draw_(self) -> None:
        """Go on to the next draw, and write it into the parameters if the network is in training."""
        self.draw += 1
        if self.model.training and self.sampling:
            self.draw_()
        else:
            self.holds_draw = True
            self.mean_()

    # the curvature

    def observe_(self, gradients: Sequence[Tensor | None], scale: float, rate: float) -> None:
        """Observe the curvature scale · g gᵀ: its running mean moves, and the covariance with it at the next step.

        The mean is over all observations until it is a mean over the last 1/rate.  Processes that train together share
        what each observed.

        Args:
            gradients: g, in the order of `names`, or None where a parameter was not used.
            scale: the number of independent labels in g.
            rate: the smallest rate of the running mean.
        """
        self.observed += 1
        rate, at = max(rate, 1 / self.observed), 0
        with torch.no_grad():
            for family in self.each():
                family.observe_(gradients[at : at + len(family.names)], scale, rate)
                at += len(family.names)
                average_over_ranks_(family.observations())

    def refresh_(self) -> None:
        """Make the covariance from the running curvature and the start, which is forgotten by and by."""
        weight = math.exp(-self.observed / self.memory) if self.memory else 0.0
        with torch.no_grad():
            for family in self.each():
                family.refresh_(self.scales, weight)

    def temper_(self, temperature: float) -> None:
        """Change the temperature, and with it the width of q, without any training: V is proportional to it.

        Args:
            temperature: the new one.

        Raises:
            InputError: if it is not larger than 0 and finite.
        """
        if not 0 < temperature < math.inf:
            raise InputError(f"temperature is larger than 0 and finite; got {temperature}.")
        self.temperature = float(temperature)
        self.refresh_()

    # predictions

    def predict(self, inputs: Any, samples: int = 16, read: Read | None = None) -> Tensor:
        """Predict by the average over draws of the weights.

        Args:
            inputs: a batch as the network takes it: a tensor, a tuple of arguments or a dict of keywords.
            samples: the number of draws.
            read: where the tensor of outputs is in what the network returns; that itself by default.

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

    def release(self) -> None:
        """Take the hooks off the network, whose parameters then hold the mean like those of any other network."""
        self.sampling = self.pinned = False
        self.settle(False)
        self._hooks.remove()

    # what q says

    def kl(self) -> Tensor:
        """Return KL(q‖N(0, λ⁻¹)) in nats, a number, at the temperature that V has."""
        total = []
        for family in self.each():
            for mean, variance, delta in zip(family.mean, family.variances(), family.prior, strict=True):
                precision = delta * self.num_data
                squares = (precision * (mean.square() + variance)).sum()
                total.append(0.5 * (squares - mean.numel() * (1 + math.log(precision))))
            total.append(-0.5 * family.log_det())
        return torch.stack(total).sum()

    def divergence(self, moves: list[list[Tensor]]) -> Tensor:
        """Return the Kullback-Leibler divergence of a move of the mean, ½ dmᵀV⁻¹dm/N', in nats a datum.

        Args:
            moves: dm, a list a family.

        Returns:
            A number.
        """
        norms = [n for f, dm in zip(self.each(), moves, strict=True) for n in torch._foreach_norm(f.whitened(dm))]
        return 0.5 * torch.stack([n.to(norms[0]) for n in norms]).square().sum() / self.scales.num_data

    def as_gaussian(self) -> DiagonalGaussian:
        """Return the marginals of q as a `DiagonalGaussian` over the flattened weights, in the order of `names`.

        One wants it for small networks, for `torchngvi.examine` and all that a posterior of the library can do.

        Returns:
            The posterior, of dimension D, the number of weights.
        """
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

    def get_extra_state(self) -> dict[str, float | int]:
        """Return the integers and the temperature that a checkpoint holds."""
        return {
            "draw": self.draw,
            "observed": self.observed,
            "seed": self.seed,
            "temperature": self.temperature,
        }

    def set_extra_state(self, state: dict[str, float | int]) -> None:
        """Take them up again.

        Args:
            state: what `get_extra_state` returned.
        """
        self.draw, self.observed, self.seed = int(state["draw"]), int(state["observed"]), int(state["seed"])
        self.temperature = float(state["temperature"])


def _after_loading(q: NetworkGaussian, keys: Any) -> None:
    """Let the network hold the mean that was loaded."""
    q.holds_draw = True
    q.mean_()


def network(
    model: nn.Module,
    num_data: int,
    structure: Structure = "diagonal",
    prior_precision: PriorPrecision = 1.0,
    temperature: float = 1.0,
    likelihood: str | OutputLikelihood = "categorical",
    seed: int = 0,
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
            ``{"head.*": "kronecker", "*": "diagonal"}``.
        prior_precision: λ of the prior N(0, λ⁻¹), one number or by patterns of names.
        temperature: T, which tempers likelihood and prior alike; 1 is the posterior, less is narrower.
            :func:`calibrate` chooses it afterwards on validation data.
        likelihood: what the outputs say of the labels: "categorical", "bernoulli", ``networks.Gaussian(scale)`` or an
            `OutputLikelihood`.
        seed: of the noise; the same in all processes that train together.

    Returns:
        The posterior.

    Raises:
        InputError: for arguments that cannot be used, each with its sentence.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> q = network(model, num_data=1000)
    >>> q
    NetworkGaussian(67 Diagonal, num_data=1000, temperature=1)
    >>> q.predict(torch.zeros(2, 4)).shape
    torch.Size([2, 3])
    """
    return NetworkGaussian(model, num_data, structure, prior_precision, temperature, likelihood, seed)
