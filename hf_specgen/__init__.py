"""Exact speculative decoding inside Hugging Face ``generate()``: any batch size, chains and trees."""

from hf_specgen.costs import Costs
from hf_specgen.draft import DenseQ, Draft, Round, SparseQ, Tree, Verdict
from hf_specgen.drafters.base import Drafter
from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.small_model import SmallModel
from hf_specgen.errors import IncompatibleDrafter, SpecGenError, UnsupportedTarget
from hf_specgen.generate import SpeculativeDecoding, SpeculativeMixin, disable, enable, last_stats
from hf_specgen.stats import AcceptanceStats, RowStats

__version__ = "0.1.0"

__all__ = [
    "AcceptanceStats",
    "Costs",
    "DenseQ",
    "Draft",
    "Drafter",
    "IncompatibleDrafter",
    "PromptLookup",
    "Round",
    "RowStats",
    "SmallModel",
    "SparseQ",
    "SpecGenError",
    "SpeculativeDecoding",
    "SpeculativeMixin",
    "Tree",
    "UnsupportedTarget",
    "Verdict",
    "__version__",
    "disable",
    "enable",
    "last_stats",
]
