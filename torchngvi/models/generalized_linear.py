"""Generalised linear models with a Gaussian prior: ℓ(θ) = Σ_n w_n f(x_nᵀθ + o_n, y_n) - γ log p(θ).

Under q every predictor is one-dimensional, η_n ~ N(e_n, v_n) with e = X m + o and v_n = ‖Cᵀx_n‖²,
so E_q[ℓ], its gradient and its curvature are sums of scalar expectations (Bonnet, Price):

    g = Xᵀα + γΛ(m - m₀),   H = Xᵀ diag(β) X + γΛ,   α = ∂F/∂e,  β = 2 ∂F/∂v

(Kumar et al. 2025, section 3.6, with XᵀDX for the printed XDXᵀ.)
"""

import copy
from typing import Any, Self

import torch
from torch import Tensor

from torchngvi.errors import InputError, PairError
from torchngvi.interfaces import Frame, FullPrior, LinearTarget, Marginals, Posterior, Raw, Sites
from torchngvi.messages import BINOMIAL, SHORT, full_name, hint
from torchngvi.models import checks
from torchngvi.models.likelihoods import FAMILIES, Likelihood
from torchngvi.numerics import sparse
from torchngvi.numerics.arrays import settings_of, tensors_of, tracked
from torchngvi.numerics.linalg import multiply
from torchngvi.posteriors.shapes import fits

_WITH_PARAMETERS = {  # of which a word alone makes none
    "negative_binomial": "torchngvi.models.NegativeBinomial(dispersion)",
    "student_t": "torchngvi.models.StudentT(scale, dof)",
}


