"""fkl_jax: fused attention for JAX whose scores and masks are programmed in Python."""

from importlib.metadata import version as _version

from ._api import attention as attention
from ._api import attention_with_lse as attention_with_lse
from ._backends import FallbackWarning as FallbackWarning
from ._block_mask import BlockMask as BlockMask
from ._context_parallel import ring_attention as ring_attention
from ._context_parallel import ulysses_attention as ulysses_attention
from ._dot_product_attention import dot_product_attention as dot_product_attention
from ._ffi import export_checks as export_checks
from ._ffi import register as _register
from ._mask_mods import Causal as Causal
from ._mask_mods import DenseMask as DenseMask
from ._mask_mods import MaskMod as MaskMod
from ._mask_mods import Padding as Padding
from ._mask_mods import PrefixLM as PrefixLM
from ._mask_mods import SegmentIds as SegmentIds
from ._mask_mods import SlidingWindow as SlidingWindow
from ._score_mods import ALiBi as ALiBi
from ._score_mods import CallSizes as CallSizes
from ._score_mods import RelativeBias as RelativeBias
from ._score_mods import ScoreMod as ScoreMod
from ._score_mods import SoftCap as SoftCap
from ._score_mods import Temperature as Temperature
from ._zigzag import zigzag_permute as zigzag_permute
from ._zigzag import zigzag_unpermute as zigzag_unpermute

__version__ = _version("fkl_jax")

# The handlers' names must be known before a module that calls them is loaded.
_register()
