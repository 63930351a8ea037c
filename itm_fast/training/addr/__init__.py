"""ADDR: adversarial training against one discriminator per training image."""