class GeneralizedLinear(LinearTarget):
    """Log joint of a generalised linear model with a Gaussian prior, for one posterior or a batch of them.

    Use it for logistic, probit, Poisson, negative binomial, Gaussian and robust regression: expectations under q
    are exact or by quadrature, so that no draws are needed and steps are found by trial.

    Args:
        X: the design, (N, D), or (*batch, N, D) with one data set a member, or (N, D) in sparse CSR
            storage, which is never written out and serves one posterior; here and below an array, or a
            table or a column of pandas that is numeric. Add a column of ones for an intercept.
        y: the targets, (N,) or (*batch, N). Two classes in any coding for the Bernoulli families: the
            larger value is the success, unless ``classes`` says otherwise.
        family: the likelihood, "bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian" (noise 1), for short
            "logistic", "probit", "poisson", "normal", or a `Likelihood` such as ``GaussianNoise(0.1)``,
            ``StudentT(1.0, dof=4)`` or ``NegativeBinomial(2.0)``.
        prior_precision: Λ of the prior N(prior_mean, Λ⁻¹) of the columns as they are, whatever their units;
            `torchngvi.models.standardize` has priors in the units of the data. A scalar, one a coefficient (D,), or a
            symmetric positive definite matrix (D, D). One diagonal a member of a batch is (*batch, D), or, where that
            would be a matrix, (*batch, 1, D).
        prior_mean: the mean of the prior, a scalar, (D,) or (*batch, D).
        weights: factors of the log likelihood of each row, (N,) or (*batch, N), not negative.
        offset: what is added to the linear predictor, (N,) or (*batch, N).
        temperature: γ, the weight of KL(q‖prior); 1 is the posterior, 0 variational optimisation:
            then L(q) = E_q[-log likelihood] is at least its minimum over θ, and q collapses there.
        classes: the two labels of a Bernoulli family, the success last. A part of the data need not hold both
            then, and all parts are coded alike; without them the labels of this y are the classes.

    Raises:
        InputError: if shapes do not fit, values are not finite, the family cannot produce the targets, labels are none
            of
            the classes, the prior precision is not positive (definite), or the temperature is negative.

    >>> model = GeneralizedLinear(torch.ones(4, 1), torch.tensor([0.0, 1.0, 1.0, 1.0]), prior_precision=1.0)
    >>> model.dim
    1
    """

    engine = "chunks"  # where the batch is large
    products = True

    @tracked
    def __init__(
        self,
        X: Any,
        y: Any,
        family: str | Likelihood = "bernoulli_logit",
        *,
        prior_precision: Any = 1.0,
        prior_mean: Any = 0.0,
        weights: Any = None,
        offset: Any = None,
        temperature: float = 1.0,
        classes: Any = None,
    ) -> None:
        self.X = checks.design(X)
        self.likelihood = _likelihood(family)
        self.y, self.coding = self._coded(checks.per_row("y", y, self.X), classes)
        self.weights = checks.row_weights(weights, self.y, self.X)
        self.offset = torch.zeros_like(self.y) if offset is None else checks.per_row("offset", offset, self.X)
        self.temperature = checks.temperature(temperature)
        batch = max(self.X.ndim - 2, self.y.ndim - 1)
        self.prior = checks.prior(prior_mean, prior_precision, self.dim, self.X, batch)
        self.num_data = self.X.shape[-2]  # N, of a mini-batch that of all the data
        self._given = checks.given(
            X=X, y=y, family=family, prior_precision=prior_precision, prior_mean=prior_mean, weights=weights,
            offset=offset, temperature=temperature, classes=classes,
        )  # fmt: skip

    def attached(self) -> Self:
        """Return the model with its tensors in the graph of what it was made of, for `torchngvi.solved.solve`."""
        if self._given is None:
            return self
        with checks.attached():
            return type(self)(**checks.apart(self._given))

    def __getstate__(self) -> dict[str, Any]:
        """All but the graph of what the model was made of: copies, and what is saved, have none."""
        return {**vars(self), "_given": None}

    def _coded(self, y: Tensor, classes: Any) -> tuple[Tensor, tuple[float, ...]]:
        """Targets in the likelihood's coding, and the classes that it codes."""
        if not self.likelihood.two_classes:
            if classes is None:
                return self.likelihood.checked(y), ()
            raise InputError(
                "classes= is for the Bernoulli families, whose targets are labels; got "
                f"{type(self.likelihood).__name__}. Leave it out."
            )
        if classes is None:
            coded, values = self.likelihood.checked(y), torch.stack(y.aminmax())
        else:
            values = checks.class_values(classes, y)
            if len(values) > 2:
                raise InputError(f"a Bernoulli family has two classes; got classes {values.tolist()}.")
            coded = (2 * checks.class_codes(y, values) - 1).to(y.dtype)
        labels = tuple(values.tolist())
        return coded, (0.0, 1.0) if labels == (-1.0, 1.0) else labels  # two ways to write failure and success

    @property
    def dim(self) -> int:
        """The number D of coefficients."""
        return self.X.shape[-1]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move and convert every tensor, with the arguments of ``torch.nn.Module.to``.

        Returns:
            A new model.
        """
        new = copy.copy(self)
        for name in ("X", "y", "weights", "offset"):
            setattr(new, name, getattr(self, name).to(*args, **kwargs))
        new.prior = type(self.prior)(*(tensor.to(*args, **kwargs) for tensor in self.prior))
        return new

    def minibatch(self, index: Any) -> Self:
        """The model on some of its rows, whose data term is multiplied by N/B.

        One rule: the packet of a mini-batch estimates the packet of all the data, prior included
        once.  The packets of a partition into equal parts have the full packet as their average.
        ``num_data`` stays N.  Values of two mini-batches cannot be compared, so that steps found by
        trial are refused: pass lr=.

        Args:
            index: the row numbers of the mini-batch, (B,).

        Returns:
            A new model.

        Raises:
            InputError: if it is anything but row numbers of X, at least one.

        >>> model = GeneralizedLinear(torch.ones(4, 1), [0.0, 1.0, 1.0, 1.0])
        >>> batch = model.minibatch([0, 3])
        >>> batch.weights.tolist(), batch.num_data
        ([2.0, 2.0], 4)
        """
        index = checks.batch_index(index, self.X)
        new = copy.copy(self)
        if sparse.is_sparse(self.X):
            new.X = sparse.rows(self.X, index)
        else:
            new.X = self.X.index_select(-2, index)
        for name in ("y", "weights", "offset"):
            setattr(new, name, getattr(self, name).index_select(-1, index))
        new.weights *= self.X.shape[-2] / len(index)
        new.comparable = False
        return new

    def of_members(self, here: slice, batch_shape: torch.Size) -> Self:
        """The model of some members of a batch.

        Args:
            here: which, along the first dimension of the batch.
            batch_shape: the batch of the posterior; data without its first dimension serve all members.

        Returns:
            A new model, whose tensors are views of these.

        >>> model = GeneralizedLinear(torch.ones(4, 1), torch.tensor([[0.0, 1.0, 1.0, 1.0]]).expand(3, 4))
        >>> part = model.of_members(slice(0, 2), torch.Size([3]))
        >>> part.X.shape, part.y.shape
        (torch.Size([4, 1]), torch.Size([2, 4]))
        """

        def part(tensor: Tensor, own: int) -> Tensor:
            """Its members, if it has a batch before its own dimensions."""
            batched = tensor.ndim - own == len(batch_shape) and tensor.shape[0] == batch_shape[0]
            return tensor[here] if batched else tensor

        new = copy.copy(self)
        new.X = part(self.X, 2)
        new.y, new.weights, new.offset = (part(tensor, 1) for tensor in (self.y, self.weights, self.offset))
        owns = (1, 2, 2) if isinstance(self.prior, FullPrior) else (1, 1)
        new.prior = type(self.prior)(*(part(tensor, own) for tensor, own in zip(self.prior, owns, strict=True)))
        return new

    def check(self, q: Posterior) -> None:
        """Check that q is over these coefficients.

        Raises:
            InputError: if the number of coefficients, the dtype, the device or the batch is another.
        """
        designs, targets = self.X.shape[:-2], self.y.shape[:-1]
        batch = torch.broadcast_shapes(designs, targets) if designs else targets
        checks.posterior(q, self.dim, batch, self.X)
        self._check_prior(q)

    def _check_prior(self, q: Posterior) -> None:
        mean, precision = self.prior[:2]
        vectors = *q.batch_shape, self.dim
        matrices = (*vectors, self.dim) if isinstance(self.prior, FullPrior) else vectors
        if not (fits(mean, vectors) and fits(precision, matrices)):
            raise InputError(
                f"the prior has a mean of shape {tuple(mean.shape)} and a precision of shape {tuple(precision.shape)}, "
                f"and q is a batch {tuple(q.batch_shape)} of posteriors over {self.dim} coefficients; "
                f"pass one prior for all, or one a member, {vectors}."
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor that a value depends on."""
        return (self.X, self.y, self.weights, self.offset, *self.prior, *tensors_of(self.likelihood))

    def settings(self) -> tuple[object, ...]:
        """Return the settings of the likelihood."""
        return settings_of(self.likelihood)

    def predictor(self, theta: Tensor) -> Tensor:
        """Compute the linear predictors.

        Args:
            theta: the coefficients, (*sample, *batch, D).

        Returns:
            η = Xθ + o, (*sample, *batch, N).
        """
        if sparse.is_sparse(self.X):
            return (self.X @ theta.reshape(-1, self.dim).mT).mT.reshape(*theta.shape[:-1], -1) + self.offset
        return multiply(self.X, theta) + self.offset

    def data_log_likelihood(self, theta: Tensor) -> Tensor:
        """Return Σ w log p(y | θ), (*sample, *batch)."""
        return -(self.weights * self.likelihood.energy(self.predictor(theta), self.y)).sum(-1)

    @property
    def convex(self) -> bool:  # type: ignore[override]
        """Whether ℓ is convex, as the likelihood says."""
        return self.likelihood.convex

    @property
    def curved(self) -> bool:  # type: ignore[override]
        """Whether packets tell how they change with q, which takes a dense X and γ > 0."""
        return self.likelihood.convex and self.temperature > 0 and not sparse.is_sparse(self.X)

    def second_order(self, theta: Tensor) -> tuple[Tensor, Raw | Sites]:
        """Return ℓ(θ), (*batch,), with ∇ℓ and ∇²ℓ = Xᵀ diag(w f'') X + γΛ, as iteratively reweighted least squares.

        Those of a sparse X are `Sites`, whose ∇²ℓ is not written out.
        """
        eta = self.predictor(theta).masked_fill(self.weights <= 0, 0.0)
        value, alpha, beta = (self.weights * x for x in self.likelihood.derivatives(eta, self.y))
        value = value.sum(-1) + self.temperature * self.prior.energy(theta)
        prior, is_sparse = self.prior.scaled(self.temperature), sparse.is_sparse(self.X)
        sites = Sites(self.X, None if is_sparse else self.X, alpha, beta, prior, theta)
        return value, sites if is_sparse else sites.raw()

    def marginals(self, frame: Frame) -> Marginals:
        """Return the distributions N(e_n, v_n) of the predictors under q.

        Raises:
            PairError: if there are several posteriors on a sparse X.
        """
        projected, variance = self._projected(frame)
        # a row of weight 0 is not there, also where its loss would be infinite; but it has a derivative in its weight
        mean = self.predictor(frame.mean)
        if not self.weights.requires_grad:
            absent = self.weights <= 0
            mean, variance = mean.masked_fill(absent, 0.0), variance.masked_fill(absent, 1.0)
        return Marginals(self.X, projected, mean, variance, self.y, self.weights, self.likelihood, frame.mean)

    def _projected(self, frame: Frame) -> tuple[Tensor | None, Tensor]:
        """XC where it is kept, and v = ‖Cᵀx_n‖², (*batch, N)."""
        if not sparse.is_sparse(self.X):
            projected = frame.rows(self.X)
            return projected, torch.linalg.vecdot(projected, projected)
        if frame.mean.ndim > 1:
            raise PairError(
                f"a sparse X serves one posterior; got a batch of shape {tuple(frame.mean.shape[:-1])}. "
                "Pass X.to_dense(), or fit the members one by one."
            )
        return None, frame.structure.sparse_row_norms(frame.root, self.X, frame.upper)


def _likelihood(family: str | Likelihood) -> Likelihood:
    if isinstance(family, Likelihood):
        return family
    name = full_name(family) if isinstance(family, str) else ""
    if name not in FAMILIES:
        meant = {word: _WITH_PARAMETERS[of] for word, of in SHORT.items() if of in _WITH_PARAMETERS} | _WITH_PARAMETERS
        advice = f" {BINOMIAL}" if name == "binomial" else hint(str(family), (*FAMILIES, *SHORT, *meant), meant)
        raise InputError(f"family must be one of {', '.join(FAMILIES)}, or a Likelihood; got {family!r}.{advice}")
    return FAMILIES[name]()
