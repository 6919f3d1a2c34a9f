"""Text into batches: sources, tokenizer, packing, mixtures and a loader that resumes.

    documents -> tokens on disk, split by document -> rows of seq_len -> mixture -> batches

`open_data` goes all the way. The batches of a run depend on its config and the step alone, not
on how many processes read them. Imports no JAX.
"""

from jaxpp.data.config import CorpusConfig, DataConfig
from jaxpp.data.loader import Data, TrainLoader, open_data
from jaxpp.data.pack import PackedRows
from jaxpp.data.source import SOURCES, Document, read_documents
from jaxpp.data.tokenizer import Tokenizer

__all__ = [
    "SOURCES",
    "CorpusConfig",
    "Data",
    "DataConfig",
    "Document",
    "PackedRows",
    "Tokenizer",
    "TrainLoader",
    "open_data",
    "read_documents",
]
