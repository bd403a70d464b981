"""The checks of Gaussian posteriors and of each move that they take, of flat posteriors and exponential families."""

import copy
import itertools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Beta as BetaLaw
from torch.distributions import Distribution, Independent, MultivariateNormal, Normal, kl_divergence

from torchngvi.errors import PairError
from torchngvi.interfaces import (
    Affine,
    Congruence,
    Coordinates,
    Cost,
    Expectation,
    Frame,
    LogTangent,
    Move,
    Posterior,
    Raw,
    Root,
    RootTangent,
    Tangent,
)
from torchngvi.posteriors.flat import (
    Beta,
    ExponentialFamily,
    FlatCholesky,
    FlatPosterior,
    MeanFieldGaussian,
    OrthogonalFlow,
    RankOneGaussian,
)
from torchngvi.posteriors.gaussian import Gaussian
from torchngvi.structures import Dense
from torchngvi.testing.claims import (
    BATCHES,
    DIFFERENCE,
    DIM,
    DTYPE,
    EXACT,
    IDENTITY,
    SINGLE,
    Claim,
    PosteriorFactory,
    after,
    batch_text,
    definite_in,
    derivative,
    kind,
    made,
    mask,
    matvec,
    moments,
    normal,
    root_in,
    single,
    start,
    symmetric_in,
)
from torchngvi.testing.claims import Normal as NormalMoments

# What a posterior makes of each move that it takes: its definition, and what leaves the cone


def check_moves(claim: Claim, q: Posterior) -> None:
    """Check every move of `takes` against its definition, and each with an entry that is not finite."""
    known: dict[type, Callable[[Claim, Posterior], Move]] = {
        Congruence: _congruence,
        Tangent: _tangent_of_move,
        RootTangent: _tangent_of_move,
        LogTangent: _log_tangent,
        Affine: _affine,
        Root: _root,
    }
    for taken in q.takes:
        if taken not in known:
            claim.fail(f"`takes` names {taken.__name__}, which is none of the moves of torchngvi.interfaces")
    for taken, check in known.items():
        if taken in q.takes:
            _not_finite(claim, q, check(claim, q))


def _taken(claim: Claim, q: Posterior, move: Move) -> NormalMoments:
    """The moments after a move that must stay in the cone."""
    before = [x.clone() for x in q.coordinates]
    there, ok = after(q, move)
    sentence = f"moved() must tell that a small {type(move).__name__} stays in the cone, (*batch,)"
    claim.holds(ok.shape == q.batch_shape and bool(ok.all()), sentence)
    for now, was in zip(q.coordinates, before, strict=True):
        claim.same("moved() must leave q as it is", now, was)
    return there


def _compare(claim: Claim, move: Move, there: NormalMoments, mean: Tensor, covariance: Tensor) -> None:
    name = type(move).__name__
    claim.close(f"the mean after a {name} must be what it says", there.mean, mean, IDENTITY)
    claim.close(f"the covariance after a {name} must be what it says", there.covariance, covariance, IDENTITY)


def _congruence(claim: Claim, q: Posterior) -> Move:
    batch, C, mean = tuple(q.batch_shape), q.frame().dense(), q.frame().mean
    N, f = definite_in(q.structure, batch, 51), normal(*batch, q.dim, seed=52)
    stored = q.structure.from_dense(N)
    move, inverse = Congruence(stored, f), torch.linalg.inv(N)
    there = _taken(claim, q, move)
    _compare(claim, move, there, mean + matvec(C, matvec(inverse, f)), C @ inverse @ C.mT)
    ok = q.moved(Congruence(_with_first(q, stored, -stored), f))[1]
    claim.holds(ok.tolist() == _all_but_first(q), "moved() must refuse a Congruence by a negative matrix")
    return move


def _tangent_of_move(claim: Claim, q: Posterior) -> Move:
    change = _change(q)
    move = RootTangent(change) if RootTangent in q.takes else Tangent(change)
    new, ok = q.moved(move)
    claim.holds(ok.all(), "moved() must tell that a small Tangent stays in the cone")
    for name, now, was, by in zip(("vector", "matrix"), new, q.coordinates, change, strict=True):
        claim.close(f"a Tangent must add its change to the {name}", now, was + by, EXACT)
    _taken(claim, q, move)
    gone = Coordinates(change.vector, _with_first(q, change.matrix, -q.coordinates.matrix))
    ok = q.moved(type(move)(gone))[1]
    claim.holds(ok.tolist() == _all_but_first(q), "moved() must refuse a Tangent to a singular matrix")
    return move


def _log_tangent(claim: Claim, q: Posterior) -> Move:
    move, structure = LogTangent(_change(q)), q.structure
    new, _ = q.moved(move)
    dense, by = (structure.to_dense(x) for x in (q.coordinates.matrix, move.change.matrix))
    diagonal = dense.diagonal(dim1=-2, dim2=-1) * by.diagonal(dim1=-2, dim2=-1).exp()
    expected = (dense + by).tril(-1) + torch.diag_embed(diagonal)
    claim.close("a LogTangent must move log Λ_ii and Λ_ij", structure.to_dense(new.matrix), expected, EXACT)
    _taken(claim, q, move)
    return move


