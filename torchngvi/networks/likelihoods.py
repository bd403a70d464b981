"""What the outputs of a network say of the labels: sampled labels for the curvature, log densities, predictions."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Integral, Real

import torch
import torch.nn.functional as F
from torch import Tensor

from torchngvi.arguments import read_tensor, shown
from torchngvi.errors import InputError


class OutputLikelihood(ABC):
    """p(y | output) for labels that are independent given the outputs of the network.

    Write a class with the four abstract methods for labels that are neither classes nor numbers with
    Gaussian noise.  What its methods take is `output`, a tensor that the network returned, with its graph in training;
    `y`, the labels, (*labels); and a `generator` for labels that are drawn.

    Attributes:
        factor: of the scale of the noise in predictions, which :func:`torchngvi.calibrate` chooses; 1 in training.
        factors: those that it tries; 1 alone where there is no noise to scale.
    """

    factor = 1.0
    factors: tuple[float, ...] = (1.0,)

    def doubt(self) -> str | None:
        """Return a sentence about what the training seems to have missed, or None; `calibrate` warns with it."""
        return None

    @abstractmethod
    def sampled_losses(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw a label for each output from the network's own prediction and return -log p of it, one loss a label."""

    def curvature_terms(self, output: Tensor) -> Tensor | None:
        """Return K terms a label, (*labels, K), with which none is drawn; None, the default, where labels have to be.

        Their gradients g have Σₖ gₖgₖᵀ = E[s sᵀ], s the gradient of -log p of a predicted label.
        """
        return None

    def weigh(self, output: Tensor, y: Tensor | None = None) -> Tensor | None:
        """Return the weights of labels in the loss, (*labels), or, without labels, those expected at the outputs.

        The loss is a mean with these weights; None, the default, where it is one without.
        """
        return None

    def as_classes(self, output: Tensor, is_gradient: bool = False) -> Tensor | None:
        """Return the outputs as logits of classes, (*labels, classes), or a gradient at the outputs as one at these.

        -log p(y | output) is then -log softmax at the class y; None, the default, for other likelihoods.
        """
        return None

    @abstractmethod
    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        """Return log p(y | output) of every label, (*draws, *labels), where the outputs are (*draws, *labels, ...)."""

    @abstractmethod
    def moments(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is predicted from one draw of the weights: the mean of the label and its uncertainty given them.

        That uncertainty, which more data do not remove, is an entropy in nats for classes, a variance for numbers.
        """

    @abstractmethod
    def total(self, means: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Split the uncertainty of a prediction, from what `moments` returned for S draws, (S, ...), into two parts.

        The first, epistemic part is what more data would remove; the other one is the aleatoric part.
        """


class _Classes(OutputLikelihood):
    """Labels that are classes, whose uncertainty is an entropy, in nats."""

    def _entropy(self, p: Tensor) -> Tensor:
        return torch.special.entr(p).sum(-1)

    def total(self, means: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mutual information of label and weights, and the mean entropy; see the base class."""
        aleatoric = given.mean(0)
        return (self._entropy(means.mean(0)) - aleatoric).clamp_min(0), aleatoric


class Categorical(_Classes):
    """Classes with the probabilities softmax(output): the loss is the mean cross-entropy.

    With weights w of the classes the loss is the weighted mean Σᵢ w(yᵢ) lᵢ/Σᵢ w(yᵢ) of l = -log softmax(output)(y), as
    ``torch.nn.functional.cross_entropy(output, y, weight=w)`` has it.  Its minimum is softmax(output) = p with
    pₖ ∝ wₖ πₖ, π the frequencies of the classes in the data, so that a label that p predicts has the frequencies
    πₖ = (pₖ/wₖ)/Σⱼ pⱼ/wⱼ and the expected weight w̄ = 1/Σⱼ pⱼ/wⱼ.  The curvature is the Gauss-Newton matrix of that
    loss, Σᵢ w̄ᵢ Jᵢᵀ(diag pᵢ - pᵢpᵢᵀ)Jᵢ/Σᵢ w̄ᵢ.  Predictions are p itself: those of data in which each class were wₖ
    times as frequent; `calibrate` minimises the weighted mean.

    Args:
        class_dim: the dimension of the output that holds the classes; -1, the last, or 1 as in
            :func:`torch.nn.functional.cross_entropy` for images of labels.
        weights: of the classes in the loss, each larger than 0; None where all labels weigh the same.

    Raises:
        InputError: if `class_dim` is no integer, or the weights are no vector of positive numbers; in use, if the
            outputs have another number of classes.

    >>> mean, entropy = Categorical().moments(torch.zeros(1, 2))
    >>> mean.tolist(), round(entropy.item(), 4)
    ([[0.5, 0.5]], 0.6931)
    >>> Categorical(weights=[1.0, 9.0]).weigh(torch.zeros(1, 2))  # 1/(½ + ½/9)
    tensor([1.8000])
    """

    def __init__(self, class_dim: int = -1, weights: Tensor | Sequence[float] | None = None) -> None:
        if isinstance(class_dim, bool) or not isinstance(class_dim, Integral):
            raise InputError(f"class_dim is the dimension of the output that holds the classes; got {class_dim!r}.")
        self.class_dim: int = int(class_dim)
        self.weights: Tensor | None = None
        if weights is not None:
            found = read_tensor("weights", weights, "are those of the classes in the loss").detach()
            if found.ndim != 1 or not (found > 0).all():
                raise InputError(
                    f"weights are those of the classes in the loss, one for each, larger than 0; got {shown(weights)}."
                )
            self.weights = found

    def _rows(self, output: Tensor, draws: int = 0) -> Tensor:
        """The outputs with the classes last; of their dimensions so many first are draws."""
        dim = self.class_dim if self.class_dim < 0 else self.class_dim + draws
        if output.ndim < 2 or not -output.ndim <= dim < output.ndim or output.shape[dim] < 2:
            raise InputError(
                f"outputs of classes are (labels, classes) with two classes or more; got {tuple(output.shape)}, with "
                f"the classes in dimension {self.class_dim}. For one number a label say "
                'likelihood="bernoulli" or likelihood=torchngvi.networks.Gaussian(scale).'
            )
        if self.weights is not None and len(self.weights) != output.shape[dim]:
            raise InputError(
                f"weights has one weight for each class, and the outputs have {output.shape[dim]} classes; got "
                f"{len(self.weights)} weights."
            )
        return output.movedim(dim, -1)

    def as_classes(self, output: Tensor, is_gradient: bool = False) -> Tensor:
        """Return the outputs with the classes last; see the base class."""
        return self._rows(output)

    def weigh(self, output: Tensor, y: Tensor | None = None) -> Tensor | None:
        """Return w(y), or the expected weight 1/Σₖ pₖ/wₖ; see the base class."""
        if self.weights is None:
            return None
        if y is not None:
            return self.weights.to(y.device)[y.long()]
        p = _full(self._rows(output.detach())).softmax(-1)
        return 1 / (p / self.weights.to(p)).sum(-1)

    def sampled_losses(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw classes by the largest of logits with Gumbel noise; weights are √(w̄/mean w̄); see the base class."""
        logits = _full(self._rows(output))
        noise = torch.empty_like(logits, requires_grad=False).exponential_(generator=generator)
        labels = (logits.detach() - noise.log()).argmax(-1)
        losses, weights = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0], self.weigh(output)
        return losses if weights is None else losses * (weights / weights.mean()).sqrt()

    def curvature_terms(self, output: Tensor) -> Tensor:
        """Return -√pₖ log pₖ of each class, times √w̄ if weighted, with √pₖ and √w̄ held; see the base class."""
        logits, weights = _full(self._rows(output)).log_softmax(-1), self.weigh(output)
        terms = -(0.5 * logits.detach()).exp() * logits
        return terms if weights is None else terms * weights.sqrt()[..., None]

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        """Return log softmax at the labels, without weights; see the base class."""
        logits = self._rows(output, max(output.ndim - 1 - getattr(y, "ndim", 0), 0)).log_softmax(-1)
        classes = logits.shape[-1]
        _check_labels(
            logits.shape[:-1],
            y,
            "They are taken without the classes, which are last; where they come second, as in images of labels, say "
            "likelihood=torchngvi.networks.Categorical(class_dim=1), and for labels that are numbers Gaussian(scale).",
        )
        if y.is_floating_point() or y.is_complex():
            raise InputError(
                f"labels are classes, integers from 0 to {classes - 1}; got {y.dtype}. Say y.long(), or "
                "Gaussian(scale)."
            )
        wrong = (y < 0) | (y >= classes)
        if wrong.any():
            raise InputError(
                f"labels are classes from 0 to {classes - 1}; got {y[wrong][0].item()}. Leave out those that the loss "
                "leaves out: the labels y[mask], with read=lambda logits: logits[mask] for their outputs."
            )
        return logits.gather(-1, y.long().expand(logits.shape[:-1])[..., None])[..., 0]

    def moments(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities, with the classes last, and their entropy; see the base class."""
        p = self._rows(output).log_softmax(-1).exp()
        return p, self._entropy(p)


class Bernoulli(_Classes):
    """Labels 0 and 1 with P(1) = sigmoid(output): the loss is the mean binary cross-entropy with logits.

    >>> Bernoulli().moments(torch.zeros(1))[0].item()
    0.5
    """

    def as_classes(self, output: Tensor, is_gradient: bool = False) -> Tensor:
        """Return the logits of 1 and 0, of which the second is 0; see the base class."""
        return torch.stack([output, -output if is_gradient else torch.zeros_like(output)], -1)

    def sampled_losses(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw labels by comparing with uniform noise; see the base class."""
        logits = _full(output)
        uniform = torch.empty_like(logits, requires_grad=False).uniform_(generator=generator)
        labels = (uniform < logits.detach().sigmoid()).to(logits)
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def curvature_terms(self, output: Tensor) -> Tensor:
        """Return the logit times √(p (1 - p)), held; see the base class."""
        logits = _full(output)
        p = logits.detach().sigmoid()
        return ((p * (1 - p)).sqrt() * logits)[..., None]

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        """Return -softplus(-(2y - 1) output); see the base class."""
        _check_labels(output.shape, y)
        wrong = (y < 0) | (y > 1)
        if wrong.any():
            raise InputError(
                f"labels of a Bernoulli likelihood are 0 and 1; got {y[wrong][0].item()}. Say (y > 0).float() for "
                "labels -1 and 1, and Categorical() for more than two classes."
            )
        return F.logsigmoid((2 * y.to(output) - 1) * output)

    def moments(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return P(1) and its entropy; see the base class."""
        p = output.sigmoid()
        return p, self._entropy(p)

    def _entropy(self, p: Tensor) -> Tensor:
        return super()._entropy(torch.stack([p, 1 - p], -1))


class _Normal(OutputLikelihood):
    """Numbers with Gaussian noise, whose uncertainty is a variance."""

    factors = tuple(2.0 ** (k / 4) for k in range(-8, 25))

    @abstractmethod
    def _parts(self, output: Tensor, factor: float = 1.0, held: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Means, standard deviations and their logarithms; a scale that is learned is a constant where it is held."""

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a training step, the mean of -log p(y | output) without its constant ½ log 2π."""
        mean, scale, log_scale = self._parts(output, held=False)
        _check_labels(torch.Size([1, *mean.shape]), y)
        return (0.5 * ((y - mean) / scale).square() + log_scale).mean()

    def sampled_losses(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the label mean + scale ε; see the base class."""
        mean, scale, _ = self._parts(output)
        noise = torch.empty_like(mean, requires_grad=False).normal_(generator=generator)
        return 0.5 * ((mean.detach() + scale.detach() * noise - mean) / scale).square()

    def log_prob(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the normal log density; see the base class."""
        mean, scale, log_scale = self._parts(output, self.factor)
        _check_labels(mean.shape, y)
        return -0.5 * ((y - mean) / scale).square() - log_scale - 0.5 * math.log(2 * math.pi)

    def moments(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means and the variance of the noise; see the base class."""
        mean, scale, _ = self._parts(output, self.factor)
        return mean, scale.square().expand_as(mean)

    def total(self, means: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return the variance of the means, and the mean variance; see the base class."""
        return means.var(0, correction=0), given.mean(0)


class Gaussian(_Normal):
    """Numbers with Gaussian noise about the output: the loss is the mean of ½(y - output)²/scale² + log scale.

    `loss` is that loss.  `mse_loss` is another one, of the scale √½: under it the prior counts
    1/(2 scale²) times as much as it says, and a scale that is to be learned stays where it began.

    Args:
        scale: the standard deviation of the noise, in the units of the labels: a positive number, or a function
            without arguments that returns one, for a noise that is learned with the weights
            (``lambda: log_scale.exp()``).  Learned from the training data it is what draws of the weights leave there,
            too small where they fit the noise and too large where they are wide: `calibrate` multiplies it by a factor
            for predictions.

    Raises:
        InputError: if the scale is a number that is not positive; in use, if the function returns such a number.

    >>> Gaussian(0.5).moments(torch.zeros(1))[1].item()
    0.25
    >>> Gaussian(0.5).loss(torch.zeros(2, 1), torch.ones(2, 1)).item()  # 2 + log ½
    1.3068528175354004
    """

    def __init__(self, scale: float | Callable[[], Tensor]) -> None:
        one = isinstance(scale, Real) or (isinstance(scale, Tensor) and scale.numel() == 1)
        if not callable(scale) and (not one or isinstance(scale, bool) or not scale > 0) or isinstance(scale, type):
            raise InputError(f"scale is the standard deviation of the noise, larger than 0; got {shown(scale)}.")
        self.scale = scale
        self._first: Tensor | None = None  # a scale that is learned, where the training began

    def doubt(self) -> str | None:
        """Say so where a scale that is to be learned has not moved in the training; see the base class."""
        if self._first is None or not callable(self.scale):
            return None
        scale = self._given().detach()
        if not torch.equal(scale.to(self._first), self._first):
            return None
        return (
            "The scale of the noise is to be learned and is what it was when the training began, "
            f"{float(scale.mean()):.3g}: the loss has no part for it, as mse_loss has none, or no optimizer has it. "
            "Train with networks.Gaussian(scale).loss(output, y), or give the scale as a number."
        )

    def _given(self) -> Tensor:
        """The scale that the function returns now; a tensor is not looked at, as that would wait for a device."""
        assert callable(self.scale)
        now = self.scale()
        if isinstance(now, Tensor):
            return now
        try:
            found = torch.as_tensor(now)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            found = torch.zeros((), device="cpu")
        if not (found > 0).all():
            raise InputError(f"The function scale returns a standard deviation, larger than 0; got {now!r}.")
        return found

    def _parts(self, output: Tensor, factor: float = 1.0, held: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(output, Tensor):
            raise InputError(f"loss takes the outputs of the network as one tensor; got a {type(output).__name__}.")
        mean = _full(output)
        scale = self._given().to(mean) if callable(self.scale) else mean.new_full((), self.scale)
        scale = factor * (scale.detach() if held else scale)
        return mean, scale, scale.log()

    def sampled_losses(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the label output + scale ε; see the base class."""
        if self._first is None and callable(self.scale):
            given = self._given()
            self._first = given.detach().clone() if given.requires_grad else None
        return super().sampled_losses(output, generator)

    def curvature_terms(self, output: Tensor) -> Tensor:
        """Return output/scale; see the base class."""
        mean, scale, _ = self._parts(output)
        return (mean / scale)[..., None]


class HeteroscedasticGaussian(_Normal):
    """Numbers with Gaussian noise whose standard deviation is an output, too: means, and logarithms of deviations.

    The loss is the mean of ½(y - μ)²/s² + log s, with (μ, log s) the two halves of the last dimension of the output
    (Nix and Weigend 1994): a head of two columns for one number a row.  It is for noise that depends on the input.

    >>> noise = HeteroscedasticGaussian()
    >>> output = torch.tensor([[1.0, 0.0], [2.0, math.log(0.5)]])  # means 1 and 2, standard deviations 1 and ½
    >>> noise.moments(output)[1].tolist()
    [[1.0], [0.25]]
    >>> noise.loss(output, torch.tensor([[1.0], [2.0]])).item()  # half of log ½
    -0.3465735912322998
    """

    def _parts(self, output: Tensor, factor: float = 1.0, held: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[-1] % 2:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                "outputs of HeteroscedasticGaussian are the means and then the logarithms of the standard deviations, "
                f"(rows, 2) for one number a row; got {got}."
            )
        mean, log_scale = _full(output).chunk(2, -1)
        log_scale = log_scale + math.log(factor)
        return mean, log_scale.exp(), log_scale

    def sampled_losses(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """Draw the label μ + s ε; see the base class."""
        return super().sampled_losses(output, generator) + self._parts(output)[2]

    def curvature_terms(self, output: Tensor) -> Tensor:
        """Return μ/s, with s held, and √2 log s: the Fisher information is diag(1/s², 2); see the base class."""
        mean, scale, log_scale = self._parts(output)
        return torch.stack([mean / scale.detach(), math.sqrt(2) * log_scale], -1)


def _full(output: Tensor) -> Tensor:
    """In float32 at least."""
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _check_labels(
    shape: torch.Size, y: Tensor, hint: str = "Use y[:, None] for one number a row, or squeeze the outputs."
) -> None:
    """Refuse labels that would be broadcast against outputs of another shape, into pairs of no meaning."""
    if not isinstance(y, Tensor):
        raise InputError(f"labels are a tensor, with one label for each output; got a {type(y).__name__}.")
    if y.ndim == 0 or y.ndim > len(shape) or y.shape != shape[len(shape) - y.ndim :] or len(shape) - y.ndim > 1:
        raise InputError(
            f"labels must have the shape of the outputs of the network, one for each; got labels {tuple(y.shape)} for "
            f"outputs {tuple(shape)}, draws first. {hint}"
        )


NAMED = {"categorical": Categorical, "bernoulli": Bernoulli}


def read_likelihood(given: str | OutputLikelihood) -> OutputLikelihood:
    """Look up a likelihood by its name."""
    if isinstance(given, OutputLikelihood):
        return copy.copy(given)
    if isinstance(given, str) and given == "gaussian":
        raise InputError('likelihood="gaussian" needs the scale of the noise; say torchngvi.networks.Gaussian(scale).')
    if not isinstance(given, str) or given not in NAMED:
        raise InputError(
            f'likelihood is "categorical", "bernoulli", torchngvi.networks.Gaussian(scale) or one of your own; got '
            f"{given!r}."
        )
    return NAMED[given]()
