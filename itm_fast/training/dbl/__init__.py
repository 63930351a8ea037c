"""Deep Boosting Learning: the frozen anchor (OAS) and the moving average (MSS)."""
