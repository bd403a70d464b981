"""Small problems are fastest on one thread, and steadiest."""

import torch

torch.set_num_threads(1)
