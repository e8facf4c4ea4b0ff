"""The stages of the algorithm, each a registered `torch.library` op, and the public functions over them."""

from .checks import UnsupportedConfigurationError
from .decode import sdm_decode_step
from .dispatch import Dispatch, LastDispatch, last_dispatch
from .draft import SDMPending, sdm_commit_, sdm_draft
from .repeats import repeated_write_slots
from .row_quant import snapshot_dequantize, snapshot_quantize
from .topk import product_key_topk
from .write_read import sdm_write_read, sdm_write_read_

__all__ = [
    "Dispatch",
    "LastDispatch",
    "SDMPending",
    "UnsupportedConfigurationError",
    "last_dispatch",
    "product_key_topk",
    "repeated_write_slots",
    "sdm_commit_",
    "sdm_decode_step",
    "sdm_draft",
    "sdm_write_read",
    "sdm_write_read_",
    "snapshot_dequantize",
    "snapshot_quantize",
]
