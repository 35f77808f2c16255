"""The page of one job in a real browser: stalls, the end, order, hosts, curves from before, what operators ask for."""

from __future__ import annotations

import pytest

from integration.page_looks import CUT_OFF, FIGURES, HEADS, HOSTILE, RANKS, ROWS, TILES, shown
from integration.page_server import add_event, add_gone, add_member, new_job, new_process, page_server
from pacelinepb.v1 import admin_pb2 as pb
from support.browser import browser
from support.coordinator import run

pytestmark = pytest.mark.needs(what="browser")


def test_a_stalled_job_names_the_late_rank_first() -> None:
    async def main() -> None:
        job = new_job(stalled=5.2, stall="rank 1 (host-b) has not entered all_reduce 200")
        sentence = "stalled for 5 s: rank 1 (host-b) has not entered all_reduce 200"
        async with page_server(job, new_job("other")) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await shown(page, sentence, "#stall")
            texts = "[...document.querySelectorAll('main *')].filter((one) => one.checkVisibility() && one.innerText)"
            above = f"{texts}.find((one) => !one.children.length)"
            assert await page.run(f"{above}.id") == "stall"
            amber = "(selector) => getComputedStyle(document.querySelector(selector)).color"
            await page.until("document.querySelector('#plot-goodput b')")
            for place in ("#stall", "#plot-goodput b"):
                assert await page.run(f"({amber})({place!r})") == "rgb(138, 90, 0)"
            assert await page.text("#phase.warn") == "stalled"
            assert (await page.run("document.title")).startswith("digits: stalled")
            assert not await page.run("document.querySelector('#why').checkVisibility()")
            job.summary.ClearField("stalled")
            server.push()
            await shown(page, "training with all 4 workers", "#why")
            assert not await page.run("document.querySelector('#stall').checkVisibility()")
            assert await page.run(f"({amber})('#plot-goodput b')") != "rgb(138, 90, 0)"

            job.summary.stalled.FromSeconds(200)
            await page.go(server.url + "?jobs")
            await shown(page, "stalled for 3 min: rank 1 (host-b)", "#jobs tr.warn .text")
            assert await page.text("#jobs tr.warn .phase.warn") == "stalled"

    run(main)


@pytest.mark.parametrize(
    ("kind", "text", "headline", "phase"),
    [
        ("left", "rank 0 (host-b, pid 1) left the job", "all workers have left", "#phase.calm"),
        (
            "lost",
            "rank 1 (host-c, pid 2) was killed by SIGKILL",
            "no worker is left: rank 1 (host-c, pid 2) was killed by SIGKILL",
            "#phase.bad",
        ),
    ],
)
def test_a_job_without_workers_says_how_it_came_to_that(kind: str, text: str, headline: str, phase: str) -> None:
    async def main() -> None:
        job = new_job(workers=2)
        add_event(job, "lost", "a worker of an earlier generation was lost")
        add_event(job, "view", "generation 1 has begun")
        add_event(job, kind, text)
        add_event(job, "left", "the other one left the job")
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 2")
            del job.members[:]
            job.summary.phase, job.summary.world_size = pb.JOB_PHASE_WAITING, 0
            add_gone(job, 0, "left the job")
            server.refuses = True
            server.push({**server.message("digits"), "over": True})
            server.cut()
            await shown(page, headline, "#why")
            assert await page.text(phase) in ("ended", "stopped")
            await shown(page, "the coordinator has ended", "#connection.calm")
            await shown(page, "left the job", "#gone li.calm")
            assert not await page.run("document.body.classList.contains('stale')")
            assert not page.complaints

    run(main)


_NETWORK_COMES_BACK_DURING_A_REQUEST = """(() => {
    const ask = window.fetch;
    window.fetch = (...what) => {
        window.fetch = ask;
        dispatchEvent(new Event("online"));
        return ask(...what);
    };
})()"""


def test_a_finished_job_stays_shown_when_its_coordinator_ends() -> None:
    async def main() -> None:
        job = new_job()
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 4")
            job.summary.phase = pb.JOB_PHASE_FINISHED
            job.summary.totals.step = 1000
            server.push()
            server.refuses = True
            server.cut()
            await shown(page, "the job is done, and its coordinator has ended", "#connection.calm")
            await shown(page, "done, 1,000 steps", "#why")
            assert await page.text("#phase.calm") == "finished"
            assert await page.run(f"{ROWS}.length") == 4
            assert not await page.run("document.body.classList.contains('stale')")
            await page.run("""(() => {
                window.said = [];
                new MutationObserver(() => said.push(document.querySelector("#connection").textContent))
                    .observe(document.querySelector("#connection"), {childList: true});
            })()""")
            for _ in range(3):  # it asks again, which is seldom by itself, and finds nobody
                await page.run("dispatchEvent(new Event('online'))")
                await server.refusals.acquire()
            await page.run(_NETWORK_COMES_BACK_DURING_A_REQUEST)
            await page.run("dispatchEvent(new Event('online'))")
            for _ in range(2):
                await server.refusals.acquire()
            assert await page.run("said") == []

    run(main)


