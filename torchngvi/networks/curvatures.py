"""How the curvature of the loss is observed: where in a step an estimator looks, and at what."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchngvi.arguments import read_number, read_size
from torchngvi.distributed import average_over_ranks_, rank
from torchngvi.errors import InputError, PairError
from torchngvi.networks.families import Diagonal, all_finite, generator, zero_where_
from torchngvi.networks.laplace import check_function, gradients_of_labels, read_from
from torchngvi.networks.posterior import NetworkGaussian
from torchngvi.networks.weights import warn_caller

__all__ = ["Curvature", "ExampleGradients", "GradientNoise", "Reparametrized", "SampledLabels"]
__path__: list[str] = []  # so that the paths of torchngvi.renamed below this one are found


class Curvature:
    """An estimator of the expected curvature of the loss a datum; each sees the outputs and the gradients of a step.

    One of your own overrides `after_forward` or `before_step`, and calls `observe_` of q, the posterior.

    Attributes:
        every: steps from one observation to the next.
        labels: in the outputs that were observed last, or None.
    """

    every = 1
    labels: int | None = None

    def begin(self, q: NetworkGaussian) -> None:
        """Prepare q for this estimator, once, when the optimizer is attached; a `PairError` refuses its families."""

    def after_forward(self, q: NetworkGaussian, output: Any) -> None:
        """Look at what the network has returned in training, with its graph, while it holds the draw of this step."""

    def before_step(self, q: NetworkGaussian, gradients: Mapping[str, Tensor]) -> None:
        """Look at the gradients of the loss at the draw, by name, before the optimizer steps.

        They are unscaled and finite, and without the prior's part.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what the estimator remembers from step to step, apart from q: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up again what `state_dict` returned."""


class SampledLabels(Curvature):
    """The Gauss-Newton curvature by one more backward pass, every few steps, on labels drawn from the predictions.

    With B labels drawn from p(y | output) and ĝ the gradient of their mean loss, E[B ĝĝᵀ] is the mean generalised
    Gauss-Newton matrix of the batch, the Fisher information of the network, since the scores of different labels are
    uncorrelated.  It needs no gradient of single data and does not depend on the labels of the user, nor on clipping
    or scaling of the user's gradients.  It is the default: at the same cost its error is a tenth of that of the
    reparametrised estimator of IVON.

    Args:
        every: forward passes in training from one observation to the next, 1 or more.
        output: where the logits or means are in what the network returns; by default the output itself, or its entry
            ``logits``.

    Raises:
        InputError: if `every` is no integer, or less than 1, or `output` is no function.

    >>> SampledLabels(every=5).every
    5
    """

    def __init__(self, every: int = 10, output: Callable[[Any], Tensor] | None = None) -> None:
        self.every = read_size("every", every, "is the number of steps from one observation to the next")
        self.output = None if output is None else check_function(output, "output")
        self._warned = False

    def after_forward(self, q: NetworkGaussian, output: Any) -> None:
        """Draw labels and observe the square of their gradient, on steps that want it; see the base class."""
        if q.draw % self.every or not torch.is_grad_enabled():
            return
        outputs = read_from(output, self.output, "output", "SampledLabels(output=lambda returned: returned[0])")
        if not outputs.requires_grad:
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(outputs):
            raise InputError(
                "The network is called under a transform of torch.func (grad, vmap or another one) in training, within "
                "which SampledLabels cannot pass back through its outputs. Call loss.backward() outside of it; or take "
                "curvature=GradientNoise(batch_size), which needs the gradients alone; or call the network within "
                "`with q.at_mean():` or after model.eval(), where it holds the mean."
            )
        labels = generator(outputs.device, q.seed, q.draw, f"labels of rank {rank()}")
        with torch.autocast(outputs.device.type, enabled=False):
            losses = q.likelihood.sampled_losses(outputs, labels)
        self.labels = losses.numel()
        if self.labels > q.num_data and not self._warned:
            self._warned = True
            warn_caller(
                f"A batch has {self.labels:,} labels, more than num_data={q.num_data:,}, so that the prior counts too "
                "much and the posterior is too wide. num_data is the number of labels in the training data, not of "
                "batches: every token counts, and every pixel of an image of labels."
            )
        gradients, count = gradients_of_labels(q, losses, outputs.dtype)
        q.observe_([gradients.get(name) for name in q.names], count, 0.01)  # a running mean of 100 observations

    def before_step(self, q: NetworkGaussian, gradients: Mapping[str, Tensor]) -> None:
        """Refuse steps whose outputs were never seen; see the base class."""
        if gradients and not q.observed and q.draw % self.every == 0:
            raise InputError(
                "SampledLabels has not seen the outputs of the network in training, which its forward hook looks at: "
                "call the network that q was made of, model(x), in training mode, and not model.forward(x) or a part "
                "of it; or make q of the module that is called. A function output= must keep the graph, "
                "which detach() and argmax() cut."
            )


