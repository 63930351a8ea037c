"""Losses as modules, and `register` for losses of your own."""

from itm_fast.losses.binary_loss import BCELoss
from itm_fast.losses.boosting_loss import BoostingLoss
from itm_fast.losses.clipped_sct_loss import ClippedSCTLoss
from itm_fast.losses.cmpm_loss import CMPMLoss
from itm_fast.losses.contrastive_loss import InfoNCELoss, SigLIPLoss
from itm_fast.losses.distillation import DINOLoss, DMLLoss, RKDLoss, SoftRankLoss
from itm_fast.losses.domain_regularization import DomainRegularization
from itm_fast.losses.matching_loss import MatchingBCELoss
from itm_fast.losses.polynomial_loss import PolynomialLoss
from itm_fast.losses.quintuplet_loss import QuintupletLoss
from itm_fast.losses.realignment_loss import RealignmentLoss
from itm_fast.losses.registry import names, register
from itm_fast.losses.self_expanding_loss import SelfExpandingLoss
from itm_fast.losses.triplet_loss import TripletLoss

__all__ = [
    "BCELoss",
    "BoostingLoss",
    "CMPMLoss",
    "ClippedSCTLoss",
    "DINOLoss",
    "DMLLoss",
    "DomainRegularization",
    "InfoNCELoss",
    "MatchingBCELoss",
    "PolynomialLoss",
    "QuintupletLoss",
    "RKDLoss",
    "RealignmentLoss",
    "SelfExpandingLoss",
    "SigLIPLoss",
    "SoftRankLoss",
    "TripletLoss",
    "names",
    "register",
]
