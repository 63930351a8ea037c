"""FDF: realignment training, its queue of earlier batches, and realignment across two models."""
