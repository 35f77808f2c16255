"""The page in a real browser, with jobs that the test makes up: hostile words, many workers, losses, tokens, keys."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from integration.page_looks import CONTRAST, CUT_OFF, HOSTILE, ROWS, shown
from integration.page_server import HeldAnswer, add_event, add_gone, add_member, new_job, new_process, page_server
from pacelinepb.v1 import admin_pb2 as pb
from support.browser import browser
from support.coordinator import run

pytestmark = pytest.mark.needs(what="browser")


def full_job() -> pb.GetJobResponse:
    """A job with one of everything that the page can show."""
    job = new_job(workers=5, generation=2)
    job.summary.min_workers = 2
    job.members[1].standing = "silent"
    job.members[1].silent.FromMilliseconds(1240)
    job.members[2].standing = "leaving"
    job.members[3].progress.step = 30
    job.members[4].progress.doing = "all_reduce"
    add_member(job, None)
    add_gone(job, 1, "was killed by SIGKILL")
    add_event(job, "view", "5 workers train")
    add_event(job, "verdict", "rank 1 (host-b, pid 4711) was killed by SIGKILL")
    add_event(job, "view", "5 workers train from step 31", generation=2)
    job.verdict.text = "rank 1 (host-b, pid 4711) was killed by SIGKILL"
    job.summary.total = 100_000
    job.summary.totals.checkpoint_step = 40
    job.summary.totals.checkpoint_ago.FromSeconds(9)
    for name, value in (("loss", float("nan")), ("a name of many letters, " * 8, 3.25)):
        job.summary.totals.logged[name] = value
    for member in job.members:
        member.progress.cpu, member.progress.memory = 1.4, 12_345_678_901
    return job


def test_hostile_names_are_shown_as_text() -> None:
    async def main() -> None:
        job = new_job(HOSTILE, 1, reason=HOSTILE)
        job.members[0].member.process.host = job.members[0].standing = HOSTILE
        job.members[0].progress.doing = HOSTILE
        job.verdict.text = HOSTILE
        job.summary.totals.logged[HOSTILE] = 1
        add_gone(job, 0, HOSTILE, output=HOSTILE)
        for kind in ("view", "verdict", HOSTILE):
            add_event(job, kind, HOSTILE)
        async with page_server(job, new_job()) as server, browser() as chromium:
            page = await chromium.page(server.url, height=3000)  # rows that are out of sight have no text
            await shown(page, HOSTILE, "#jobs tbody tr:first-child")
            elements = await page.run("document.querySelectorAll('script, img').length")
            await page.click("#jobs tbody a")
            await shown(page, HOSTILE, "#name")
            for place in (
                "#why",
                "#verdict",
                "#gone",
                "#workers tbody",
                "#generations",
                "#events",
                "#standings",
                "#tiles",
                "#plots",
            ):
                await shown(page, HOSTILE, place)
            assert await page.run("document.title.startsWith('<script>')")
            assert await page.run("document.querySelectorAll('script, img').length") == elements
            assert await page.run("typeof window.hurt") == "undefined"
            assert not page.complaints
            assert all(request.startswith(server.url) for request in page.requests), page.requests

    run(main)


def test_only_changed_rows_are_updated_with_1000_workers() -> None:
    async def main() -> None:
        job = new_job(workers=1000)
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 1000")
            await page.run(f"""(() => {{
                window.written = 0;
                const watch = new MutationObserver((changes) => written += changes.length);
                for (const part of ["#workers", "#hosts"])
                    watch.observe(document.querySelector(part), {{subtree: true, childList: true, attributes: true}});
                {ROWS}[500].querySelector("button").focus();
                {ROWS}.forEach((row) => (row.marked = true));
            }})()""")
            job.members[500].progress.step = 30
            server.push()
            await page.until(f"{ROWS}[0].className.includes('late')")
            # The number, how far behind, the row's class, and that it moves up: out of its place and into the first.
            # Of its host: the worker's dot, the host's class and label, and that it moves up, too.
            assert await page.run("written") == 5 + 5
            assert await page.run(f"[...{ROWS}].every((row) => row.marked)")
            assert await page.run(f"document.activeElement.closest('tr') === {ROWS}[0]")
            job.members[500].progress.step = 40  # and back
            server.push()
            await page.until(f"{ROWS}[500].cells[0].textContent === '500' && !{ROWS}[500].className.includes('late')")
            assert await page.run("written") == 2 * (5 + 5)
            assert await page.run(f"document.activeElement.closest('tr') === {ROWS}[500]")

            del job.members[0]  # no row moves but those that go and come
            add_member(job, 0, member_id="newcomer")
            server.push()
            await page.until("document.querySelector('#workers tbody tr').marked === undefined")
            assert await page.run(f"[...{ROWS}].filter((row) => row.marked).length") == 999
            assert await page.run(f"document.activeElement.closest('tr') === {ROWS}[500]")

            await page.run("document.querySelector('#filter').focus()")
            await page.type("999")
            assert await page.run(f"[...{ROWS}].filter((row) => !row.hidden).length") == 1
            assert not page.complaints

    run(main)


def test_a_message_with_only_changed_members_updates_the_rows() -> None:
    async def main() -> None:
        job = new_job(workers=3)
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 3")
            whole = server.message("digits")
            members = whole.pop("members")
            changed = members[2] | {"standing": "silent", "silent_s": 1.23}
            server.push(whole | {"members_changed": [changed], "members_gone": [members[0]["member_id"]]})
            await page.until(f"{ROWS}.length === 2")
            await shown(page, "silent for 1.2 s", "#workers tr.bad")

    run(main)


def test_a_lost_connection_is_shown_and_reconnects() -> None:
    async def main() -> None:
        job = new_job()
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until("document.querySelector('#connection').textContent === 'live'")
            server.refuses = True
            server.cut()
            await shown(page, "connection lost", "#connection.bad")
            await shown(page, "the coordinator is not ready", "#connection.bad")
            job.summary.reason = "training again"
            server.refuses = False
            await page.until("document.querySelector('#connection').textContent === 'live'")
            await shown(page, "training again", "#why")
            assert not page.complaints

    run(main)


def test_a_job_that_disappeared_is_shown_when_it_returns() -> None:
    async def main() -> None:
        job = new_job()
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 4")
            server.jobs.clear()
            server.end("the job was forgotten")
            await shown(page, "the job was forgotten", "#connection.bad")
            await shown(page, "there is no job 'digits'", "#connection.bad")
            add_member(job, None)
            server.jobs.append(job)
            await page.until(f"{ROWS}.length === 5")
            assert not page.complaints

    run(main)


def test_events_beyond_one_answer_are_fetched_to_the_last_one() -> None:
    async def main() -> None:
        job = new_job(workers=1)
        for number in range(2500):  # an answer has 1,000
            add_event(job, "joined", f"event {number}")
        async with page_server(job) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until("document.querySelector('#events li:last-child .text')?.textContent === 'event 2000'")
            assert await page.run("document.querySelectorAll('#events li').length") == 500
            assert not page.complaints

    run(main)


@pytest.mark.parametrize("after", [0, 50])
def test_all_events_are_shown_when_a_message_has_only_the_latest(after: int) -> None:
    """Also if an answer is late, so that it knows nothing of the events of a message that overtakes it."""

    async def main() -> None:
        job = new_job()
        for number in range(50):
            add_event(job, "view", f"view number {number}", generation=number)
        async with page_server(job) as server, browser() as chromium:
            held = server.held[after] = HeldAnswer()
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"document.querySelectorAll('#events li').length === {50 if after else 20}")
            if not after:
                await held.made.wait()
            for number in range(50, 90):
                add_event(job, "view", f"view number {number}", generation=number)
            server.push()
            await page.until("document.querySelector('#events li .text').textContent === 'view number 89'")
            held.may_go.set()
            await page.until("document.querySelectorAll('#events li').length === 90")
            assert await page.text("#generations li .number") == "89"

    run(main)


def test_a_token_in_the_address_is_removed_and_never_sent_in_a_url() -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            server.token = "secret"
            page = await chromium.page(server.url + "?job=digits#token=secret")
            await page.until(f"{ROWS}.length === 4")
            assert await page.run("location.href") == server.url + "?job=digits"
            assert await page.run("[localStorage.length, document.cookie]") == [0, ""]
            assert not any("secret" in request for request in page.requests)

    run(main)


def test_a_token_is_asked_for_and_a_wrong_one_is_refused() -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            server.token = "secret"
            page = await chromium.page(server.url + "?job=digits")
            await page.until("document.activeElement.id === 'token'")
            await page.type("guess")
            await page.press("Enter")
            await shown(page, "the token is not valid", "#token-form")
            await page.until("document.activeElement.id === 'token'")
            await page.type("secret")
            await page.press("Enter")
            await page.until(f"{ROWS}.length === 4")
            await page.click("#forget-token")
            await page.until("document.activeElement.id === 'token'")
            assert await page.run("sessionStorage.length") == 0

    run(main)


def test_drain_buttons_are_hidden_without_the_permission() -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            server.may_drain = False
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 4")
            visible = (
                "[...document.querySelectorAll('#actions, #workers td button')].filter((one) => one.checkVisibility())"
            )
            assert await page.run(f"{visible}.length") == 0
            server.may_drain = True
            await page.go(server.url + "?job=digits")
            await page.until(f"{visible}.length === 5")

    run(main)


def test_drain_buttons_go_when_the_token_gets_another_role() -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until("document.querySelector('#actions').checkVisibility()")
            server.may_drain = False
            server.cut()  # as the coordinator does when it has read its token file again
            await page.until("!document.querySelector('#actions').checkVisibility()")
            assert not page.complaints

    run(main)


def test_a_page_that_runs_is_not_loaded_again_if_its_watchman_comes_late() -> None:
    async def main() -> None:
        async with page_server(new_job()) as server, browser() as chromium:
            page = await chromium.page(server.url + "static/icon.svg")
            # Its look at the page is left to the test.
            await page.run_first(
                "{ const real = setTimeout; window.setTimeout = (act, ms) =>"
                " act.name === 'look' ? void (window.look = act) : real(act, ms); }"
            )
            await page.go(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 4")
            late = f"import('{server.url}static/boot.js').then(() => (look(), sessionStorage.length))"
            assert await page.run(late) == 0, "no load was counted, so none was begun"

    run(main)


def test_a_worker_is_drained_by_keyboard_and_the_job_by_mouse() -> None:
    async def main() -> None:
        async with page_server(new_job(workers=2)) as server, browser() as chromium:
            page = await chromium.page(server.url + "?job=digits")
            await page.until(f"{ROWS}.length === 2")
            while not await page.run(f"document.activeElement.closest('tr') === {ROWS}[1]"):
                await page.press("Tab")
            await page.press("Enter")
            await page.until("document.activeElement.id === 'menu-output'")
            await page.press("Escape")
            await page.until(f"document.activeElement.closest('tr') === {ROWS}[1]")
            await page.press("Enter")
            while not await page.run("document.activeElement.id === 'menu-drain'"):
                await page.press("Tab")
            await page.press("Enter")
            await shown(page, "Drain rank 1 (", "#ask[open]")
            await page.press("Escape")
            await page.until("!document.querySelector('#ask').open")
            assert await page.run(f"document.activeElement.closest('tr') === {ROWS}[1]")
            await page.press("Enter")
            await page.until("document.activeElement.id === 'menu-output'")
            await page.click("#menu-drain")
            await page.until("document.activeElement.value === 'no'")  # Enter alone drains nobody
            await page.press("Tab")
            await page.press("Enter")
            await shown(page, "1 worker was told to leave", "#toast")
            assert server.drained == [["m2"]]
            await page.click("#drain-job")
            await page.click("#ask button[value=yes]")
            await page.until("!document.querySelector('#ask').open")
            await shown(page, "2 workers were told to leave", "#toast")
            assert server.drained == [["m2"], []]
            assert not page.complaints

    run(main)


@pytest.mark.parametrize("width", [400, 900, 1600])
def test_the_page_fits_its_width_with_readable_light_and_dark_colors(width: int) -> None:
    async def main() -> None:
        job = full_job()
        stalled = new_job("another " * 20, 2, stalled=9, stall="rank 1 (host-b) has not entered all_reduce 200")
        async with page_server(job, stalled) as server, browser() as chromium:
            server.answers["stacks"] = {"processes": [new_process(0, ["a_long_name" * 20]), new_process(1, [], "why")]}
            tall = 4000  # rows that are far out of sight have no text: they are not laid out
            page = await chromium.page(server.url, width=width, height=tall)
            for place in ("?jobs", f"?job={quote(stalled.summary.name)}", "?job=digits", "stacks", "menu"):
                if place == "stacks":
                    await page.click("#job-stacks")
                    await shown(page, "a_long_name", "#look pre")
                elif place == "menu":
                    await page.press("Escape")
                    await page.click("#workers tbody tr button")
                else:
                    await page.go(server.url + place)
                    await page.until("document.querySelectorAll('tbody tr').length > 1")
                for dark in (False, True):
                    await page.look(width, tall, dark=dark)
                    assert await page.run("document.documentElement.scrollWidth") == width
                    assert await page.run(CUT_OFF) == []
                    assert await page.run(CONTRAST) == []
            await shown(page, "silent for 1.2 s")
            await shown(page, "was killed by SIGKILL", "#generations .bad")
            assert not page.complaints

    run(main)


def test_an_empty_page_says_that_there_is_no_job_yet() -> None:
    async def main() -> None:
        async with page_server() as server, browser() as chromium:
            page = await chromium.page(server.url)
            await shown(page, "knows no job yet", "#jobs-view")
            server.jobs.append(new_job())
            server.push()  # a single job is shown at once
            await page.until("document.title.startsWith('digits')")

    run(main)