def test_a_job_without_steps_shows_its_operations() -> None:
    async def main() -> None:
        job = new_job(workers=2)
        job.summary.totals.CopyFrom(pb.JobTotals(operations=12345, operations_per_second=345.6))
        for member in job.members:
            member.progress.step = 0
        async with page_server(job, new_job("other")) as server, browser() as chromium:
            page = await chromium.page(server.url)
            await shown(page, "12,345 operations", "#jobs tbody tr:first-child .progress")
            await shown(page, "346 operations/s", "#jobs tbody tr:first-child .pace")
            await shown(page, "step 40", "#jobs tbody tr:last-child .progress")
            await page.go(server.url + "?job=digits")
            await page.until(f"{FIGURES}.length > 0")
            tiles = await page.run(TILES)
            assert (tiles["progress"], tiles["speed"]) == ("12,345 operations", "346 operations/s")
            assert not any("steps" in name for name in tiles)
            assert await page.run(FIGURES) == ["operations/s", "sent"]
            job.summary.phase = pb.JOB_PHASE_FINISHED
            server.push()
            await page.until("document.querySelector('#why').textContent === 'done'")

    run(main)


def test_problems_come_first_and_headers_sort() -> None:
    async def main() -> None:
        job = new_job(workers=5)
        job.members[3].standing = "silent"
        job.members[2].standing = "leaving"
        job.members[4].progress.step = 20
        for rank, memory in enumerate((3, 1, 0, 2, 5)):
            job.members[rank].progress.memory = memory << 30
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 5")
            assert await page.run(RANKS) == [3, 2, 4, 0, 1]
            asked = "document.querySelector('th.memory').ariaSort"
            for order, ranks in (
                ("ascending", [1, 3, 0, 4, 2]),
                ("descending", [4, 0, 3, 1, 2]),
                (None, [3, 2, 4, 0, 1]),
            ):
                await page.click("th.memory button")
                assert await page.run(RANKS) == ranks
                assert await page.run(asked) == order
            await page.click("th.rank button")
            assert await page.run(RANKS) == [0, 1, 2, 3, 4]

    run(main)


def test_a_click_on_a_host_shows_only_its_workers() -> None:
    async def main() -> None:
        job = new_job(workers=0)
        for rank in range(40):
            add_member(job, rank, host=f"node-{rank // 8}")
        job.members[25].standing = "silent"
        async with page_server(job, new_job("alone", 1)) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 40")
            hosts = "[...document.querySelectorAll('#hosts button')].map((host) => host.innerText.split('\\n')[0])"
            assert await page.run(hosts) == ["node-3", "node-0", "node-1", "node-2", "node-4"]
            dots = "[...document.querySelectorAll('#hosts button:first-child i')].map((dot) => dot.className).join(' ')"
            assert await page.run(dots) == "good bad good good good good good good"
            await page.click("#hosts button:first-child")
            assert await page.run(RANKS) == [25, 24, *range(26, 32)]
            assert await page.run("document.querySelector('#hosts button').ariaPressed") == "true"
            await page.click("#hosts button:first-child")
            assert await page.run(f"{RANKS}.length") == 40
            await page.go(server.url + "?job=alone")
            await page.until(f"{ROWS}.length === 1")
            assert await page.run("document.querySelector('#hosts').hidden")

    run(main)


def test_a_filter_that_no_worker_matches_says_so() -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 4")
            says = "document.querySelector('#no-match').checkVisibility()"
            assert not await page.run(says)
            await page.run("document.querySelector('#filter').focus()")
            await page.type("xyz")
            assert await page.text("#no-match") == "no worker matches 'xyz'"
            await page.click("#hosts button")
            assert await page.text("#no-match") == "no worker on host-b matches 'xyz'"
            await page.run("document.querySelector('#filter').select()")
            await page.type("training")
            assert not await page.run(says)

    run(main)


