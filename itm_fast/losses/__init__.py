"""Losses as modules: of scores alone, of scores beside those of an anchor branch, and of features (ADDR)."""

from itm_fast.losses.boosting_loss import BoostingLoss
from itm_fast.losses.cmpm_loss import CMPMLoss
from itm_fast.losses.distillation import DINOLoss, DMLLoss, RKDLoss, SoftRankLoss
from itm_fast.losses.domain_regularization import DomainRegularization
from itm_fast.losses.polynomial_loss import PolynomialLoss
from itm_fast.losses.triplet_loss import TripletLoss

__all__ = [
    "BoostingLoss",
    "CMPMLoss",
    "DINOLoss",
    "DMLLoss",
    "DomainRegularization",
    "PolynomialLoss",
    "RKDLoss",
    "SoftRankLoss",
    "TripletLoss",
]
