"""Training data: files of examples to packed batches."""

from jaxglue.data.batch import Batch, TokenDataset
from jaxglue.data.config import DataConfig
from jaxglue.data.iterator import BatchIterator, EvalBatches, Step
from jaxglue.data.prepare import DataReport, PreparedData, prepare_data
from jaxglue.data.tokenizer import load_tokenizer

__all__ = [
    "Batch",
    "BatchIterator",
    "DataConfig",
    "DataReport",
    "EvalBatches",
    "PreparedData",
    "Step",
    "TokenDataset",
    "load_tokenizer",
    "prepare_data",
]
