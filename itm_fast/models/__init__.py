"""The published models, by name: `create`, `load`, and `save` on every model."""

from itm_fast.models.base import MatchingModel, config_class, create, load, names
from itm_fast.models.scan import SCAN, SCANConfig

__all__ = ["SCAN", "MatchingModel", "SCANConfig", "config_class", "create", "load", "names"]
