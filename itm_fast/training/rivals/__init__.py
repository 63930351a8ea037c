"""Training methods that the papers compare with: AOQ, NCR and Meta-SPN."""
