"""The posteriors of posteriordb that have reference draws, as batched log joints in unconstrained space.

    from benchmarks.posteriordb.load import NAMES, load
    posterior = load("kidiq-kidscore_momhs")
    posterior.log_joint(theta)  # (..., D) -> (...), float64

Written from the definitions of the models in posteriordb (Magnusson et al., 2024); data and draws are read
from $TORCHNGVI_DATA/posteriordb.
"""
