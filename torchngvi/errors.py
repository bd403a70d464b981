"""The exceptions of the library: each message states the rule, what was got, and what to do."""

__all__ = [
    "CalibrationWarning",
    "CheckpointWarning",
    "DivergenceWarning",
    "InputError",
    "PairError",
    "RankError",
    "RejectedStepError",
    "RejectedStepWarning",
    "ScaleWarning",
    "TorchngviError",
    "UnsummedRanksWarning",
]


class TorchngviError(Exception):
    """Base of every exception raised on purpose by torchngvi."""


class InputError(TorchngviError, ValueError):
    """A value, a shape, a file or a setting that cannot be used."""


class PairError(TorchngviError, TypeError):
    """Two parts that cannot work together; the message names both and what to use instead."""


class RankError(TorchngviError, RuntimeError):
    """An error on one of several processes, raised on all of them."""


class RejectedStepError(TorchngviError, RuntimeError):
    """So many steps in a row were not taken that q stands still while the loop around it goes on."""


class RejectedStepWarning(UserWarning):
    """A step that left the positive definite cone or met a non-finite value, and was not taken."""


class DivergenceWarning(UserWarning):
    """A run with a learning rate whose loss, or gradient, is far above that of its start, and stays there."""


class CheckpointWarning(UserWarning):
    """A checkpoint that could not be written; the run goes on, and the earlier checkpoint stays."""


class UnsummedRanksWarning(UserWarning):
    """Several processes step, and no step sums over them what the data of each contribute."""


class CalibrationWarning(UserWarning):
    """What was calibrated is at an end of what was tried, has not moved, or was trained with steps that stayed long."""


class ScaleWarning(UserWarning):
    """Data on another scale than the model begins with, or a fit that is no better than a constant function."""
