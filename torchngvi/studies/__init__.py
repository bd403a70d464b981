"""What stands behind ``torchngvi compare`` and ``torchngvi reproduce``: the tables and figures of the papers."""