class GradientNoise(Curvature):
    """The empirical Fisher from the user's own gradients: ĥ = B (g - ḡ)²/(1 + (1 - β)/(1 + β)).

    ḡ is the running mean of the gradients before this step, and the divisor is its share in the variance for white
    noise.  It costs no pass, and is the empirical Fisher information instead of the Fisher information: where the data
    are fitted well it is too small, and q too wide.  Gradient clipping changes it.

    Args:
        batch_size: the number B of independent labels in the mean loss of a step.
        beta: β of the running mean, at least 0 and less than 1.

    Raises:
        InputError: for a batch size less than 1 or another beta.

    >>> GradientNoise(batch_size=32).beta
    0.9
    """

    def __init__(self, batch_size: int, beta: float = 0.9) -> None:
        what = "is the number of labels in the loss of a step"
        self.batch_size = read_number("batch_size", batch_size, what, at_least=1)
        self.beta = read_number("beta", beta, at_least=0, below=1)
        self.labels = int(self.batch_size)
        self.running: dict[str, Tensor] = {}

    def begin(self, q: NetworkGaussian) -> None:
        """Look whether the mean gradient is enough for q; see the base class."""
        if any(family.single for family in q.each()):
            raise PairError(
                "GradientNoise observes the gradient of the mean loss, and the dense family of q needs those of single "
                "labels. Use SampledLabels, or another structure."
            )

    def before_step(self, q: NetworkGaussian, gradients: Mapping[str, Tensor]) -> None:
        """Observe the squared distance from the running mean; see the base class."""
        means = {name: q.mean[name] for name in q.trained}
        found = {name: gradients[name].to(m) if name in gradients else torch.zeros_like(m) for name, m in means.items()}
        noise = {name: found[name] - mean for name, mean in self.running.items() if name in found}
        if noise:
            inflated = 1 + (1 - self.beta) / (1 + self.beta)
            q.observe_([noise.get(name) for name in q.names], self.batch_size / inflated, 0.001)  # of 1,000 steps
        for name, g in found.items():  # the first gradient only starts the mean
            self.running[name] = self.running[name].lerp_(g, 1 - self.beta) if name in noise else g.clone()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the running means by name."""
        return dict(self.running)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take running means up again; see the base class."""
        self.running = {name: torch.as_tensor(g).clone() for name, g in state.items()}


class OfSingleWeights(Curvature):
    """An estimator of the diagonal alone, whose running curvature begins at the start, as published steps have it."""

    def __init__(self, rate: float) -> None:
        self.rate = read_number("rate", rate, above=0, at_most=1)

    def begin(self, q: NetworkGaussian) -> None:
        """Let the curvature begin at its start; see the base class."""
        for family in q.each():
            if not isinstance(family, Diagonal):
                raise PairError(
                    f"{type(self).__name__} observes the curvature of single weights; q has a {type(family).__name__} "
                    "family. Use SampledLabels, or structure='diagonal'."
                )
            if not q.observed:
                family.begin_()


