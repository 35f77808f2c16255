"""accelerate and transformers' Trainer on the backend, as the README says: they use a group that is there already."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pytorch.torch_ranks import finish

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.newest, pytest.mark.timeout(240)]

ON_PACELINE = """
os.environ["LOCAL_RANK"] = str(rank)  # as launchers do
assert dist.get_backend() == "paceline"

def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
"""


def test_accelerate_trains_and_evaluates_as_one_process() -> None:
    code = """
import copy
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
assert (accelerator.num_processes, accelerator.process_index) == (world, rank)

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
plain = copy.deepcopy(net)
data = TensorDataset(torch.randn(23, 8).double(), torch.randn(23, 1).double())

def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

train = torch.utils.data.Subset(data, range(16))
model, optimizer, batches, rest = accelerator.prepare(
    net, optimizer_of(net), DataLoader(train, batch_size=2), DataLoader(data, batch_size=3)
)
assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
alone = optimizer_of(plain)
for _ in range(2):
    steps = zip(batches, DataLoader(train, batch_size=2 * world), strict=True)
    for (x, t), (whole_x, whole_t) in steps:
        optimizer.zero_grad()
        loss = mse_loss(model(x), t)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        alone.zero_grad()
        whole_loss = mse_loss(plain(whole_x), whole_t)
        whole_loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        alone.step()
        torch.testing.assert_close(accelerator.reduce(loss, "mean"), whole_loss)
    same(net.parameters(), plain.parameters())

with torch.no_grad():
    found = [accelerator.gather_for_metrics((model(x), t)) for x, t in rest]  # 23 rows: the ranks' shares differ
    same((torch.cat(ones) for ones in zip(*found)), (plain(data.tensors[0]), data.tensors[1]))
assert gather_object([f"of {rank}"]) == [f"of {other}" for other in range(world)]
assert broadcast_object_list([rank]) == [0]
accelerator.wait_for_everyone()
"""
    finish(2, ON_PACELINE + code, 120)


def test_transformers_trainer_trains_and_evaluates_as_one_process(tmp_path: Path) -> None:
    """A GPT of 1,000 weights, made here."""
    code = f"""
import pytest
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

def arguments(**more):
    return TrainingArguments(
        {str(tmp_path)!r}, use_cpu=True, max_steps=4, per_device_train_batch_size=2, per_device_eval_batch_size=3,
        optim="sgd", learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0.0, save_steps=2, logging_steps=1,
        train_sampling_strategy="sequential", report_to="none", disable_tqdm=True, **more)

def model():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))

def rows(numbers):
    tokens = [torch.arange(n * n, n * n + 8) % 11 for n in numbers]
    first = torch.tensor([-100])  # is predicted from nothing, and not to be counted
    return [dict(input_ids=each, labels=torch.cat([first, each[1:]])) for each in tokens]

def loss_of(net, numbers):
    return net(**torch.utils.data.default_collate(rows(numbers))).loss

try:
    arguments(ddp_backend="paceline")
except ValueError as error:
    assert "paceline is not available, please use gloo" in str(error), error
else:
    raise AssertionError("the name is taken now: the README says that it is refused")
args = arguments()
assert (args.world_size, args.process_index) == (world, rank)
trainer = Trainer(model(), args, train_dataset=rows(range(16)), eval_dataset=rows(range(12)))
trainer.remove_callback(PrinterCallback)
trainer.train()
found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)

plain, expected = model(), []
optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
for step in range(4):
    optimizer.zero_grad()
    loss = loss_of(plain, range(4 * step, 4 * step + 4))  # two rows of each rank
    loss.backward()
    optimizer.step()
    expected.append(loss.item())
same(trainer.model.parameters(), plain.parameters())
assert found == pytest.approx(expected, rel=1e-4)
assert trainer.evaluate()["eval_loss"] == pytest.approx(loss_of(plain, range(12)).item(), rel=1e-5)
"""
    finish(2, ON_PACELINE + code, 120, HF_HUB_OFFLINE="1")


def test_the_hugging_face_example_trains_and_saves_a_model(tmp_path: Path) -> None:
    """examples/torch_huggingface.py as its first lines say to run it; its folder is a model of transformers."""
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    script = Path(__file__).parents[2] / "examples" / "torch_huggingface.py"
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "-n",
        "2",
        str(script),
        "--steps",
        "20",
        "--save",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"step 20: loss ([\d.]+), 2 workers", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 4.0  # 3.2 with the text of Python 3.11; 5.5 is what knows nothing
    net = GPT2LMHeadModel(GPT2Config.from_pretrained(tmp_path))  # `from_pretrained` of a model leaves a thread of tqdm
    assert load_file(tmp_path / "model.safetensors").keys() <= net.state_dict().keys()
