"""torchtitan's Llama-3 debug model on replicas, with a tokenizer and a text that need no download.

torchtitan finds this module by --module llama, and the function by --config debugmodel; every option of torchtitan's
may follow.
"""

from dataclasses import dataclass
from pydoc_data.topics import topics  # pages of Python's manual

from datasets import Dataset
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from paceline_torchtitan import elastic

DATASETS["manual"] = DatasetConfig(
    path="",
    loader=lambda path: Dataset.from_dict({"text": [topics[name] for name in sorted(topics)]}),
    sample_processor=lambda page: page["text"],
)


class Bytes(BaseTokenizer):
    """UTF-8, and two tokens for the begin and the end of a page."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, config, *, tokenizer_path):
        super().__init__()
        self.eos_id = 257

    def encode(self, text, add_bos=False, add_eos=False):
        """Returns a token for each byte."""
        return [256] * add_bos + list(text.encode()) + [257] * add_eos

    def decode(self, tokens):
        """Returns the text."""
        return bytes(token for token in tokens if token < 256).decode()

    def get_vocab_size(self):
        """Returns the number of tokens."""
        return 258


def debugmodel():
    """Returns torchtitan's own configuration, with this text, and a trainer that loses no step when a rank dies."""
    config = llama3_debugmodel()
    config.tokenizer = Bytes.Config()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="manual")
    config.debug.enable_structured_logging = False
    return elastic(config)
