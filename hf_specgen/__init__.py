"""Exact speculative decoding inside Hugging Face ``generate()``: any batch size, chains and trees.

Names are imported on first use: the command line answers before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_specgen.checkpoints.card import CardOptions, write_card
    from hf_specgen.checkpoints.config import DrafterConfig
    from hf_specgen.drafters.eagle import EagleDrafter
    from hf_specgen.drafters.eagle3 import Eagle3Drafter
    from hf_specgen.drafters.medusa import MedusaDrafter
    from hf_specgen.drafters.prompt_lookup import PromptLookup
    from hf_specgen.drafters.small_model import SmallModel
    from hf_specgen.drafters.with_lookup import WithLookup
    from hf_specgen.drafting.drafter import Call, Drafter, Reads, Session
    from hf_specgen.drafting.learned import LearnedDrafter
    from hf_specgen.entry import SpeculativeMixin, disable, enable
    from hf_specgen.errors import IncompatibleDrafter, SpecGenError, UnsupportedTarget
    from hf_specgen.generate import SpeculativeDecoding, last_stats
    from hf_specgen.loading import calibrate_aux_layers, describe, load_drafter
    from hf_specgen.models.attention import use_attention
    from hf_specgen.models.prepack import prepack, unpack
    from hf_specgen.ops import use_kernels
    from hf_specgen.round.costs import Costs
    from hf_specgen.round.records import DenseQ, Draft, Round, SparseQ, Tree, Verdict
    from hf_specgen.round.stats import AcceptanceStats, RowStats
    from hf_specgen.round.typical import Typical
    from hf_specgen.stock import StockCandidates, stock_candidates

__version__ = "0.1.0"

__all__ = [
    "AcceptanceStats",
    "Call",
    "CardOptions",
    "Costs",
    "DenseQ",
    "Draft",
    "Drafter",
    "DrafterConfig",
    "Eagle3Drafter",
    "EagleDrafter",
    "IncompatibleDrafter",
    "LearnedDrafter",
    "MedusaDrafter",
    "PromptLookup",
    "Reads",
    "Round",
    "RowStats",
    "Session",
    "SmallModel",
    "SparseQ",
    "SpecGenError",
    "SpeculativeDecoding",
    "SpeculativeMixin",
    "StockCandidates",
    "Tree",
    "Typical",
    "UnsupportedTarget",
    "Verdict",
    "WithLookup",
    "__version__",
    "calibrate_aux_layers",
    "describe",
    "disable",
    "enable",
    "last_stats",
    "load_drafter",
    "prepack",
    "stock_candidates",
    "unpack",
    "use_attention",
    "use_kernels",
    "write_card",
]

_HOME = {
    "checkpoints.card": ("CardOptions", "write_card"),
    "checkpoints.config": ("DrafterConfig",),
    "drafters.eagle": ("EagleDrafter",),
    "drafters.eagle3": ("Eagle3Drafter",),
    "drafters.medusa": ("MedusaDrafter",),
    "drafters.prompt_lookup": ("PromptLookup",),
    "drafters.small_model": ("SmallModel",),
    "drafters.with_lookup": ("WithLookup",),
    "drafting.drafter": ("Call", "Drafter", "Reads", "Session"),
    "drafting.learned": ("LearnedDrafter",),
    "entry": ("SpeculativeMixin", "disable", "enable"),
    "errors": ("IncompatibleDrafter", "SpecGenError", "UnsupportedTarget"),
    "generate": ("SpeculativeDecoding", "last_stats"),
    "loading": ("calibrate_aux_layers", "describe", "load_drafter"),
    "models.attention": ("use_attention",),
    "models.prepack": ("prepack", "unpack"),
    "ops": ("use_kernels",),
    "round.costs": ("Costs",),
    "round.records": ("DenseQ", "Draft", "Round", "SparseQ", "Tree", "Verdict"),
    "round.stats": ("AcceptanceStats", "RowStats"),
    "round.typical": ("Typical",),
    "stock": ("StockCandidates", "stock_candidates"),
}


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name."""
    for module, names in _HOME.items():
        if name in names:
            return vars(import_module(f"hf_specgen.{module}"))[name]
    raise AttributeError(f"module 'hf_specgen' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
