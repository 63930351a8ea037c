"""Published models by name: `create`, `load`, and `save` on every model."""

from itm_fast.models.base import MatchingModel, config_class, create, load, names, register
from itm_fast.models.bfan import BFAN, BFANConfig
from itm_fast.models.camp import CAMP, CAMPConfig
from itm_fast.models.chan import CHAN, CHANConfig
from itm_fast.models.clip import CLIP, CLIPConfig
from itm_fast.models.dbl import DBL, DBLConfig
from itm_fast.models.esa import ESA, ESAConfig
from itm_fast.models.fdf import FDF, FDF_HOSTS, FDFConfig
from itm_fast.models.fragment_model import Encoded, FragmentModel
from itm_fast.models.laps import LAPS, LAPSConfig
from itm_fast.models.naaf import NAAF, NAAFConfig
from itm_fast.models.oscar import OSCAR, OSCARConfig
from itm_fast.models.pfan import PFAN, PFANConfig
from itm_fast.models.saem import SAEM, SAEMConfig
from itm_fast.models.scan import SCAN, SCANConfig
from itm_fast.models.sgraf import SGRAF, SGRAFConfig
from itm_fast.models.vse_infty import RVSEPP, RVSEPPConfig, VSEInfty, VSEInftyConfig
from itm_fast.models.vsepp import VSEPP, VSEPPConfig
from itm_fast.models.vsrn import VSRN, VSRNConfig

__all__ = [
    "BFAN",
    "CAMP",
    "CHAN",
    "CLIP",
    "DBL",
    "ESA",
    "FDF",
    "FDF_HOSTS",
    "LAPS",
    "NAAF",
    "OSCAR",
    "PFAN",
    "RVSEPP",
    "SAEM",
    "SCAN",
    "SGRAF",
    "VSEPP",
    "VSRN",
    "BFANConfig",
    "CAMPConfig",
    "CHANConfig",
    "CLIPConfig",
    "DBLConfig",
    "ESAConfig",
    "Encoded",
    "FDFConfig",
    "FragmentModel",
    "LAPSConfig",
    "MatchingModel",
    "NAAFConfig",
    "OSCARConfig",
    "PFANConfig",
    "RVSEPPConfig",
    "SAEMConfig",
    "SCANConfig",
    "SGRAFConfig",
    "VSEInfty",
    "VSEInftyConfig",
    "VSEPPConfig",
    "VSRNConfig",
    "config_class",
    "create",
    "load",
    "names",
    "register",
]
