"""Losses as modules, over `itm_fast.functional`."""

from itm_fast.losses.triplet_loss import TripletLoss

__all__ = ["TripletLoss"]
