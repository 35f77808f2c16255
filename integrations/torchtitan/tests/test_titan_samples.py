"""The trainer asks for samples by their index, so each is used once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from support.blocks import ROOT, blocks

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest, pytest.mark.exhaustive]


def test_the_data_loader_of_the_documents_gives_samples_by_index(tmp_path: Path) -> None:
    from torchtitan.components.dataloader import BaseDataLoader

    from paceline_torchtitan import ElasticTrainer

    (code,) = (block.code for block in blocks(ROOT / "docs/how-to/torchtitan.md") if "__getitem__" in block.code)
    names = {"BaseDataLoader": BaseDataLoader, "dataclass": dataclass, "np": np, "torch": torch, "__name__": __name__}
    exec(code, names)
    np.arange(11, dtype=np.uint16).tofile(tmp_path / "tokens")
    config = names["Tokens"].Config(dataset_path=str(tmp_path / "tokens"))
    loader = config.build(dp_world_size=2, dp_rank=0, tokenizer=None, seq_len=3, local_batch_size=1)
    samples = ElasticTrainer.samples(SimpleNamespace(dataloader=loader))
    assert len(samples) == 3
    inputs, labels = samples[2]
    assert (inputs["input"].tolist(), labels.tolist()) == ([6, 7, 8], [7, 8, 9])
