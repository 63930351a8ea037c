"""The published models, by name: `create`, `load`, and `save` on every model."""

from itm_fast.models.base import MatchingModel, config_class, create, load, names
from itm_fast.models.scan import SCAN, SCANConfig
from itm_fast.models.vsepp import VSEPP, VSEPPConfig

__all__ = ["SCAN", "VSEPP", "MatchingModel", "SCANConfig", "VSEPPConfig", "config_class", "create", "load", "names"]