def _change(q: Posterior) -> Coordinates:
    """A small one, in the kind of matrix that q holds."""
    batch, structure = tuple(q.batch_shape), q.structure
    dense = root_in(structure, batch, 53) if RootTangent in q.takes else symmetric_in(structure, batch, 53)
    return Coordinates(normal(*batch, q.dim, seed=54), 0.02 * structure.from_dense(dense))


def _affine(claim: Claim, q: Posterior) -> Move:
    batch, (mean, V) = tuple(q.batch_shape), moments(q)
    M = torch.eye(q.dim, dtype=DTYPE) + 0.2 * normal(*batch, q.dim, q.dim, seed=55) * mask(q.structure)
    move = Affine(q.structure.from_dense(M), normal(*batch, q.dim, seed=56))
    _compare(claim, move, _taken(claim, q, move), mean + move.s, M @ V @ M.mT)
    return move


def _root(claim: Claim, q: Posterior) -> Move:
    batch = tuple(q.batch_shape)
    L = root_in(q.structure, batch, 57)
    move = Root(normal(*batch, q.dim, seed=58), q.structure.from_dense(L))
    _compare(claim, move, _taken(claim, q, move), move.mean, L @ L.mT)
    return move


def _with_first(q: Posterior, tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor with the first member of another."""
    new = tensor.clone(memory_format=torch.contiguous_format)
    members = (q.batch_shape.numel(), -1)
    new.reshape(members)[0] = other.reshape(members)[0]
    return new


def _all_but_first(q: Posterior) -> list[bool]:
    ok = torch.ones(q.batch_shape, dtype=torch.bool)
    ok.reshape(-1)[0] = False
    return ok.tolist()


def _not_finite(claim: Claim, q: Posterior, move: Move) -> None:
    """One entry of one member in each tensor of the move."""
    tensors = move.change if isinstance(move, Tangent) else move
    whole, _ = after(q, move)
    for index, value in itertools.product(range(len(tensors)), (torch.nan, torch.inf)):
        broken = tensors[index].clone(memory_format=torch.contiguous_format)
        broken.reshape(-1)[broken.numel() // q.batch_shape.numel() - 1] = value
        given = [broken if index == other else tensor for other, tensor in enumerate(tensors)]
        bad = type(move)(Coordinates(*given)) if isinstance(move, Tangent) else type(move)(*given)
        there, ok = after(q, bad)
        name = type(move).__name__
        claim.holds(
            ok.tolist() == _all_but_first(q),
            f"moved() must refuse a {name} with an entry {value} in its tensor {index}, for that member alone",
        )
        for now, was in zip(there, whole, strict=True):
            members = (q.batch_shape.numel(), -1)
            others = now.reshape(members)[1:], was.reshape(members)[1:]
            claim.close(f"a {name} that is refused for one member must be taken for the others", *others, IDENTITY)


def check_posterior(factory: PosteriorFactory, dim: int = DIM) -> None:
    """Check that a posterior keeps the contract of `Posterior`.

    Its moments, entropy and densities are compared with ``torch.distributions``, `unframe` with the inverse of the
    frame, and the gradients in the probes with a and W.  The natural gradient is compared with a solve of the Fisher
    matrix that autograd finds, and every move of `takes` with its definition, also where a member leaves the cone or
    meets a NaN.  The state dict must restore the posterior.

    Args:
        factory: of (dim, batch_shape), with the keywords mean (*batch, D) and scale (*batch, D, D), a lower factor of
            the covariance, in whose dtype it makes the posterior: for example a class, or a `functools.partial` with
            a structure.
        dim: D, for a structure that has a number of coordinates of its own.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi import CholeskyGaussian
    >>> check_posterior(CholeskyGaussian)
    """
    claim = Claim(kind(factory(dim, ())))
    claim.holds(isinstance(factory(dim, ()), Posterior), "a posterior must be a torchngvi.interfaces.Posterior")
    for batch in BATCHES:
        here, at = claim.at(batch_text(batch)), start(factory, batch, 5, dim)
        with here.works("a method of the posterior"):
            q = made(factory, at)
            _moments(here, q, at)
            _gaussian_module(here, q, factory)
            _frame(here, q)
            _probes(here, q)
            _natural_gradient(here, q)
            check_moves(here, q)
            _assignment(here, q)
            if isinstance(q, Gaussian):
                _gaussian_densities(here, q, start(factory, batch, 8, dim), factory)
            floats = moments(made(factory, single(at)))
            for name, one, two in zip(("mean", "covariance"), floats, moments(q), strict=True):
                here.close(f"its {name} in float32 must be that of float64", one, two.float(), SINGLE)


def _moments(claim: Claim, q: Posterior, at: NormalMoments) -> None:
    frame = q.frame()
    claim.holds((q.dim, tuple(q.batch_shape)) == (at.mean.shape[-1], at.mean.shape[:-1]), "dim and batch_shape hold D")
    claim.close("its mean must be that of the start", frame.mean, at.mean, IDENTITY)
    C = frame.dense()
    claim.close("its frame must have C Cᵀ = V of the start", C @ C.mT, at.covariance, IDENTITY)
    triangle = C.triu() if q.upper else C.tril()
    claim.close("its root must have the triangle that `upper` says", triangle, C)
    claim.holds(frame.upper == q.upper == q.probed().upper, "frame() and probed() must have the `upper` of the class")
    written = torch.distributions.MultivariateNormal(at.mean, at.covariance)
    claim.close("entropy() must be that of N(m, V)", q.entropy(), written.entropy(), IDENTITY)


def _gaussian_module(claim: Claim, q: Posterior, factory: PosteriorFactory) -> None:
    """What torch sees of it."""
    claim.holds(not list(q.parameters()), "it must have no parameters, which another optimizer would move")
    claim.holds(not any(x.requires_grad for x in q.coordinates), "its coordinates must not require grad")
    probes = (q.mean_probe, q.root_probe)
    for name, probe, like in zip(("mean_probe", "root_probe"), probes, q.coordinates, strict=True):
        claim.holds(probe.is_leaf and probe.requires_grad, f"{name} must be a leaf that requires grad")
        claim.holds(not probe.any() and probe.shape == like.shape, f"{name} must be zero, in the shape of a coordinate")
    stored = [x.data_ptr() for x in q.state_dict().values()]
    claim.holds(
        all(x.data_ptr() in stored for x in q.coordinates) and len(stored) == len(q.coordinates),
        "its state dict must hold its coordinates, and nothing else",
    )
    other, twin = factory(q.dim, q.batch_shape, mean=q.mean_probe.detach() + 1.0), copy.deepcopy(q)
    moments(other)
    other.load_state_dict(q.state_dict())
    for again, name in ((other, "load_state_dict must carry q"), (twin, "a copy must be q")):
        for one, two in zip(moments(again), moments(q), strict=True):
            claim.same(f"{name}, with nothing left of what was remembered", one, two)


def _frame(claim: Claim, q: Posterior) -> None:
    structure, batch = q.structure, tuple(q.batch_shape)
    C, g = q.frame().dense(), normal(*batch, q.dim, seed=21)
    H = symmetric_in(structure, batch, 22)
    a, W = q.unframe(matvec(C.mT, g), structure.from_dense(H))
    claim.close("unframe must be the inverse of the frame, C⁻ᵀ a", a, g, IDENTITY)
    inverse = torch.linalg.inv(C)
    expected = (inverse.mT @ H @ inverse) * mask(structure)
    claim.close("unframe must be the inverse of the frame, C⁻ᵀ W C⁻¹", structure.full(W), expected, IDENTITY)


def _probes(claim: Claim, q: Posterior) -> None:
    """The gradient in the probes is a, and the lower triangle of W; that of the entropy is I."""
    batch, structure = tuple(q.batch_shape), q.structure
    g, H = normal(*batch, q.dim, seed=23), symmetric_in(Dense(q.dim), batch, 24)
    frame = q.probed()
    claim.same("probed() must be the frame where the probes are zero", frame.root, q.frame().root)
    C = frame.dense()
    value = (g * frame.mean).sum() + 0.5 * (H * (C @ C.mT)).sum()
    a, R = torch.autograd.grad(value, (q.mean_probe, q.root_probe))
    C = q.frame().dense()
    claim.close("the gradient in mean_probe must be a = Cᵀg", a, matvec(C.mT, g), IDENTITY)
    lower, W = structure.to_dense(structure.tril(R)), (C.mT @ H @ C) * mask(structure)
    claim.close("the gradient in root_probe must have the lower triangle of W = CᵀHC", lower, W.tril(), IDENTITY)
    a, R = torch.autograd.grad(
        q.entropy().sum(), (q.mean_probe, q.root_probe), allow_unused=True, materialize_grads=True
    )
    eye = structure.eye(q.mean_probe.detach()).contiguous()
    claim.close("the gradient of the entropy must be I in root_probe", structure.tril(R), eye, IDENTITY)
    claim.close("the gradient of the entropy must be 0 in mean_probe", a, torch.zeros_like(a))
    e = _packet(q, g, H, 0.5)
    local = q.local(e)
    P = W - 0.5 * torch.eye(q.dim, dtype=DTYPE)
    claim.close("local() must be a and P = W - γI", structure.full(local.P), P, IDENTITY)
    expected = local.a.square().sum(-1) + 0.5 * P.square().sum((-2, -1))
    claim.close("norm2() must be |a|² + ½‖P‖²", q.norm2(local), expected, IDENTITY)


def _packet(q: Posterior, g: Tensor, H: Tensor, temperature: float) -> Expectation:
    value = torch.zeros(q.batch_shape, dtype=DTYPE)
    return Expectation(value, Raw(g, H), temperature, True, Cost(1, 1))


def _natural_gradient(claim: Claim, q: Posterior) -> None:
    """The tangent against F⁻¹∇L in (p, R), Fisher matrix and gradient by autograd; member by member."""
    temperature, batch, structure = 0.5, tuple(q.batch_shape), q.structure
    g, H = normal(*batch, q.dim, seed=25), symmetric_in(Dense(q.dim), batch, 26)
    e = _packet(q, g, H, temperature)
    (mean, V), frame = moments(q), q.frame()
    C = frame.dense()
    G = H - temperature * torch.linalg.inv(V)
    several = [x.reshape((-1, *x.shape[len(batch) :])) for x in (mean, C, g, G)]
    kept = mask(structure)
    solved = [_fisher_solve(m, C, g, G, kept, frame.upper) for m, C, g, G in zip(*several, strict=True)]
    rates = [torch.stack(part).reshape((*batch, *part[0].shape)) for part in zip(*solved, strict=True)]
    change = q.tangent(e)

    def moved(rho: float, part: int) -> Tensor:
        return after(q, Tangent(Coordinates(-rho * change.vector, -rho * change.matrix)))[0][part]

    for part, name in enumerate(("the mean", "the covariance")):
        velocity = derivative(lambda rho, part=part: moved(rho, part))  # type: ignore[misc]
        claim.close(f"tangent() must be F⁻¹∇L, F the Fisher matrix: {name}", velocity, -rates[part], DIFFERENCE)
    claim.close("norm2() must be ∇Lᵀ F⁻¹ ∇L", q.norm2(q.local(e)), rates[2], IDENTITY)
    if RootTangent not in q.takes:
        return
    slope = q.euclidean(e)
    vector, matrix = normal(*batch, q.dim, seed=27), structure.from_dense(root_in(structure, batch, 28))

    def objective(h: float) -> Tensor:  # to first order, what the packet is the derivative of
        there, _ = after(q, RootTangent(Coordinates(h * vector, h * matrix)))
        return (g * there.mean).sum(-1) + 0.5 * (G * there.covariance).sum((-2, -1))

    pairing = (slope.vector * vector).sum(-1) + (slope.matrix * matrix).flatten(len(batch)).sum(-1)
    claim.close("euclidean() must be the gradient in its coordinates", pairing, derivative(objective), DIFFERENCE)


def _fisher_solve(mean: Tensor, C: Tensor, g: Tensor, G: Tensor, kept: Tensor, upper: bool) -> tuple[Tensor, ...]:
    """ṁ and V̇ along F⁻¹∇L, and ∇LᵀF⁻¹∇L, in the coordinates p and R of θ = m + C(p + (I + R)z)."""
    dim = len(mean)
    rows, columns = torch.where(kept.tril() > 0)

    def moved(flat: Tensor) -> tuple[Tensor, Tensor]:
        turn = torch.eye(dim, dtype=DTYPE).index_put((rows, columns), flat[dim:], accumulate=True)
        root = C @ (turn.mT if upper else turn)
        return mean + C @ flat[:dim], root @ root.mT

    V = C @ C.mT

    def divergence(flat: Tensor) -> Tensor:
        there, other = moved(flat)
        shift, inverse = there - mean, torch.linalg.inv(other)
        return 0.5 * ((inverse @ V).trace() + shift @ inverse @ shift + torch.logdet(other))

    def objective(flat: Tensor) -> Tensor:
        there, other = moved(flat)
        return g @ there + 0.5 * (G * other).sum()

    zero = torch.zeros(dim + len(rows), dtype=DTYPE)
    slope = torch.func.grad(objective)(zero)
    rate = torch.linalg.solve(torch.func.hessian(divergence)(zero), slope)
    R = torch.zeros(dim, dim, dtype=DTYPE).index_put((rows, columns), rate[dim:])
    return C @ rate[:dim], C @ (R + R.mT) @ C.mT, slope @ rate


def _assignment(claim: Claim, q: Posterior) -> None:
    before, old = q.snapshot(), moments(q)
    new = Coordinates(before.vector + 1.0, 2.0 * before.matrix)
    where = torch.zeros(q.batch_shape, dtype=torch.bool)
    where.reshape(-1)[0] = True
    q.assign(new, where)
    for name, now, was, value in zip(("vector", "matrix"), q.coordinates, before, new, strict=True):
        keep = where.reshape(where.shape + (1,) * (now.ndim - where.ndim))
        sentence = f"assign must write the {name} for the members of the mask, and leave the others"
        claim.same(sentence, now, torch.where(keep, value, was))
    claim.holds(not torch.equal(moments(q).mean, old.mean), "the frame must follow the coordinates")
    q.assign(before, torch.ones_like(where))
    for now, was in zip(moments(q), old, strict=True):
        claim.close("a snapshot must bring q back", now, was, EXACT)


def _gaussian_densities(claim: Claim, q: Gaussian, at: NormalMoments, factory: PosteriorFactory) -> None:
    batch, other = tuple(q.batch_shape), made(factory, at)
    written, beside = (torch.distributions.MultivariateNormal(*x) for x in (moments(q), at))
    assert isinstance(other, Gaussian)
    theta = normal(4, *batch, q.dim, seed=29)
    claim.close("log_prob(θ) must be that of N(m, V)", q.log_prob(theta), written.log_prob(theta), IDENTITY)
    divergence = torch.distributions.kl_divergence(written, beside)
    claim.close("kl(p) must be that of N(m, V)", q.kl(other), divergence, IDENTITY)
    z = normal(3, *batch, q.dim, seed=30)
    frame: Frame = q.frame()
    C = frame.dense()
    claim.close("push_noise(z) must be m + C z", q.push_noise(z), frame.mean + matvec(C, z), IDENTITY)
    claim.close("whiten(C z) must be z", q.whiten(matvec(C, z)), z, IDENTITY)
    a, W = torch.autograd.grad(q.push_noise(z).sin().sum(), (q.mean_probe, q.root_probe))
    pulled = matvec(C.mT, q.push_noise(z).detach().cos())
    outer = torch.einsum("s...i,s...j->...ij", pulled, z)
    claim.close("a backward pass must leave Σ Cᵀ∇f in mean_probe", a, pulled.sum(0), IDENTITY)
    expected = q.structure.from_dense(0.5 * (outer + outer.mT))
    claim.close("a backward pass must leave the symmetric part of Σ Cᵀ∇f zᵀ in root_probe", W, expected, IDENTITY)


# ------------------------------------------------------------------------------------ flat posteriors


# The flat posteriors that metrics and estimators are tried on, with their laws as ``torch.distributions`` has them


def _numbers(*entries: object) -> Tensor:
    return torch.tensor(entries, dtype=DTYPE)


FLAT: dict[str, Callable[[], FlatPosterior]] = {
    "MeanFieldGaussian": lambda: MeanFieldGaussian(_numbers(0.3, -0.2, -1.5, 1.0)),
    "FlatCholesky": lambda: FlatCholesky(_numbers(0.4, -0.1), _numbers([2.0, 0.2], [0.2, 0.06])),
    "Beta": lambda: Beta(_numbers(2.5, 12.0)),
    "RankOneGaussian": lambda: RankOneGaussian(*_numbers([0.2, -0.4, 0.1], [0.6, -0.3, 0.8], [1.0, 0.2, 2.0])),
    "OrthogonalFlow": lambda: OrthogonalFlow(
        _numbers(0.3, -0.5), torch.linalg.qr(_numbers([1.0, 0.4], [-0.3, 1.0]))[0], _numbers(0.1, 0.2)
    ),
}


def _cholesky_law(lam: Tensor) -> Distribution:
    zero = torch.zeros_like(lam[..., 0])
    rows = [[lam[..., 2].exp(), zero], [lam[..., 3], lam[..., 4].exp()]]
    return MultivariateNormal(lam[..., :2], scale_tril=torch.stack([torch.stack(row, -1) for row in rows], -2))


def _rank_one_law(lam: Tensor) -> Distribution:
    mean, b, c = lam.chunk(3, -1)
    return MultivariateNormal(mean, b[..., :, None] * b[..., None, :] + c.square().diag_embed())


LAWS: dict[str, Callable[[Tensor], Distribution]] = {
    "MeanFieldGaussian": lambda lam: Independent(Normal(lam[..., :2], lam[..., 2:].exp()), 1),
    "FlatCholesky": _cholesky_law,
    "Beta": lambda lam: Independent(BetaLaw(lam[..., :1], lam[..., 1:]), 1),
    "RankOneGaussian": _rank_one_law,
}


def several(q: FlatPosterior, batch: tuple[int, ...], seed: int) -> FlatPosterior:
    """Make a batch of posteriors near one, on its manifold where there is one."""
    vector = q.vector.detach()
    if not batch:
        return q.at(vector)
    vector = vector.expand(*batch, q.size).contiguous()
    change = 0.05 * normal(*batch, q.size, seed=seed).to(vector.dtype)
    return q.at(q.retracted(vector, q.projected(vector, change)))


def fisher(law: Callable[[Tensor], Distribution], vector: Tensor) -> Tensor:
    """Compute the Fisher matrix (D, D) of a law by autograd, as the Hessian of KL(q_λ₀ ‖ q_λ) at λ = λ₀, (D,)."""
    there = law(vector.detach())

    def divergence(lam: Tensor) -> Tensor:
        return kl_divergence(there, law(lam)).sum()

    return torch.autograd.functional.hessian(divergence, vector.detach())


DRAWS = 4000  # of a z-test


def check_flat_posterior(factory: Callable[[], FlatPosterior]) -> None:
    """Check that a posterior over a flat vector keeps the contract of `FlatPosterior`.

    Its scores must be the gradients that autograd finds, along its manifold, and of draws they must have mean zero, by
    z-tests; so must I_F⁻¹ be the inverse of E[φφᵀ], and mean and variance those of the draws, where they are known.
    Of one or two latent variables the density must give the mass of the draws between their quartiles, or at their mode
    where they are whole numbers; of more nothing here sees a constant factor.  Draws are of any shape, and with
    ``rsample`` the same at the same noise.  Everything is asked of batches too, whose members must not depend on one
    another, at another λ, and in float32.  A step to NaN must be refused, and the state dict must restore q.

    Args:
        factory: makes the posterior at a λ inside its domain, in float64 and without batch dimensions.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.posteriors.flat import Beta
    >>> check_flat_posterior(lambda: Beta(torch.tensor([2.0, 3.0], dtype=torch.float64)))
    """
    claim = Claim(kind(factory()))
    claim.holds(isinstance(factory(), FlatPosterior), "it must be a torchngvi.posteriors.flat.FlatPosterior")
    with torch.random.fork_rng(devices=[]):
        for batch in BATCHES:
            q, here = several(factory(), batch, 5), claim.at(batch_text(batch))
            with here.works("a method of the posterior"):
                _module(here, q)
                _samples(here, q)
                _densities(here, q)
                _moves(here, q)
                if batch:
                    _members(here, q)
                else:
                    with torch.no_grad():
                        _draws(here, q)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _module(claim: Claim, q: FlatPosterior) -> None:
    """What torch sees of it."""
    claim.holds(not list(q.parameters()), "it must have no parameters, which another optimizer would move")
    claim.holds(not q.vector.requires_grad, "its vector must not require grad")
    probe = q.mean_probe
    right = probe.is_leaf and probe.requires_grad and not bool(probe.any()) and probe.shape == q.vector.shape
    claim.holds(right, "mean_probe must be a leaf that requires grad, zero in the shape of λ")
    other = copy.deepcopy(q)
    theta = q.sample(2, _seeded())
    other.restore(Coordinates(q.retracted(q.vector, 0.1 * torch.ones_like(q.vector)), q.no_matrix))
    claim.holds(not torch.equal(other.log_prob(theta), q.log_prob(theta)), "the density must follow the vector")
    other.load_state_dict(q.state_dict())
    claim.same("load_state_dict must carry q", other.log_prob(theta), q.log_prob(theta))


def _samples(claim: Claim, q: FlatPosterior) -> None:
    """A number of draws, or their shape, as a list, a tuple or a torch.Size."""
    event = (*q.batch_shape, q.dim)
    draws = {"sample": q.sample, "rsample": q.rsample} if q.reparametrised else {"sample": q.sample}
    for name, draw in draws.items():
        for shape in (6, (6,), (2, 3), torch.Size((2, 3)), ()):
            size = (shape,) if isinstance(shape, int) else tuple(shape)
            got = tuple(draw(shape, _seeded()).shape)
            claim.holds(got == (*size, *event), f"{name}({shape}) must have the shape {(*size, *event)}; got {got}")
        flat, shaped = draw(6, _seeded()), draw((2, 3), _seeded())
        claim.same(f"{name} must give the same draws in any shape", shaped.reshape(flat.shape), flat)
    claim.holds(not q.sample(2).requires_grad, "sample must have no graph")
    if q.reparametrised:
        draws_of_both = q.rsample(4, _seeded()).detach(), q.sample(4, _seeded())
        claim.close("rsample must give the draws of sample, at the same noise", *draws_of_both)
        claim.holds(q.rsample(2).requires_grad, "rsample must be differentiable in λ")
        return
    try:
        q.rsample(2)
    except PairError:
        return
    claim.fail("rsample exists, so `reparametrised` must be True")


def _densities(claim: Claim, q: FlatPosterior) -> None:
    """Log density and score, at λ and elsewhere, for samples of several shapes."""
    theta, lam = q.sample((2, 3), _seeded()), q.vector.detach()
    weight = normal(2, 3, *q.batch_shape, seed=11)
    point = lam.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((weight * q.log_prob(theta, point)).sum(), point)
    score = q.score(theta).detach()
    shape = (2, 3, *q.vector.shape)
    claim.holds(score.shape == shape, f"score must have the shape {tuple(shape)}; got {tuple(score.shape)}")
    total, expected = (weight[..., None] * score).sum((0, 1)), q.projected(lam, gradient)
    claim.close("score must be ∇_λ log q, along the manifold", total, expected, IDENTITY)
    value, size = q.log_prob(theta).detach(), tuple(shape[:-1])
    claim.holds(value.shape == size, f"log_prob must have the shape {size}; got {tuple(value.shape)}")
    claim.close("log_prob must be the same for one θ", q.log_prob(theta[0, 0]).detach(), value[0, 0], EXACT)
    q.log_prob(theta).sum().backward()
    claim.holds(q.mean_probe.grad is not None, "log_prob must be differentiable in the probe")
    q.drop_gradients()
    there = q.retracted(lam, q.projected(lam, 0.05 * torch.ones_like(lam)))
    other = q.at(there)
    claim.close("log_prob(θ, at) must be that of q at that λ", q.log_prob(theta, there), other.log_prob(theta).detach())
    claim.close("score(θ, at) must be that of q at that λ", q.score(theta, there), other.score(theta).detach())
    claim.close("sample(.., at) must be that of q at that λ", q.sample(2, _seeded(), there), other.sample(2, _seeded()))
    single = copy.deepcopy(q).float()
    claim.close("log_prob in float32 must be that of float64", single.log_prob(theta.float()), value.float(), SINGLE)
    claim.holds(single.sample(2).dtype == torch.float32, "draws must have the dtype of λ")


def _moves(claim: Claim, q: FlatPosterior) -> None:
    lam = q.vector.detach()
    still = torch.zeros_like(lam)
    new, ok = q.moved(Tangent(Coordinates(still, q.no_matrix)))
    claim.holds(ok.shape == q.batch_shape and bool(ok.all()), "moved() must take a step of length zero")
    claim.close("a step of length zero must lead to q itself", new.vector, lam, IDENTITY)
    spoiled = still.clone()
    spoiled.reshape(-1, q.size)[0, -1] = torch.nan
    told = q.moved(Tangent(Coordinates(spoiled, q.no_matrix)))[1].reshape(-1)
    claim.holds(not told[0] and bool(told[1:].all()), "moved() must refuse a step to NaN, member by member")
    direction = q.projected(lam, normal(*lam.shape, seed=12))
    claim.close("projected() must be a projection", q.projected(lam, direction), direction, IDENTITY)
    claim.holds(q.flat == torch.equal(q.projected(lam, lam), lam), "`flat` must say whether there is no manifold")
    claim.holds(q.in_domain(q.retracted(lam, 1e-3 * direction)).all(), "a small step must stay in the domain")


def _members(claim: Claim, q: FlatPosterior) -> None:
    theta = q.sample(4, _seeded())
    value, score = q.log_prob(theta).detach(), q.score(theta).detach()
    for index in ((0, 0), (1, 2)):
        alone = q.at(q.vector[index])
        of_all = (value[(slice(None), *index)], score[(slice(None), *index)])
        of_one = (alone.log_prob(theta[(slice(None), *index)]), alone.score(theta[(slice(None), *index)]))
        for one, whole in zip(of_one, of_all, strict=True):
            claim.close("batch members must not depend on one another", one.detach(), whole, IDENTITY)


def _draws(claim: Claim, q: FlatPosterior) -> None:
    """What holds of draws in the mean, by z-tests."""
    theta = q.sample(DRAWS, _seeded())
    score, x = q.score(theta).detach(), q.projected(q.vector, normal(q.size, seed=13))
    claim.unbiased("the scores of its draws must have mean zero", score, torch.zeros_like(x))
    if q.dim <= 2:
        _normalised(claim, q)
    try:
        y, z = q.exact_fisher_solve(x), q.exact_fisher_solve(2 * x + 1) - q.exact_fisher_solve(torch.ones_like(x))
    except PairError:
        pass
    else:
        claim.close("exact_fisher_solve must be linear", z, 2 * y, IDENTITY)
        claim.unbiased("exact_fisher_solve must invert E[φφᵀ] of its draws", score * (score @ y)[:, None], x)
    try:
        mean, variance = q.mean, q.variance
    except PairError:
        return
    claim.unbiased("mean must be that of its draws", theta, mean)
    claim.unbiased("variance must be that of its draws", (theta - mean).square(), variance)
    claim.close("stddev must be the root of variance", q.stddev, variance.sqrt())


def _normalised(claim: Claim, q: FlatPosterior) -> None:
    """Of draws E[r/q] = ∫ r = 1, where r is uniform between their quartiles, once they are uncorrelated."""
    theta = q.sample(10 * DRAWS, _seeded())
    if torch.equal(theta, theta.round()):
        inside, log_volume = theta == theta.mode(0).values, torch.zeros((), dtype=theta.dtype)
    else:
        root = torch.linalg.cholesky(theta.mT.cov().reshape(q.dim, q.dim))
        z = torch.linalg.solve_triangular(root, theta.mT, upper=False).mT
        low, high = z.quantile(z.new_tensor([0.25, 0.75]), 0)
        inside, log_volume = (low < z) & (z < high), (root.diagonal() * (high - low)).log().sum()
    ratio = torch.where(inside.all(-1), torch.exp(-log_volume - q.log_prob(theta)), 0.0)
    claim.unbiased("log_prob must be the logarithm of a density that integrates to 1", ratio, torch.ones_like(ratio[0]))


_TRIGAMMA = 1e-7  # torch's, which autograd takes, is off by 5e-10


def check_exponential_family(factory: Callable[[], ExponentialFamily]) -> None:
    """Check that a family keeps the contract of `ExponentialFamily`, and that of a flat posterior.

    The expectation parameters must be the gradient of the log-partition function and the mean of the statistics of
    draws; products with the Fisher matrix the derivative of the expectation parameters, and its solves the inverse of
    that; the natural parameters must come back from the expectation parameters.  Entropy and divergence must be those
    of draws.  Steps of any length must stay in the domain, and short ones follow a straight line.

    Args:
        factory: makes the family at an η inside its domain, in float64 and without batch dimensions.

    Raises:
        AssertionError: an identity fails; the text says which, by how much, and for which input.

    >>> from torchngvi.posteriors.flat import Gamma
    >>> check_exponential_family(lambda: Gamma(torch.tensor([2.0, 3.0], dtype=torch.float64)))
    """
    claim = Claim(kind(factory()))
    claim.holds(isinstance(factory(), ExponentialFamily), "it must be an ExponentialFamily")
    check_flat_posterior(factory)
    with torch.random.fork_rng(devices=[]):
        for batch in BATCHES:
            q, here = several(factory(), batch, 5), claim.at(batch_text(batch))
            assert isinstance(q, ExponentialFamily)
            with here.works("a method of the family"):
                _parameters(here, q)
                _steps(here, q)
                if not batch:
                    with torch.no_grad():
                        _draws_of_family(here, q)


def _parameters(claim: Claim, q: ExponentialFamily) -> None:
    """What autograd finds of A and ω, and the way back."""
    eta = q.vector.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(q.log_partition(eta).sum(), eta)
    omega = q.expectation().detach()
    claim.close("expectation must be the gradient of log_partition", omega, gradient, IDENTITY)
    change = q.vector * normal(*q.vector.shape, seed=21)
    _, derivative = torch.autograd.functional.jvp(lambda at: q.expectation(at), q.vector.detach(), change)
    product = q.fisher_product(change).detach()
    claim.close("fisher_product must be the derivative of expectation", product, derivative, _TRIGAMMA)
    back = q.exact_fisher_solve(product).detach()
    claim.close("exact_fisher_solve must undo fisher_product", back, change, _TRIGAMMA)
    claim.close("natural must undo expectation", q.natural(omega), q.vector, _TRIGAMMA)
    claim.close("with_expectation must make that member", q.with_expectation(omega).vector, q.vector, _TRIGAMMA)
    theta = q.sample(4, _seeded())
    size = (4, *q.vector.shape)
    got = tuple(q.statistics(theta).shape)
    claim.holds(got == size, f"statistics must have the shape {size}; got {got}")
    zero = q.kl(q.at(q.vector)).detach()
    claim.close("the divergence from itself must be 0", zero, torch.zeros_like(zero), IDENTITY)


def _steps(claim: Claim, q: ExponentialFamily) -> None:
    direction = q.vector * normal(*q.vector.shape, seed=22)
    short = q.retracted(q.vector, 1e-6 * direction) - q.vector
    claim.close("a short step must follow a straight line", 1e6 * short, direction, 1e-5)
    for seed in range(20):
        direction = q.vector.abs() * normal(*q.vector.shape, seed=seed)
        for length in (1.0, 30.0, 1000.0):
            inside = q.in_domain(q.retracted(q.vector, length * direction))
            claim.holds(bool(inside.all()), f"a step of {length:g} times η must stay in the domain")


def _draws_of_family(claim: Claim, q: ExponentialFamily) -> None:
    theta = q.sample(DRAWS, _seeded())
    other = q.at(q.retracted(q.vector, 0.1 * q.vector * normal(*q.vector.shape, seed=23)))
    claim.unbiased("expectation must be the mean of the statistics", q.statistics(theta), q.expectation())
    difference = q.log_prob(theta) - other.log_prob(theta)
    claim.unbiased("kl must be the mean of the log ratio", difference, q.kl(other))
    points, weights = q.points(DRAWS, torch.Generator().manual_seed(4))
    claim.close("the weights of points must sum to 1", weights.sum(0), torch.ones_like(weights[0]), IDENTITY)
    claim.holds(points.shape[1:] == theta.shape[1:], "points must have the shape of draws")
    try:
        entropy = q.entropy()
    except PairError:
        return
    claim.unbiased("entropy must be the mean of -log q", -q.log_prob(theta), entropy)
    b = q.base_coefficients()
    claim.close("log_base must be ⟨b, T⟩", q.log_base(theta), (q.statistics(theta) * b).sum(-1), IDENTITY)