class ExampleGradients(OfSingleWeights):
    """The empirical Fisher information by the gradients of single examples, ĥ = Σᵢ gᵢ²/B, with a rate of its own.

    It is there to compare with VOGN (Khan et al. 2018; Osawa et al. 2019).  It needs B gradients of the size of the
    network at once, and networks whose examples do not meet, hence no batch normalisation.  `backward` takes the
    losses of the examples in the place of ``loss.backward()``.

    Args:
        rate: β of h ← (1 - β)h + βĥ, larger than 0 and at most 1, otherwise an `InputError`.

    >>> ExampleGradients(0.01).rate
    0.01
    """

    def __init__(self, rate: float = 1e-3) -> None:
        super().__init__(rate)
        self.squares: dict[str, Tensor] = {}

    def backward(self, q: NetworkGaussian, losses: Tensor) -> None:
        """Add the gradient of the mean loss to the parameters' gradients, and keep the mean of the squares.

        Args:
            q: the posterior.
            losses: one a row, with their graph, (B,); an `InputError` refuses others.
        """
        if not isinstance(losses, Tensor) or not losses.requires_grad:
            raise InputError(
                "losses are those of the single examples, with the graph of the outputs; got a "
                f'{type(losses).__name__} without a graph. Compute them with reduction="none", where gradients are '
                "recorded."
            )
        if losses.ndim != 1:
            raise InputError(
                f"losses are those of the single examples, (B,); got the shape {tuple(losses.shape)}. Compute them "
                'with reduction="none".'
            )
        trained = q.trained
        ones = torch.eye(len(losses), device="cpu").to(losses)
        each = torch.autograd.grad(losses, list(trained.values()), ones, is_grads_batched=True, materialize_grads=True)
        gradients, squares = [g.mean(0) for g in each], [g.square().mean(0) for g in each]
        average_over_ranks_(gradients + squares)
        for p, g in zip(trained.values(), gradients, strict=True):
            p.grad = g if p.grad is None else p.grad + g
        self.squares = dict(zip(trained, squares, strict=True))

    def before_step(self, q: NetworkGaussian, gradients: Mapping[str, Tensor]) -> None:
        """Move every curvature towards the squares, if `backward` was called; see the base class."""
        if not self.squares:
            raise InputError(
                "ExampleGradients needs the losses of single examples; call optimizer.backward(losses) in the place of "
                "loss.backward()."
            )
        squares = list(self.squares.values())
        good = all_finite(squares)
        zero_where_(squares, ~good)
        for family in q.each():
            each = [(self.squares.get(name), m) for name, m in zip(family.names, family.mean, strict=True)]
            family.absorb_([None if h is None else h.to(m) for h, m in each], good.to(squares[0]) * self.rate)
            family.refresh_()
        self.squares = {}
        q.observed += 1


class Reparametrized(OfSingleWeights):
    """The diagonal of the expected Hessian from the gradient at the draw alone, ĥ = g ε/σ (Price's theorem).

    It is unbiased and costs nothing, and its noise in one batch is about √(N/B) times the curvature, so that only an
    average over very many steps says anything.  It is there to compare with IVON (Shen et al. 2024), whose update of
    the precision it takes: h' = (1 - ρ)h + ρĥ + ½ρ²(h - ĥ)²/(h + δ).

    Args:
        rate: ρ, larger than 0 and at most 1, otherwise an `InputError`; IVON's is 1 - β₂.

    >>> Reparametrized(1e-5).rate
    1e-05
    """

    def __init__(self, rate: float = 1e-5) -> None:
        super().__init__(rate)

    def begin(self, q: NetworkGaussian) -> None:
        """Let the curvature begin at its start, where there is noise to look at; see the base class."""
        if q.temperature == 0:
            raise InputError("Reparametrized sees the curvature by the noise of draws; the temperature 0 has none.")
        super().begin(q)

    def before_step(self, q: NetworkGaussian, gradients: Mapping[str, Tensor]) -> None:
        """Move every curvature by the retraction; see the base class."""
        for family in q.each():
            assert isinstance(family, Diagonal)
            noise = list(torch._foreach_div(family.noise(q.seed, q.draw), family.stddev))
            torch._foreach_mul_(noise, q.temperature**-0.5)  # σ is the one at the temperature 1
            each = zip(family.names, family.parameters_of_network, noise, strict=True)
            family.retract_(
                [e.mul_(gradients.get(name, 0.0)) if p.requires_grad else None for name, p, e in each], self.rate
            )
        q.observed += 1
