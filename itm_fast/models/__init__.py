"""The published models, by name: `create`, `load`, and `save` on every model."""

from itm_fast.models.base import MatchingModel, config_class, create, load, names
from itm_fast.models.bfan import BFAN, BFANConfig
from itm_fast.models.scan import SCAN, SCANConfig
from itm_fast.models.sgraf import SGRAF, SGRAFConfig
from itm_fast.models.vsepp import VSEPP, VSEPPConfig

__all__ = [
    "BFAN",
    "SCAN",
    "SGRAF",
    "VSEPP",
    "BFANConfig",
    "MatchingModel",
    "SCANConfig",
    "SGRAFConfig",
    "VSEPPConfig",
    "config_class",
    "create",
    "load",
    "names",
]
