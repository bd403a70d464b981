"""The words of the command line's flags, so that its help is there before PyTorch is loaded.

What they stand for is in `torchngvi.registry` and `torchngvi.models`; a test holds the two lists to each other.
"""

from torchngvi.messages import BINOMIAL

FAMILIES = ("bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian", "negative_binomial", "student_t")
METHODS = (
    "vn",
    "srvn",
    "symmetric_srvn",
    "newton_cg",
    "iblr",
    "ngvi",
    "snngm",
    "bwgd",
    "svgd",
    "covariance_gd",
    "root_gd",
    "proximal_bbvi",
)
FLAT_METHODS = ("ifvb", "aifvb")
POSTERIORS = ("cholesky", "precision", "natural", "diagonal")
FLAT_POSTERIORS = ("flat_cholesky", "mean_field", "vec", "vech")
STRUCTURES = ("full", "diagonal")
DTYPES = ("float64", "float32")

# families of other libraries, and what to say here
_CLASSES = (
    "Of more than two classes name one against the others, --success CLASS; all of them at once are "
    "torchngvi.models.SoftmaxRegression in Python."
)
_TIMES = "For positive amounts take their logarithms, and say --likelihood gaussian."
ELSEWHERE = {
    "binomial": BINOMIAL,
    "quasipoisson": "Counts that vary more than Poisson's are negative_binomial.",
    **dict.fromkeys(("categorical", "multinomial", "softmax", "ordinal"), _CLASSES),
    **dict.fromkeys(("gamma", "lognormal", "exponential", "weibull"), _TIMES),
    **dict.fromkeys(("huber", "robust", "laplace", "cauchy"), "Noise with heavy tails is student_t."),
}
# the families that a parameter belongs to
PARAMETERS = {
    "noise": ("gaussian", "student_t"),
    "dispersion": ("negative_binomial",),
    "dof": ("student_t",),
}
REAL = ("gaussian", "student_t")  # with the units of the target
DOF = 4.0  # of student_t
DISCRETE = ("bernoulli_logit", "bernoulli_probit")  # of two classes
COUNTS = ("poisson_log", "negative_binomial")  # with the logarithmic link
AUTO = "auto"  # the prior precision that the data speak for
DEFAULT = "default"  # the prior in the units of the data
PRIORS = (DEFAULT, "flat", AUTO)  # words for a prior precision