def test_a_loss_is_one_event_with_the_last_news_of_it() -> None:
    async def main() -> None:
        job = new_job(generation=2)
        who, other = "rank 2 (host-c, pid 7)", "rank 3 (host-d (old), pid 8)"
        for kind, text in (
            ("view", "generation 1 has begun"),
            ("verdict", f"{who} has ended"),
            ("lost", f"{who} has ended"),
            ("lost", f"{other} has ended"),
            ("verdict", "rank 0 has called another collective"),
            ("lost", f"{who} was killed by SIGKILL"),
        ):
            add_event(job, kind, text)
        add_event(job, "lost", f"{who} was killed again", 2)  # in a container each is process 7
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 4")
            texts = "[...document.querySelectorAll('#events .text')].map((text) => text.textContent)"
            assert await page.run(texts) == [
                f"{who} was killed again",
                "rank 0 has called another collective",
                f"{other} has ended",
                f"{who} was killed by SIGKILL",
                "generation 1 has begun",
            ]
            add_event(job, "lost", f"{other} exited with code 1")
            server.push()
            await shown(page, f"{other} exited with code 1", "#events li:nth-child(3)")
            assert await page.run(f"{texts}.length") == 5
            add_event(job, "lost", f"{other} was killed by SIGKILL", at=1.8e9 + 30)  # it was evicted, and lived on
            server.push()
            await shown(page, f"{other} was killed by SIGKILL", "#events li:nth-child(1)")
            assert await page.run(f"{texts}.length") == 6

    run(main)


def test_each_logged_name_has_a_tile_and_the_first_have_plots() -> None:
    async def main() -> None:
        job = new_job()
        for name, value in (
            ("accuracy", 0.912345),
            ("zeta", 12345),
            ("val_loss", float("inf")),
            ("loss", float("nan")),
            ("lr", 3e-5),
        ):
            job.summary.totals.logged[name] = value
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{FIGURES}.length === 7")
            assert await page.run(FIGURES) == ["loss", "val_loss", "accuracy", "lr", "steps/s", "goodput", "sent"]
            tiles = await page.run(TILES)
            named = {name: tiles[name] for name in ("loss", "val_loss", "accuracy", "lr", "zeta")}
            assert named == {
                "loss": "NaN",
                "val_loss": "Infinity",
                "accuracy": "0.9123",
                "lr": "3.00e-5",
                "zeta": "12,345",
            }
            red = "[...document.querySelectorAll('#tiles dd.bad')].map((value) => value.textContent)"
            assert await page.run(red) == ["NaN", "Infinity"]
            assert not page.complaints

    run(main)


