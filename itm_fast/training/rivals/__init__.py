"""Training methods that the papers compare with: AOQ, NCR, Meta-SPN and SAM."""
