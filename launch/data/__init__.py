"""Text sources, tokenizers and the resumable sample order.

`build_data` turns a `launch.config.DataConfig` into this rank's batches; everything else here is one of its
parts.
"""

from launch.data.batches import Batch, TrainStream, ValidationSet, supervised_tokens
from launch.data.build import Data, build_data
from launch.data.masks import block_diagonal_mask, model_inputs
from launch.data.samples import IGNORE
from launch.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "IGNORE",
    "Batch",
    "ByteTokenizer",
    "Data",
    "HuggingFaceTokenizer",
    "Tokenizer",
    "TrainStream",
    "ValidationSet",
    "block_diagonal_mask",
    "build_data",
    "load_tokenizer",
    "model_inputs",
    "supervised_tokens",
]
