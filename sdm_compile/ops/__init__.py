"""The stages of the algorithm, each a registered `torch.library` op, and the public functions over them."""

from .checks import UnsupportedConfigurationError
from .decode import sdm_decode_step
from .dispatch import Dispatch, LastDispatch, last_dispatch
from .repeats import repeated_write_slots
from .row_quant import snapshot_dequantize, snapshot_quantize
from .topk import product_key_topk
from .write_read import sdm_write_read, sdm_write_read_

__all__ = [
    "Dispatch",
    "LastDispatch",
    "UnsupportedConfigurationError",
    "last_dispatch",
    "product_key_topk",
    "repeated_write_slots",
    "sdm_decode_step",
    "sdm_write_read",
    "sdm_write_read_",
    "snapshot_dequantize",
    "snapshot_quantize",
]
