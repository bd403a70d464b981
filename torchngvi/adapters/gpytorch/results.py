"""The result of training a sparse GP: a record of each epoch or round, and the verdict on q at the end."""

from dataclasses import dataclass, replace

from torchngvi.fitting.records import FitResult


@dataclass(frozen=True)
class TrainingResult(FitResult):
    """The `FitResult` of training, of which a record is an epoch or a round, with what only training has to tell.

    Its loss is the negative ELBO per datum: the mean over the batches of the last epoch, or that at the optimal q for
    the rows of the last round, less the log priors.  ``reason`` says why training ended, and nothing that the
    hyper-parameters have converged.  ``refined`` is the result of the search for the best q at the last of them, where
    there was one: ``converged``, ``verdict`` and ``certificate`` are of that q, and ``converged`` is false without it.
    ``found`` is "constant" where `train_svgp` ended with a function that says nothing of the targets.
    """

    rejections: int = 0  # natural steps that were not taken
    refined: FitResult | None = None  # the verdict on q, where asked
    interrupted: bool = False  # from the keyboard, within an epoch or a round that is not counted
    unit: str = "epochs"  # or "rounds", of `train_svgp`
    found: str = "function"  # or "constant": `train_svgp` ended no better than a constant function

    @property
    def losses(self) -> list[float]:
        """The negative ELBO per datum of each epoch or round."""
        return [record.loss for record in self.trace]

    def __str__(self) -> str:
        """The result in one line."""
        return self._told("" if self.refined is None else str(self.refined))

    def summary(self) -> str:
        """The result, with the table of the verdict on q; where q was not examined, it is examined now."""
        if self.refined is None:
            return str(self)
        of_q = self.refined.summary()
        object.__setattr__(self, "examination", self.refined.examination)
        return self._told(of_q)

    def refined_by(self, refined: FitResult) -> "TrainingResult":
        """The same with the result of the search for q, which is what the verdicts are on.

        Args:
            refined: that of `refine_svgp`.

        Returns:
            A new result.
        """
        names = "converged", "members_converged", "posterior", "target", "examination", "unexamined"
        return replace(self, refined=refined, **{name: getattr(refined, name) for name in names})

    def _told(self, of_q: str) -> str:
        last = f"negative ELBO per datum {self.losses[-1]:.4f}" if self.losses else "none complete"
        if len(self.losses) > 1:
            before = "an epoch" if self.unit == "epochs" else "a round"
            last += f", {self.losses[-2] - self.losses[-1]:.2g} less than {before} before"
        if self.unit == "epochs":
            last += f", {self.rejections} natural steps not taken"
        last += ", no better than a constant function" if self.found == "constant" else ""
        verdict = f"; q {of_q}" if of_q else ""
        stopped = ", then interrupted" if self.interrupted else ""
        return f"{len(self.losses)} {self.unit}{stopped}, {last}{verdict}"
