"""One logistic discriminator per training image, in host memory, with a lazy sparse Adam (ADDR).

Inside: `Discriminators`, `GatheredRows`.
"""

from itm_fast.training.discriminators.store import Discriminators, GatheredRows

__all__ = ["Discriminators", "GatheredRows"]
