"""What stands behind ``torchngvi compare``: settings, runs, logs and figures of several methods side by side."""
