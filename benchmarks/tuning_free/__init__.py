"""Two hundred synthetic targets, one unchanged default, and the optimizers that are tuned by hand beside it."""
