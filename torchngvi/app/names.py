"""The words of the command line's flags, so that its help is there before PyTorch is loaded.

What they stand for is in `torchngvi.registry` and `torchngvi.models`; a test holds the two lists to each other.
"""

FAMILIES = ("bernoulli_logit", "bernoulli_probit", "poisson_log", "gaussian")
METHODS = (
    "vn",
    "srvn",
    "symmetric_srvn",
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

# shorter words for a family
SHORT = {
    "bernoulli": "bernoulli_logit",
    "logistic": "bernoulli_logit",
    "logit": "bernoulli_logit",
    "probit": "bernoulli_probit",
    "poisson": "poisson_log",
    "normal": "gaussian",
}
DISCRETE = ("bernoulli_logit", "bernoulli_probit")  # of two classes
AUTO = "auto"  # the prior precision that the data speak for
