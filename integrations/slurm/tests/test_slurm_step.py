"""What a launcher reads from Slurm's variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch import Host
from paceline_slurm import host
from paceline_slurm._step import expand_hostlist, slurm_step

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NAME": "digits",
    "SLURM_STEP_NODELIST": "n[09-11]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_CPUS_ON_NODE": "8",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("a,b[2],c", ["a", "b2", "c"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[3,1-2]", ["n3", "n1", "n2"]),
    ],
)
def test_host_lists_are_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "n[", "n[]", "n]", "n[a]", "n[3-1]", "n[1-99999999]", "a,,b", "n[1-1000]m[1-1000]", "n[1,]"]
)
def test_invalid_host_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="hosts"):
        expand_hostlist(text)


ranges = st.tuples(st.integers(0, 300), st.integers(0, 5), st.integers(1, 4))


@given(
    st.lists(st.tuples(st.text("abcn-", min_size=1, max_size=4), st.lists(ranges, max_size=3)), min_size=1, max_size=4)
)
def test_a_folded_host_list_expands_to_its_hosts(parts: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    words, hosts = [], []
    for prefix, numbers in parts:
        items = []
        for first, more, width in numbers:
            items.append(f"{first:0{width}d}-{first + more:0{width}d}" if more else f"{first:0{width}d}")
            hosts += [f"{prefix}{number:0{width}d}" for number in range(first, first + more + 1)]
        words.append(f"{prefix}[{','.join(items)}]" if items else prefix)
        hosts += [] if items else [prefix]
    assert expand_hostlist(",".join(words)) == hosts


@given(st.text("n0129[]-,", max_size=20))
def test_any_text_expands_to_hosts_or_raises_value_error(text: str) -> None:
    try:
        hosts = expand_hostlist(text)
    except ValueError:
        return
    assert all(host and not set(host) & set("[],") for host in hosts)


def test_slurm_step_reads_name_hosts_tasks_workers_and_port() -> None:
    step = slurm_step(STEP)
    assert step is not None
    assert (step.name, step.hosts[0], step.tasks, step.workers) == ("digits", "n09", 3, 8)
    assert not step.serves
    first = slurm_step(STEP | {"SLURM_PROCID": "0"})
    assert first is not None
    assert first.serves
    assert first.port == step.port, "all tasks compute the same port"
    assert 20_000 <= step.port < 30_000


@pytest.mark.parametrize(
    ("variables", "workers", "cpus"),
    [
        ({"SLURM_CPUS_PER_TASK": "2"}, 2, 2),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "6"}, 4, 6),
        ({"SLURM_STEP_NUM_TASKS": "6"}, 4, 4),
        ({"SLURM_STEP_NUM_TASKS": "6", "SLURM_GPUS_ON_NODE": "8"}, 4, 4),
    ],
)
def test_there_is_a_worker_per_gpu_or_else_per_processor(variables: dict[str, str], workers: int, cpus: int) -> None:
    step = slurm_step(STEP | variables)
    assert step is not None
    assert (step.workers, step.cpus) == (workers, cpus)


def test_slurm_step_is_none_outside_of_a_step() -> None:
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert slurm_step(batch) is None
    assert slurm_step({}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_JOB_ID", ""), ("SLURM_PROCID", "x"), ("SLURM_STEP_NODELIST", "n["), ("PACELINE_SLURM_PORT", "70000"),
        ("SLURM_JOB_END_TIME", "soon"),
    ],
)  # fmt: skip
def test_an_invalid_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        slurm_step(STEP | {name: value})


def test_the_port_differs_between_steps_and_can_be_chosen() -> None:
    ports = {slurm_step(STEP | {"SLURM_STEP_ID": str(n)}).port for n in range(20)}  # type: ignore[union-attr]
    assert len(ports) == 20
    chosen = slurm_step(STEP | {"PACELINE_SLURM_PORT": "7400"})
    assert chosen is not None
    assert chosen.port == 7400


def test_the_host_takes_its_settings_from_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host() is None
    for name, value in STEP.items() | {("SLURM_JOB_END_TIME", "1700000000")}:
        monkeypatch.setenv(name, value)
    found = host()
    assert found is not None
    assert found == Host("Slurm job", "digits", 8, 3, 8, 1_700_000_000.0, found.coordinator)
    assert found.coordinator is not None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    alone = host()
    assert alone is not None
    assert alone.coordinator is None, "a launcher that is alone runs its own"
