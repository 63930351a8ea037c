"""Hypothesis strategies for the elements of score matrices. Inside: `VALUES`, `SPECIAL`.

They are apart from `triplet_cases`, which the tests on a GPU import: such a machine may lack Hypothesis.
"""

from __future__ import annotations

import math

from hypothesis import strategies as st

# Few values for small matrices, so that many elements are equal.
VALUES = st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0])
SPECIAL = st.sampled_from([math.nan, math.inf, -math.inf])
