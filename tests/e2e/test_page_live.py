"""The page of a real job, in a real browser: workers are killed, come, and are drained, and the page shows it."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from support.browser import browser
from support.command import Command, command
from support.coordinator import run

pytestmark = pytest.mark.needs(what="browser")

TOKEN = "an-operators-token-of-some-length"

JOB = "<script>window.hurt = 1</script> 50% a/b"

TRAIN = """
import time
import numpy as np
import paceline
from paceline import nn

with paceline.join() as session:
    rng = np.random.default_rng(1)
    model = nn.Linear(4, 2, rng=rng)
    ddp = paceline.DDP(model, session.group)
    optimizer = paceline.optim.SGD(model, lr=0.1)
    x = np.ones((96, 4), np.float32)
    sampler = paceline.ElasticSampler(len(x), global_batch=24)
    state = paceline.TrainState(model=model, optimizer=optimizer, sampler=sampler)
    for step in session.steps(state, total=1_000_000):
        with step:
            loss, dy = nn.softmax_cross_entropy(ddp(x[step.indices]), np.zeros(len(step.indices), np.int64))
            optimizer.zero_grad()
            ddp.backward(dy, step.weight)
            time.sleep(0.01)  # a step has some work
            optimizer.step()
"""


@pytest.fixture
def train(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(TRAIN)
    return str(tmp_path / "train.py")


def found(running: Command, pattern: str, words: str) -> str:
    """Waits for some words in what a command says; returns what a pattern finds there."""
    running.wait_for(words)
    match = re.search(pattern, running.stdout + running.stderr)
    assert match is not None, str(running)
    return match[1]


@pytest.mark.timeout(120)
def test_the_page_shows_a_kill_a_newcomer_and_a_drain(train: str) -> None:
    rows = "[...document.querySelectorAll('#workers tbody tr')]"
    trains = f"{rows}.filter((row) => row.cells[5].textContent === 'training').length === 3"

    async def watch(url: str, job: Command) -> None:
        async with browser() as chromium:
            page = await chromium.page(f"{url}#token={TOKEN}")
            await page.until(f"{trains} && Number({rows}[1].querySelector('.step').textContent) > 3")
            assert await page.text("#name") == JOB
            await page.click("th.rank button")  # the rows stay in this order, whichever rank lags
            attempt = "(() => { try { document.body.innerHTML = '<b>' } catch (error) { return error.name } })()"
            assert await page.run(attempt) == "TypeError"  # the browser itself refuses markup from scripts
            generation = int(await page.text("#generations li .number"))
            pid = int(await page.run(f"{rows}[1].cells[2].textContent"))

            os.kill(pid, signal.SIGKILL)
            await page.until(f"/rank 1 .*pid {pid}.*killed by/.test(document.querySelector('#gone').innerText)")
            await page.until(f"/pid {pid}/.test(document.querySelector('#generations li.bad .verdict').innerText)")
            await page.until(f"document.querySelector('#generations li .number').textContent > {generation}")
            await page.until(f"{trains} && !document.querySelector('#workers').textContent.includes({pid})")
            await page.until(
                "/steps.s [0-9.]+/.test(document.querySelector('#plot-steps').innerText.replace('\\n', ' '))"
            )
            assert await page.run("document.querySelectorAll('#plots canvas').length") == 3

            drained = int(await page.run(f"{rows}[2].cells[2].textContent"))
            await page.click("#workers tbody tr:nth-child(3) button")
            await page.click("#menu-drain")
            await page.click("#ask button[value=yes]")
            await page.until(f"/pid {drained}. left after a drain/.test(document.querySelector('#gone').innerText)")
            await page.until(f"{rows}.length === 2")

            await page.click("#drain-job")
            await page.click("#ask button[value=yes]")
            await page.until(f"{rows}.length === 0")
            assert await page.run("typeof window.hurt") == "undefined"
            assert [text for text in page.complaints if "TrustedHTML" not in text] == []
            assert TOKEN not in " ".join(page.requests) + await page.run("location.href")

    with command("coordinator", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", PACELINE_TOKEN=TOKEN) as served:
        url = found(served, r"the page is at (\S+?/)[;\s]", "the page is at")
        address = found(served, r"listens on (127\S+?:\d+)", "listens on")
        world = ("--workers", "3", "--min", "2", "--max", "3", "--restarts", "1", "--job", JOB)
        with command("run", *world, "--coordinator", address, train, PACELINE_TOKEN=TOKEN) as job:
            run(lambda: watch(url, job))
            assert job.wait() == 0, str(job)
