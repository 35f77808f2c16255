"""Trains an adapter (peft) of a small GPT-2 with TRL's SFTTrainer, as a user's script would; see `tune.py`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from paceline_transformers import ElasticTrainer

FOLDER = Path(os.environ["FOLDER"])


class ElasticSFTTrainer(ElasticTrainer, SFTTrainer):  # type: ignore[misc]
    """TRL's trainer on workers that come and go."""


class Told(TrainerCallback):  # type: ignore[misc]
    """Prints losses; kills rank 1 in step 3, once."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"loss {json.dumps([state.global_step, logs['loss']])}", flush=True)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and not state.is_world_process_zero and not (FOLDER / "struck").exists():
            (FOLDER / "struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<end>", pad_token="<end>")


def main() -> None:
    """Trains."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=256)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    texts = [topics[name][: 20 + 3 * number] for number, name in enumerate(sorted(topics)[:40])]
    arguments = SFTConfig(
        str(FOLDER / "adapter"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=6,
        max_length=32,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=6,
        report_to="none",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trainer = (SFTTrainer if os.environ.get("HOST") else ElasticSFTTrainer)(
        GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=byte_tokenizer(),
        peft_config=LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0),
        callbacks=[Told()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
