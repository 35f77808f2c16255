"""Who may hold how much of what all share, how much there is, and who pays."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_server.errors import NoRoom
from paceline_server.limits import Budget, payer, peer_of
from paceline_server.process_limits import usable_bytes
from paceline_server.security.tokens import Tokens
from paceline_server.services.calls import CALL_BYTES, OpenCalls


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 5), st.integers(-300, 300)), max_size=200))
def test_a_holder_never_takes_more_than_remains_free(greedy: int, moves: list[tuple[int, int]]) -> None:
    budget = Budget(1_000)
    for who, size in moves:
        if size >= 0:
            before = budget.held(who), budget.used
            if budget.take(who, size):
                assert budget.held(who) <= budget.total - budget.used
            else:
                assert (budget.held(who), budget.used) == before
        elif budget.held(who) >= -size:
            budget.add(who, size)
    assert budget.used == sum(budget.held(who) for who in range(6)) <= budget.total

    budget = Budget(1_000)
    for _ in range(1_000):
        for who in range(greedy):
            budget.take(who, 1)
    assert all(abs(budget.held(who) - 1_000 // (greedy + 1)) <= greedy for who in range(greedy))
    assert budget.take("late", 1_000 // (2 * (greedy + 1)) - greedy), "whoever comes later finds room"


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/", {"sys/fs/cgroup/memory.max": "5000"}, 5000),
        ("0::/a/b", {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": "4000"}, 4000),
        ("0::/of/the/host", {"sys/fs/cgroup/memory.max": "3000"}, 3000),
        ("4:cpu,memory:/x\n0::/", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": "2000"}, 2000),
        ("4:memory:/\n0::/", {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ("0::/", {"sys/fs/cgroup/memory.max": "max"}, None),
        (None, {}, None),
    ],
)
def test_usable_bytes_respects_cgroup_memory_limits(
    groups: str | None, files: dict[str, str], limit: int | None, tmp_path: Path
) -> None:
    for name, text in {**files, **({} if groups is None else {"proc/self/cgroup": groups})}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    found = usable_bytes(tmp_path)
    assert found == limit if limit is not None else found > 1 << 28


ALL, ONE, TWO = "for-all-of-them-0123456789", "for-job-one-alone-0123456789", "for-two-of-them-0123456789"
TOKENS = Tokens.parse(f"{ALL}\n{ONE} one\n{TWO} two\n{TWO} one\n")


def test_calls_with_a_jobs_token_share_one_payer_across_addresses() -> None:
    for peer in ("ipv4:10.0.0.5:1", "ipv4:10.0.0.6:2"):
        assert payer(TOKENS, f"Bearer {ONE}", peer) == "job 'one'"
        assert payer(TOKENS, f"Bearer {TWO}", peer) == "jobs 'one', 'two'"
    assert payer(TOKENS, f"Bearer {ALL}", "ipv4:10.0.0.5:1") == payer(None, None, "ipv4:10.0.0.5:2") == "10.0.0.5"


@pytest.mark.parametrize("shown", ["Bearer an-unknown-token", None])
def test_callers_without_a_valid_token_have_a_separate_payer(shown: str | None) -> None:
    assert payer(TOKENS, shown, "ipv4:10.0.0.5:1") == "unknown callers at 10.0.0.5"


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        ("ipv4:127.0.0.1:4711", "127.0.0.1"),
        ("ipv6:%5B::1%5D:4711", "::/64"),
        ("ipv6:[2001:db8:1:2:3::9]:1", "2001:db8:1:2::/64"),
        ("ipv6:[fe80::1%25eth0]:1", "fe80::/64"),
        ("ipv6:[::ffff:10.0.0.5]:1", "10.0.0.5"),
        ("unix:", "unix"),
        ("unix:/run/x:y", "unix"),
        ("", ""),
    ],
)
def test_payer_without_tokens_is_the_peer_address(peer: str, said: str) -> None:
    assert payer(None, None, peer) == said


def test_long_calls_leave_room_for_a_short_one() -> None:
    """Else a key that many wait for could not be set."""
    budget = Budget(40 * CALL_BYTES)
    calls = OpenCalls(budget, CALL_BYTES)  # with a request, a call may take four times CALL_BYTES
    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(calls.one("a", lasts=True))
        with pytest.raises(NoRoom):
            stack.enter_context(calls.one("a", lasts=True))
        with calls.one("a") as setting:
            setting.take_message(CALL_BYTES)
    assert budget.used == 0


def test_a_message_takes_three_times_its_size_from_the_budget() -> None:
    budget = Budget(8 * CALL_BYTES)
    with OpenCalls(budget, 1).one("a") as call:
        call.take_message(CALL_BYTES)
        assert budget.used == 4 * CALL_BYTES
        with pytest.raises(NoRoom, match="the open calls of a take 0 MiB"):
            call.take_message(1)
    assert budget.used == 0


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.5", "10.0.0.5"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("fe80::1%eb0", "fe80::/64"),
    ],
)
def test_http_hosts_map_to_the_same_payer_as_grpc_peers(host: str, address: str) -> None:
    assert payer(None, None, peer_of(host)) == address
