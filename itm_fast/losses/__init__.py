"""Losses as modules, over `itm_fast.functional`."""

from itm_fast.losses.boosting_loss import BoostingLoss
from itm_fast.losses.triplet_loss import TripletLoss

__all__ = ["BoostingLoss", "TripletLoss"]
