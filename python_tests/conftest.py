"""Settings of the whole test run."""

import torch

# The tests' tensors are small: a second thread would cost more than it gives, and many times more on a busy machine.
# What depends on threads sets their number itself.
torch.set_num_threads(1)
