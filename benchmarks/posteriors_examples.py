"""Classic models of the BUGS volumes, as Stan's folder of examples has them, which nobody chose for `fit`.

    from benchmarks.posteriors_examples import EXAMPLES
    dim, log_joint = EXAMPLES["seeds"]()

The folders are github.com/stan-dev/example-models, bugs_examples/vol1 to vol3 and misc (commit 2847a61, 2025).  Data
and priors are those of the Stan file, vague or not; latent values that it samples are coordinates.  A log joint takes
theta (*batch, D) in float64 to (*batch,), up to a constant.  Scales are in log coordinates, values between bounds in
logits and correlations in inverse hyperbolic tangents, with the Jacobians.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad, softplus

from benchmarks.posteriors_hierarchical import counts, half_normal, normal, poisson

LogJoint = Callable[[Tensor], Tensor]
Example = tuple[int, LogJoint]


# ---------------------------------------------------------------- densities, up to constants


def precision(log_sd: Tensor, shape: float = 1e-3) -> Tensor:
    """Log density of log s where 1/s² ~ Gamma(shape, rate shape), which is s² ~ InvGamma(shape, shape)."""
    return -2 * shape * log_sd - shape * torch.exp(-2 * log_sd)


def uniform(logit: Tensor) -> Tensor:
    """Log density of a logit whose probability is uniform."""
    return logsigmoid(logit) + logsigmoid(-logit)


def binomial(y: Tensor, n: Tensor, eta: Tensor) -> Tensor:
    """log Bin(y; n, sigmoid η)."""
    return y * logsigmoid(eta) + (n - y) * logsigmoid(-eta)


def student(x: Tensor, mean: Tensor, log_scale: Tensor, freedom: float = 4.0) -> Tensor:
    """log t(x; mean, scale)."""
    z2 = ((x - mean) * torch.exp(-log_scale)).square()
    return -0.5 * (freedom + 1) * torch.log1p(z2 / freedom) - log_scale


def log_cosh(x: Tensor) -> Tensor:
    """Of the inverse hyperbolic tangent of a correlation r this is -½ log(1 - r²)."""
    return x + softplus(-2 * x) - math.log(2)


def pairs(x: Tensor, y: Tensor, log_sds: Tensor, partial: Tensor) -> Tensor:
    """log N((x, y); 0, Σ), Σ of two sds and of the correlation tanh(partial): (*batch, n), (*batch, 2), (*batch, 1)."""
    u, v = x * torch.exp(-log_sds[..., :1]), y * torch.exp(-log_sds[..., 1:])
    across = u * torch.cosh(partial) - v * torch.sinh(partial)
    return -0.5 * (across.square() + v.square()) + log_cosh(partial) - log_sds.sum(-1, keepdim=True)


# ---------------------------------------------------------------- volume 1


def seeds() -> Example:
    """Germination of seeds on 21 plates (Crowder 1978), BUGS volume 1, Seeds: vol1/seeds/seeds.stan; D = 26, centred.

    r_i ~ Bin(n_i, logit⁻¹(x_i a + b_i)), b_i ~ N(0, s²), a ~ N(0, 1000²), 1/s² ~ Gamma(.001, .001); x_i is 1, the kind
    of seed, the root extract and their product.  theta = (a, log s, b).
    """
    r = counts("10 23 23 26 17 5 53 55 32 46 10 8 10 8 23 0 3 22 15 32 3")
    n = counts("39 62 81 51 39 6 74 72 51 79 13 16 30 28 45 4 12 41 30 51 7")
    kind = counts("0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1 1 1")
    extract = counts("0 0 0 0 0 1 1 1 1 1 1 0 0 0 0 0 1 1 1 1 1")
    X = torch.stack([torch.ones_like(kind), kind, extract, kind * extract])

    def log_joint(theta: Tensor) -> Tensor:
        a, log_s, b = theta.split([4, 1, 21], -1)
        top = normal(a, 0.0, math.log(1e3)).sum(-1) + precision(log_s)[..., 0]
        return top + (normal(b, 0.0, log_s) + binomial(r, n, a @ X + b)).sum(-1)

    return 26, log_joint


def dyes() -> Example:
    """Yields of dyestuff in six batches (Davies 1967), BUGS volume 1, Dyes: vol1/dyes/dyes.stan; D = 9, centred.

    y_ij ~ N(b_i, w²), b_i ~ N(m, s²), m ~ N(0, 1e5²), 1/s², 1/w² ~ Gamma(.001, .001).  theta = (m, log s, log w, b).
    """
    y = counts(
        "1545 1440 1440 1520 1580 1540 1555 1490 1560 1495 1595 1550 1605 1510 1560 "
        "1445 1440 1595 1465 1545 1595 1630 1515 1635 1625 1520 1455 1450 1480 1445"
    ).unflatten(0, (6, 5))

    def log_joint(theta: Tensor) -> Tensor:
        m, log_s, log_w, b = theta.split([1, 1, 1, 6], -1)
        top = (normal(m, 0.0, math.log(1e5)) + precision(log_s) + precision(log_w))[..., 0]
        return top + normal(b, m, log_s).sum(-1) + normal(y, b[..., None], log_w[..., None]).sum((-2, -1))

    return 9, log_joint


def stacks() -> Example:
    """Loss of ammonia from a plant, 21 days (Brownlee 1965), BUGS volume 1, Stacks: vol1/stacks/stacks_f_t4_ridge.stan.

    y ~ t_4(a + z b, s), a ~ N(0, 316²), b ~ N(0, f), f ~ Gamma(.01, .01), s² ~ InvGamma(.001, .001), z standardised:
    ridge regression with errors of long tails.  theta = (a, b of air, water and acid, log s, log f), D = 6.
    """
    y = counts("43 37 37 28 18 18 19 20 15 14 14 13 11 12 8 7 8 8 9 15 15")
    air = counts("80 80 75 62 62 62 62 62 59 58 58 58 58 58 50 50 50 50 50 56 70")
    water = counts("27 27 25 24 22 23 24 24 23 18 18 17 18 19 18 18 19 19 20 20 20")
    acid = counts("89 88 90 87 87 87 93 93 87 80 89 88 82 93 89 86 72 79 80 82 91")
    z = torch.stack([(x - x.mean()) / x.std() for x in (air, water, acid)])

    def log_joint(theta: Tensor) -> Tensor:
        a, b, log_s, log_f = theta.split([1, 3, 1, 1], -1)
        top = normal(a, 0.0, math.log(316)) + precision(log_s) + 0.01 * (log_f - log_f.exp())
        return top[..., 0] + normal(b, 0.0, 0.5 * log_f).sum(-1) + student(y, a + b @ z, log_s).sum(-1)

    return 6, log_joint


def blocker() -> Example:
    """Beta-blockers in 22 trials (Yusuf et al. 1985), BUGS volume 1, Blockers: vol1/blocker/blocker.stan; D = 47.

    rc_i ~ Bin(nc_i, logit⁻¹ m_i), rt_i ~ Bin(nt_i, logit⁻¹(m_i + e_i)), e_i ~ t_4(d, s), and one e more of a new trial;
    m_i ~ N(0, 1e5), d ~ N(0, 1000²), s² ~ InvGamma(.001, .001).  theta = (d, log s, m, e of 22 trials and the new one).
    """
    rt = counts("3 7 5 102 28 4 98 60 25 138 64 45 9 57 25 33 28 8 6 32 27 22")
    nt = counts("38 114 69 1533 355 59 945 632 278 1916 873 263 291 858 154 207 251 151 174 209 391 680")
    rc = counts("3 14 11 127 27 6 152 48 37 188 52 47 16 45 31 38 12 6 3 40 43 39")
    nc = counts("39 116 93 1520 365 52 939 471 282 1921 583 266 293 883 147 213 122 154 134 218 364 674")

    def log_joint(theta: Tensor) -> Tensor:
        d, log_s, m, e = theta.split([1, 1, 22, 23], -1)
        top = (normal(d, 0.0, math.log(1e3)) + precision(log_s))[..., 0] + student(e, d, log_s).sum(-1)
        likelihood = binomial(rc, nc, m) + binomial(rt, nt, m + e[..., :-1])
        return top + (normal(m, 0.0, 0.5 * math.log(1e5)) + likelihood).sum(-1)

    return 47, log_joint


def salm() -> Example:
    """Colonies of salmonella by dose of quinoline (Breslow 1984), BUGS volume 1, Salm: vol1/salm/salm.stan; D = 22.

    y_ij ~ Poisson(exp(a + b log(x_i + 10) + c x_i + e_ij)), both terms centred, e_ij ~ N(0, s²), a, b, c ~ N(0, 1000²),
    1/s² ~ Gamma(.001, .001); the dose is in its own units, up to 1000.  theta = (a, b, c, log s, e).
    """
    y = counts("15 21 29 16 18 21 16 26 33 27 41 60 33 38 41 20 27 42")
    dose = counts("0 10 33 100 333 1000").repeat_interleave(3)
    X = torch.stack([torch.ones_like(dose), (dose + 10).log(), dose])
    X[1:] -= X[1:].mean(-1, keepdim=True)

    def log_joint(theta: Tensor) -> Tensor:
        a, log_s, e = theta.split([3, 1, 18], -1)
        top = normal(a, 0.0, math.log(1e3)).sum(-1) + precision(log_s)[..., 0]
        return top + (normal(e, 0.0, log_s) + poisson(y, a @ X + e)).sum(-1)

    return 22, log_joint


def leuk() -> Example:
    """Remissions of 42 children with leukaemia (Freireich 1963), BUGS volume 1, Leuk: vol1/leuk/leuk.stan; D = 18.

    Cox's regression by counts: dN_ij ~ Poisson(exp(b z_i) h_j) of those still at risk at time j, increments of the
    hazard h_j ~ Gamma(.0001 (t_{j+1} - t_j), .001), b ~ N(0, 1000²), z = ±½ the placebo.  theta = (b, log h).
    """
    time = counts(
        "1 1 2 2 3 4 4 5 5 8 8 8 8 11 11 12 12 15 17 22 23 6 6 6 6 7 9 10 10 11 13 16 17 19 20 22 23 25 32 32 34 35"
    )
    fails = counts("1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 0 1 0 1 0 0 1 1 0 0 0 1 1 0 0 0 0 0")
    t = counts("1 2 3 4 5 6 7 8 10 11 12 13 15 16 17 22 23 35")
    z = torch.tensor([0.5, -0.5], dtype=torch.float64).repeat_interleave(21)
    risk = (time[:, None] >= t[:-1]).double()
    fell = fails[:, None] * risk * (time[:, None] < t[1:])

    def log_joint(theta: Tensor) -> Tensor:
        b, log_h = theta[..., :1], theta[..., 1:]
        prior = 1e-4 * t.diff() * log_h - 1e-3 * log_h.exp()
        eta = (b * z)[..., None] + log_h[..., None, :]
        likelihood = (fell * eta - risk * eta.exp()).sum((-2, -1))
        return normal(b[..., 0], 0.0, math.log(1e3)) + prior.sum(-1) + likelihood

    return 18, log_joint


def mice() -> Example:
    """Survival of 80 mice in four groups (Grieve 1987), BUGS volume 1, Mice: vol1/mice/mice.stan; D = 20.

    t_i ~ Weibull(r, exp(-b_g/r)), of which 15 are censored: c_i u_i ~ the same, u_i > 1 sampled; b_g ~ N(0, 100²),
    r ~ Exp(.001).  theta = (log r, b, log(u - 1)).
    """
    times = counts(
        "12 17 21 25 11 26 27 30 13 12 21 20 23 25 23 29 35 31 36 32 27 23 12 18 38 29 30 32 25 30 37 27 22 26 28 19 "
        "15 12 35 35 10 22 18 12 31 24 37 29 27 18 22 13 18 29 28 16 22 26 19 17 28 26 12 17 26"
    )
    ends = counts("40 40 40 40 40 40 40 40 10 24 40 40 20 29 10").log()
    sizes = torch.tensor([19, 13, 16, 17, 1, 7, 4, 3])
    group = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]).repeat_interleave(sizes)

    def log_joint(theta: Tensor) -> Tensor:
        log_r, b, gap = theta.split([1, 4, 15], -1)
        log_t = torch.cat([times.log().expand(*theta.shape[:-1], 65), ends + softplus(gap)], -1)
        z = b[..., group] + log_r.exp() * log_t
        top = (log_r - 1e-3 * log_r.exp())[..., 0] + normal(b, 0.0, math.log(100)).sum(-1)
        return top + (log_r + z - log_t - z.exp()).sum(-1) + gap.sum(-1)

    return 20, log_joint


def kidney() -> Example:
    """Infections of 38 patients (McGilchrist 1991), BUGS volume 1, Kidney: vol1/kidney/kidney.stan; D = 46.

    Two times each, t_ij ~ Weibull(r, exp(-η_ij/r)) or later, η_ij = a x_ij + b_i; x = 1, age, sex and three diseases, a
    ~ N(0, 100²), b_i ~ N(0, s²), 1/s² ~ Gamma(.001, .001), r ~ Gamma(1, .001).  theta = (a, log r, log s, b), centred.
    """
    times = counts(  # censored ones with a minus
        "8 23 22 447 30 24 7 511 53 15 7 141 96 -149 536 17 185 292 -22 15 152 402 13 39 12 -113 132 34 2 130 27 -5 "
        "152 190 119 -54 -6 63 16 -13 28 318 12 245 9 30 196 154 333 -8 38 -70 -25 -4 177 114 -159 -108 562 -24 66 -46 "
        "40 201 156 30 25 26 58 43 30 -5 8 -16 78 -8"
    ).unflatten(0, (2, 38))
    ages = counts(
        "28 48 32 31 10 16 51 55 69 51 44 34 35 42 17 60 60 43 53 44 46 30 62 42 43 57 10 52 53 54 56 50 57 44 22 42 "
        "52 60 28 48 32 32 10 17 51 56 69 52 44 34 35 42 17 60 60 44 53 44 47 30 63 43 43 58 10 52 53 54 56 51 57 45 "
        "22 42 52 60"
    ).unflatten(0, (2, 38))
    disease = counts("1 2 1 1 1 1 2 2 3 2 3 1 3 3 1 3 1 1 2 1 4 1 3 3 3 3 2 3 2 2 3 3 4 2 1 1 4 4").expand(2, -1)
    sex = counts("0 1 0 1 0 1 0 1 1 0 1 1 1 1 1 0 1 1 1 1 0 1 1 1 0 1 1 1 0 1 1 1 1 1 1 1 1 0").expand(2, -1)
    X = torch.stack([torch.ones_like(ages), ages, sex, *((disease == k).double() for k in (2, 3, 4))])
    seen, log_t = (times > 0).double(), times.abs().log()

    def log_joint(theta: Tensor) -> Tensor:
        a, log_r, log_s, b = theta.split([6, 1, 1, 38], -1)
        top = normal(a, 0.0, math.log(100)).sum(-1) + (log_r - 1e-3 * log_r.exp() + precision(log_s))[..., 0]
        eta = torch.einsum("...k,kji->...ji", a, X) + b[..., None, :]
        z = eta + log_r.exp()[..., None] * log_t
        return top + normal(b, 0.0, log_s).sum(-1) + (seen * (log_r[..., None] + z) - z.exp()).sum((-2, -1))

    return 46, log_joint


def magnesium() -> Example:
    """Eight trials of magnesium under six priors at once, BUGS volume 1, Magnesium: vol1/magnesium/magnesium.stan.

    For each prior k: rc_i ~ Bin(nc_i, p_i), rt_i ~ Bin(nt_i, logit⁻¹(logit p_i + e_i)), p_i uniform, e_i ~ N(m, t²), m
    ~ U(-10, 10); 1/t² ~ Gamma(.001, .001), t² ~ U(0, 50), t ~ U(0, 50), s²/(s² + t²) ~ U(0, 1), s/(s + t) ~ U(0, 1), t²
    ~ N⁺(0, s²/Φ(.75)), s² = .127.  theta = (six logits of m, log t, logits of the four uniform ones, log t², 48 e, 48
    logits of p), D = 108, centred.
    """
    rt, nt = counts("1 9 2 1 10 1 1 90"), counts("40 135 200 48 150 59 25 1159")
    rc, nc = counts("2 23 7 1 8 9 3 118"), counts("36 135 200 46 148 56 23 1157")
    log_s = 0.5 * math.log(0.1272041)
    scale = math.sqrt(0.1272041 / (0.5 + 0.5 * math.erf(0.75 / math.sqrt(2))))

    def log_joint(theta: Tensor) -> Tensor:
        m, x, e, p = theta.split([6, 6, 48, 48], -1)
        e, p, log_50 = e.unflatten(-1, (6, 8)), p.unflatten(-1, (6, 8)), math.log(50)
        first, second, third, fourth, fifth, sixth = x.unbind(-1)
        half = 0.5 * (log_50 + logsigmoid(second))
        log_t = torch.stack(
            [first, half, log_50 + logsigmoid(third), log_s - 0.5 * fourth, log_s - fifth, 0.5 * sixth], -1
        )[..., None]
        top = uniform(m).sum(-1) + precision(first) + uniform(x[..., 1:5]).sum(-1) + half_normal(sixth, scale)
        prior = normal(e, 20 * m.sigmoid()[..., None] - 10, log_t) + uniform(p)
        return top + (prior + binomial(rc, nc, p) + binomial(rt, nt, p + e)).sum((-2, -1))

    return 108, log_joint


# ---------------------------------------------------------------- volume 2


def air() -> Example:
    """Illness by nitrogen dioxide (Whittemore and Keller 1988), BUGS volume 2, Air: vol2/air/air.stan; D = 5.

    y_j ~ Bin(n_j, logit⁻¹(a + b x_j)), the true x_j ~ N(4.48 + .76 z_j, 81.14), a, b ~ N(0, 32²).  theta = (a, b, x).
    """
    y, n, z = counts("21 20 15"), counts("48 34 21"), counts("10 30 50")

    def log_joint(theta: Tensor) -> Tensor:
        a, b, x = theta.split([1, 1, 3], -1)
        prior = normal(theta[..., :2], 0.0, math.log(32)).sum(-1)
        return prior + (normal(x, 4.48 + 0.76 * z, 0.5 * math.log(81.14)) + binomial(y, n, a + b * x)).sum(-1)

    return 5, log_joint


def beetles() -> Example:
    """Beetles killed by a gas (Bliss 1935), BUGS volume 2, Beetles: vol2/beetles/beetles_cloglog.stan; D = 2.

    r_i ~ Bin(n_i, 1 - exp(-exp(a + b x_i))), x centred, a, b ~ N(0, 1e4²).  theta = (a, b).
    """
    r, n = counts("6 13 18 28 52 53 61 60"), counts("59 60 62 56 63 59 62 60")
    x = counts("1.6907 1.7242 1.7552 1.7842 1.8113 1.8369 1.861 1.8839")
    x = x - x.mean()

    def log_joint(theta: Tensor) -> Tensor:
        eta = theta[..., :1] + theta[..., 1:] * x
        small = eta < -20  # the logarithm of 1 - exp(-exp η) is η there, and 0 above 4
        yes = torch.where(small, eta, torch.log(-torch.expm1(-eta.clamp(-20, 4).exp())))
        return normal(theta, 0.0, math.log(1e4)).sum(-1) + (r * yes - (n - r) * eta.exp()).sum(-1)

    return 2, log_joint


def alli() -> Example:
    """Food of 219 alligators by lake and size (Agresti 1990), BUGS volume 2, Alligators: vol2/alli/alli2.stan; D = 28.

    A multinomial logit as Poisson counts: X_ijk ~ Poisson(exp(l_ij + a_k + b_ik + c_jk)) of four lakes, two sizes and
    five foods, the first of each nought, all N(0, 320²).  theta = (a, b by lake, c, l by lake).
    """
    X = counts("23 4 2 2 8 7 0 1 3 5 5 11 1 0 3 13 8 6 1 0 5 11 2 1 5 8 7 6 3 5 16 19 1 2 3 17 1 0 1 3").unflatten(
        0, (4, 2, 5)
    )

    def log_joint(theta: Tensor) -> Tensor:
        a, b, c, own = theta.split([4, 12, 4, 8], -1)
        food = pad(a, (1, 0))[..., None, None, :]
        lake = pad(b.unflatten(-1, (3, 4)), (1, 0, 1, 0))[..., :, None, :]
        size = pad(c[..., None, :], (1, 0, 1, 0))[..., None, :, :]
        eta = own.unflatten(-1, (4, 2))[..., None] + food + lake + size
        return normal(theta, 0.0, math.log(320)).sum(-1) + poisson(X, eta).sum((-3, -2, -1))

    return 28, log_joint


def dugongs() -> Example:
    """Lengths of 27 dugongs by age (Ratkowsky 1983), BUGS volume 2, Dugongs: vol2/dugongs/dugongs.stan; D = 4.

    y ~ N(a - b g^x, s²), a, b ~ N(0, 1000²), g ~ U(½, 1), 1/s² ~ Gamma(.0001, .0001).  theta = (a, b, logit(2g - 1),
    log s).
    """
    x = counts("1 1.5 1.5 1.5 2.5 4 5 5 7 8 8.5 9 9.5 9.5 10 12 12 13 13 14.5 15.5 15.5 16.5 17 22.5 29 31.5")
    y = counts(
        "1.8 1.85 1.87 1.77 2.02 2.27 2.15 2.26 2.47 2.19 2.26 2.4 2.39 2.41 2.5 2.32 2.32 2.43 2.47 2.56 2.65 2.47 "
        "2.64 2.56 2.7 2.72 2.57"
    )

    def log_joint(theta: Tensor) -> Tensor:
        a, b, u, log_s = theta.split(1, -1)
        mean = a - b * (0.5 + 0.5 * u.sigmoid()) ** x
        top = (uniform(u) + precision(log_s, 1e-4))[..., 0] + normal(theta[..., :2], 0.0, math.log(1e3)).sum(-1)
        return top + normal(y, mean, log_s).sum(-1)

    return 4, log_joint


def birats() -> Example:
    """Weights of 30 rats in five weeks (Gelfand et al. 1990), BUGS volume 2, Birats: vol2/birats/birats.stan; D = 66.

    y_it ~ N(a_i + b_i x_t, w²), (a_i, b_i) ~ N(m, Σ), m ~ N(0, 100²), w² ~ InvGamma(.001, .001), Σ ~ InvWishart(2,
    diag(.005, 5)); x in days, not centred.  theta = (m, log sds of Σ, atanh of its correlation, log w, a, b), centred.
    """
    y = counts(
        "151 199 246 283 320 145 199 249 293 354 147 214 263 312 328 155 200 237 272 297 135 188 230 280 323 "
        "159 210 252 298 331 141 189 231 275 305 159 201 248 297 338 177 236 285 350 376 134 182 220 260 296 "
        "160 208 261 313 352 143 188 220 273 314 154 200 244 289 325 171 221 270 326 358 163 216 242 281 312 "
        "160 207 248 288 324 142 187 234 280 316 156 203 243 283 317 157 212 259 307 336 152 203 246 286 321 "
        "154 205 253 298 334 139 190 225 267 302 146 191 229 272 302 157 211 250 285 323 132 185 237 286 331 "
        "160 207 257 303 345 169 216 261 295 333 157 205 248 289 316 137 180 219 258 291 153 200 244 286 324"
    ).unflatten(0, (30, 5))
    x, omega = counts("8 15 22 29 36"), counts("0.005 5")

    def log_joint(theta: Tensor) -> Tensor:
        m, log_sds, partial, log_w, a, b = theta.split([2, 2, 1, 1, 30, 30], -1)
        trace = torch.cosh(partial).square() * omega * torch.exp(-2 * log_sds)
        wishart = (-2 * log_sds - 0.5 * trace).sum(-1) + 3 * log_cosh(partial)[..., 0]
        top = normal(m, 0.0, math.log(100)).sum(-1) + precision(log_w)[..., 0] + wishart
        effects = pairs(a - m[..., :1], b - m[..., 1:], log_sds, partial).sum(-1)
        mean = a[..., None] + b[..., None] * x
        return top + effects + normal(y, mean, log_w[..., None]).sum((-2, -1))

    return 66, log_joint


def orange() -> Example:
    """Growth of five orange trees (Draper and Smith 1981), BUGS volume 2, Otrees: vol2/orange/orange.stan; D = 22.

    y_kn ~ N(e^p / (1 + (e^q - 1) exp(-e^r x_n)), w²), (p, q, r)_k ~ N(m, diag s²), m ~ N(0, 100²), 1/s², 1/w² ~
    Gamma(.001, .001); x in days, up to 1582.  theta = (m, log s, log w, 15 p, q, r by tree), centred.
    """
    x = counts("118 484 664 1004 1231 1372 1582")
    y = counts(
        "30 58 87 115 120 142 145 33 69 111 156 172 203 203 30 51 75 108 115 139 140 32 62 112 167 179 209 214 "
        "30 49 81 125 142 174 177"
    ).unflatten(0, (5, 7))

    def log_joint(theta: Tensor) -> Tensor:
        m, log_s, log_w, local = theta.split([3, 3, 1, 15], -1)
        local = local.unflatten(-1, (5, 3))
        top = normal(m, 0.0, math.log(100)).sum(-1) + precision(log_s).sum(-1) + precision(log_w)[..., 0]
        prior = normal(local, m[..., None, :], log_s[..., None, :]).sum((-2, -1))
        height, start, rate = local[..., None].unbind(-2)
        fallen = -rate.exp() * x
        mean = height.exp() / (1 + torch.exp(start + fallen) - fallen.exp())
        return top + prior + normal(y, mean, log_w[..., None]).sum((-2, -1))

    return 22, log_joint


def ice() -> Example:
    """Breast cancer in Iceland by age and cohort (Breslow and Clayton 1993), BUGS volume 2, Ice: vol2/ice/ice.stan.

    cases ~ Poisson(years exp(a_age + b_cohort)), a_1 = 0, a ~ N(0, 1000²), b_k ~ N(2 b_{k-1} - b_{k-2}, s²), the first
    two N(0, (1000 s)²), s ~ U(0, 1).  theta = (12 a, 11 b, logit s), D = 24.
    """
    cases = counts(
        "2 0 1 1 1 2 0 2 1 1 5 5 1 1 3 7 12 10 6 11 9 14 20 14 7 14 22 25 29 37 21 11 29 33 57 24 15 8 22 27 38 52 "
        "10 15 22 26 47 31 8 11 17 23 31 38 8 10 24 30 53 26 5 3 10 18 22 30 1 7 11 26 32 17 5 8 17 32 31"
    )
    years = counts(
        "41380 43650 49810 58105 57105 76380 39615 42205 48315 56785 55965 33955 29150 38460 40810 47490 55720 55145 "
        "27950 37375 39935 46895 54980 27810 25055 27040 36400 39355 46280 54350 24040 26290 35480 38725 45595 25710 "
        "22890 23095 25410 34420 37725 44740 21415 21870 24240 33175 36345 21320 17450 19765 20255 22760 31695 34705 "
        "15350 17720 18280 20850 29600 15635 9965 12850 15015 15725 18345 26400 8175 11020 13095 14050 16480 10885 "
        "7425 10810 12260 14780 13600"
    )
    first = (5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0, 0)  # the first cohort of each age; six of each, but for the last
    age = torch.arange(13).repeat_interleave(6)[:77]
    cohort = torch.tensor([start + k for start in first for k in range(6)])[:77]

    def log_joint(theta: Tensor) -> Tensor:
        a, b, u = theta.split([12, 11, 1], -1)
        log_s = logsigmoid(u)
        prior = normal(b[..., :2], 0.0, log_s + math.log(1e3)).sum(-1)
        prior = prior + normal(b[..., 2:], 2 * b[..., 1:-1] - b[..., :-2], log_s).sum(-1)
        eta = pad(a, (1, 0))[..., age] + b[..., cohort] + years.log()
        return uniform(u)[..., 0] + normal(a, 0.0, math.log(1e3)).sum(-1) + prior + poisson(cases, eta).sum(-1)

    return 24, log_joint


# ---------------------------------------------------------------- volume 3, and others of the folder


def camel() -> Example:
    """Twelve pairs with one of the two missing in eight (Murray 1977), BUGS volume 3, Camel: vol3/camel/camel.stan.

    (x, y)_i ~ N(0, Σ), Σ of density |Σ|^(-3/2), the missing values sampled; correlations of both signs fit alike.
    theta = (two log sds, atanh of the correlation, four missing y, four missing x), D = 11.
    """
    x, y = counts("1 1 -1 -1 2 2 -2 -2"), counts("1 -1 1 -1 2 2 -2 -2")

    def log_joint(theta: Tensor) -> Tensor:
        log_sds, partial, second, first = theta.split([2, 1, 4, 4], -1)
        batch = theta.shape[:-1]
        first = torch.cat([x.expand(*batch, 8), first], -1)
        second = torch.cat([y[:4].expand(*batch, 4), second, y[4:].expand(*batch, 4)], -1)
        return log_cosh(partial)[..., 0] + pairs(first, second, log_sds, partial).sum(-1)

    return 11, log_joint


def gp_pois() -> Example:
    """Counts on a line with a Gaussian process, of Stan's folder misc: misc/gaussian-process/gp-fit-pois.stan; D = 104.

    y ~ Poisson(exp(a + L z)), L L' = α² exp(-½ d²/ρ²) + 1e-9 I, ρ ~ InvGamma(5, 5), α ~ N⁺(0, 1), a, z ~ N(0, 1).
    theta = (log ρ, log α, a, z), non-centred.
    """
    y = counts(
        "1 4 2 4 5 1 3 3 5 6 4 3 8 3 3 4 3 1 5 4 0 1 1 6 4 7 4 1 4 7 2 6 5 1 4 3 3 1 9 5 2 2 8 11 9 11 2 2 4 7 1 8 9 8 "
        "16 1 3 15 6 12 7 11 8 5 5 5 5 7 5 8 3 1 12 1 2 10 8 5 6 6 3 4 5 4 4 10 5 2 2 4 3 5 9 3 2 6 2 10 3 1 5"
    )
    x = torch.linspace(-2, 2, 101, dtype=torch.float64)
    gap2, jitter = (x[:, None] - x).square(), 1e-9 * torch.eye(101, dtype=torch.float64)

    def log_joint(theta: Tensor) -> Tensor:
        log_rho, log_alpha, rest = theta[..., 0], theta[..., 1], theta[..., 2:]
        kernel = torch.exp(2 * log_alpha[..., None, None] - 0.5 * gap2 * torch.exp(-2 * log_rho)[..., None, None])
        root, bad = torch.linalg.cholesky_ex(kernel + jitter)
        f = rest[..., :1] + (root @ rest[..., 1:, None])[..., 0]
        prior = -5 * (log_rho + torch.exp(-log_rho)) + half_normal(log_alpha) + normal(rest).sum(-1)
        return torch.where(bad > 0, torch.nan, prior + poisson(y, f).sum(-1))

    return 104, log_joint


EXAMPLES: dict[str, Callable[[], Example]] = {
    "seeds": seeds,
    "dyes": dyes,
    "stacks": stacks,
    "blocker": blocker,
    "salm": salm,
    "leuk": leuk,
    "mice": mice,
    "kidney": kidney,
    "magnesium": magnesium,
    "air": air,
    "beetles": beetles,
    "alli": alli,
    "dugongs": dugongs,
    "birats": birats,
    "orange": orange,
    "ice": ice,
    "camel": camel,
    "gp-pois": gp_pois,
}