def test_plots_begin_before_the_page_was_opened() -> None:
    async def main() -> None:
        job = new_job(generation=3)
        for generation in (1, 2, 3):
            at = 1.8e9 - 1000 * (4 - generation)
            add_event(job, "view", f"generation {generation} has begun", generation, at)
            if generation == 1:
                add_event(job, "verdict", "rank 2 (host-c, pid 7) was lost", generation, at + 900)
        async with page_server(job) as server, browser() as chromium:
            server.history = {
                **{"at": [1.8e9 - 10 * n for n in range(300, 0, -1)], "step": [n // 10 for n in range(300)]},
                **{"operations": [n * 50 for n in range(300)], "goodput": [None] * 10 + [0.9] * 290},
                **{"sent_bytes": {"shm": [n << 20 for n in range(300)]}},
                **{"logged": {"loss": [5.0, 4.0, "NaN"] + [3.0] * 297}},
            }
            page = await chromium.page(server.url + "?job=digits")
            await page.run(
                f"import('{server.url}static/plots.js').then((module) => void (window.plots = module.plots))"
            )
            await page.until("plots.series.points.length === 301")
            assert await page.run("plots.series.values((point) => point.logged.loss).slice(0, 4)") == [5, 4, None, 3]
            assert await page.run("plots.series.rates((point) => point.operations).slice(0, 3)") == [None, 5, 5]
            await page.until("document.querySelectorAll('#plots canvas').length === 4")
            label = await page.run("document.querySelector('#plot-steps .chart').ariaLabel")
            marks = await page.run(
                "[1.8e9 - 2000, 1.8e9 - 1000].map((at) => new Date(1000 * at).toLocaleTimeString([], {hour12: false}))"
            )
            causes = ["generation 2 has begun: rank 2 (host-c, pid 7) was lost", "generation 3 has begun"]
            said = [f"{at}: {text}" for at, text in zip(marks, causes, strict=True)]
            assert label.endswith(f"; at {said[0]}; at {said[1]}"), label
            assert await page.run("document.querySelector('#marks').checkVisibility()")
            for across, mark in ((1 / 3, said[0]), (1 / 2, ""), (2 / 3, said[1])):
                await page.point("#plot-steps .u-over", across)
                await page.until(f"document.querySelector('#plot-steps .mark').textContent === {mark!r}")
                near = [1.8e9 - 3000 + 3000 * across + seconds for seconds in (-20, -10, 0, 10, 20)]  # a pixel is 8 s
                times = f"{near}.map((at) => new Date(1000 * at).toLocaleTimeString([], {{hour12: false}}))"
                assert await page.text("#plot-bytes .time") in await page.run(times), "all plots show the time"
                shown_ones = "[...document.querySelectorAll('.mark')].filter((one) => one.checkVisibility()).length"
                assert await page.run(shown_ones) == bool(mark)
            assert await page.run("document.querySelector('#span button').ariaPressed") == "true"
            await page.click("#span button:last-child")
            label = await page.run("document.querySelector('#plot-steps .chart').ariaLabel")
            assert "generation" not in label, label  # the last of them was 1,000 s ago

            server.cut()  # what happened while it was away
            server.history["at"][-1], server.at = 1.8e9 + 30, 1.8e9 + 60
            await page.until("plots.series.points.length === 303")
            assert not page.complaints

    run(main)


def test_a_long_run_has_a_bounded_number_of_points() -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            page = await chromium.page(server.url + "?jobs")
            points = await page.run(f"""import('{server.url}static/series.js').then(({{ Series }}) => {{
                const series = new Series();
                for (let step = 0; step < 100000; step++) series.add(step / 2, {{ step, sent_bytes: {{}} }});
                return {{ at: series.times(), rates: series.rates((point) => point.step) }};
            }})""")
            gaps = [after - before for before, after in zip(points["at"], points["at"][1:], strict=False)]
            assert len(points["at"]) <= 2000
            assert points["at"][0] == 0
            assert max(gaps) < 4 * 50000 / 1000, "the past is thinned out evenly"
            assert max(gaps[-300:]) == 0.5
            assert set(points["rates"][1:]) == {2}, "also where points are far apart"

    run(main)


def test_rates_begin_anew_when_a_count_falls() -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            page = await chromium.page(server.url + "?jobs")
            rates = await page.run(f"""import('{server.url}static/series.js').then(({{ Series }}) => {{
                const series = new Series();
                [0, 10, 20, 30, 4, 8].forEach((step, at) => series.add(at + 1, {{ step, sent_bytes: {{}} }}));
                return series.rates((point) => point.step);
            }})""")
            assert rates == [None, 10, 10, 10, None, 4]

    run(main)


def test_columns_without_values_are_hidden() -> None:
    async def main() -> None:
        job = new_job(workers=2)
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits", width=1600)
            await page.until(f"{ROWS}.length === 2")
            usual = ["rank", "host", "pid", "step", "behind", "state", "now"]
            assert await page.run(HEADS) == [*usual, "samples/s", "share", "sent", "actions"]
            job.members[0].progress.cpu, job.members[1].progress.memory = 1.42, 1_234_567_890
            for member in job.members:
                member.progress.speed = member.progress.share = 0
            server.push()
            await shown(page, "1.4 cores", "#workers tbody tr:first-child")
            await shown(page, "1.23 GB", "#workers tbody tr:last-child")
            assert await page.run(HEADS) == [*usual, "processor", "memory", "sent", "actions"]
            assert await page.run(CUT_OFF) == []

    run(main)


def test_tiles_show_progress_and_the_last_checkpoint() -> None:
    async def main() -> None:
        job = new_job(total=1000)
        totals = job.summary.totals
        totals.step, totals.steps_per_second = 430, 3.2
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await shown(page, "step 430 of 1,000", "#tiles")
            tiles = await page.run(TILES)
            assert tiles["time left"] == "about 3 min"
            assert "last checkpoint" not in tiles
            totals.checkpoint_step = 400
            totals.checkpoint_ago.FromSeconds(12)
            job.summary.total = 0
            assert "started" not in tiles, "an earlier coordinator has seen it"
            server.started = server.at - 180
            server.push()
            await shown(page, "step 400, 12 s ago", "#tiles")
            tiles = await page.run(TILES)
            start = await page.run(f"new Date({1000 * server.started}).toLocaleTimeString([], {{hour12: false}})")
            assert tiles["started"] == f"{start}, 3 min ago"
            assert tiles["progress"] == "step 430"
            assert "time left" not in tiles

    run(main)


def test_the_output_of_a_worker_is_read_in_a_dialog() -> None:
    async def main() -> None:
        job = new_job(workers=2)
        add_gone(job, 1, "exited with code 1", output=f"step 12\n{HOSTILE}")
        async with page_server(job) as server, browser() as chromium:
            server.answers["output"] = {"lines": ["step 40", HOSTILE], "trouble": ""}
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 2")
            await page.click("#gone summary")
            await shown(page, f"step 12\n{HOSTILE}", "#gone pre")
            await page.click("#workers tbody tr:nth-child(2) button")
            await page.click("#menu-output")
            await shown(page, f"step 40\n{HOSTILE}", "#look[open] pre")
            await shown(page, "Output of rank 1 (", "#look-title")
            server.answers["output"] = {"lines": ["step 41"], "trouble": "its launcher is of an older release"}
            await page.click("#look-refresh")
            await page.until("document.querySelector('#look-text').textContent === 'step 41'")
            assert await page.text("#look-note") == "its launcher is of an older release"
            await page.click("#look-copy")
            await shown(page, "Copied.", "#look #toast")
            del server.answers["output"]
            await page.click("#look-refresh")
            await shown(page, "the worker has not answered", "#look-note")
            await page.press("Escape")
            await page.until(f"document.activeElement.closest('tr') === {ROWS}[1]")
            assert server.asked == ["output?member=m2"] * 3
            assert not page.complaints

    run(main)


def test_stacks_that_are_the_same_are_told_once() -> None:
    async def main() -> None:
        async with page_server(new_job(workers=5)) as server, browser() as chromium:
            wait, work = ["group.py:9 in wait", "train.py:30 in step"], ["data.py:4 in read", "train.py:20 in step"]
            processes = [new_process(rank, work if rank == 3 else wait) for rank in range(4)]
            server.answers["stacks"] = {"processes": [*processes, new_process(4, [], "it does not answer")]}
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 5")
            await page.click("#job-stacks")
            await shown(page, "ranks 0\u20132, all the same:", "#look[open] pre")
            text = await page.text("#look pre")
            assert text.count("group.py:9 in wait") == text.count("data.py:4 in read") == 1
            assert "rank 3 (host-e, pid 4704):" in text
            await shown(page, "rank 4 (host-f, pid 4705): it does not answer", "#look-note")
            await page.click("#look form button:last-child")
            await page.until("!document.querySelector('#look').open")
            await page.click("#workers tbody tr:nth-child(4) button")
            await page.click("#menu-stacks")
            await shown(page, "data.py:4 in read", "#look[open] pre")
            assert server.asked == ["stacks?", "stacks?member=m4"]

    run(main)


def test_a_trace_is_saved_with_the_token_in_a_header() -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            server.token = "secret"
            page = await chromium.page(server.url + "?job=digits#token=secret")
            await page.until(f"{ROWS}.length === 4")
            await page.click("#job-trace")
            await shown(page, "no trace: the worker has not answered", "#toast.bad")
            server.answers["trace"] = {"traceEvents": []}
            await page.run("""(() => {
                const real = URL.createObjectURL;
                URL.createObjectURL = (blob) => real.call(URL, (window.blob = blob));
                HTMLAnchorElement.prototype.click = function () { window.saved = this.download };
            })()""")
            await page.click("#job-trace")
            await shown(page, "digits.trace.json is saved: open it at https://ui.perfetto.dev", "#toast.good")
            assert await page.run("blob.text()") == '{"traceEvents": []}'
            assert await page.run("saved") == "digits.trace.json"
            assert not any("secret" in request for request in page.requests)

    run(main)


def test_rows_are_shown_while_the_plots_do_not_load() -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            server.silent = "uPlot"
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 4")
            await page.until(f"{FIGURES}.length === 3")
            server.silent = ""
            await page.until("document.querySelectorAll('#plots canvas').length === 3")

    run(main)


@pytest.mark.parametrize("held", ["api/stream", "words.js"])
def test_a_request_that_the_browser_holds_for_ever_is_made_again(held: str) -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            page = await chromium.page(server.url + "static/icon.svg")
            server.silent = held
            await page.run(f"void (location.href = '{server.url}?job=digits')")
            await server.swallowed.wait()
            server.silent = ""
            await page.until(f"{ROWS}.length === 4")

    run(main)
