"""Sizes, bus bandwidth, rows."""

from __future__ import annotations

import json

import pytest

from paceline.cli.bench.arithmetic import bus_bandwidth, make_row, parse_sizes, size_text


def test_sizes() -> None:
    assert parse_sizes("1KiB, 1MiB,64mib,4096,1GiB,4kB") == [1024, 1 << 20, 64 << 20, 4096, 1 << 30, 4000]


@pytest.mark.parametrize("text", ["", "1XiB", "-4", "1.5MiB", "KiB", "0", "6", "1KiB,,2KiB"])
def test_sizes_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_sizes(text)


def test_sizes_in_words() -> None:
    assert [size_text(n) for n in (0, 4, 1024, 1536, 1 << 20, 3 << 30)] == [
        "0 B",
        "4 B",
        "1 KiB",
        "1536 B",
        "1 MiB",
        "3 GiB",
    ]


def test_bus_bandwidth_as_nccl_tests_counts_it() -> None:
    assert bus_bandwidth("all_reduce", 1000, 1.0, 2) == 1000
    assert bus_bandwidth("all_reduce", 1000, 1.0, 4) == 1500
    assert bus_bandwidth("broadcast", 1000, 0.5, 4) == 2000
    assert bus_bandwidth("barrier", 0, 1.0, 4) == 0


def test_a_row_has_the_contract_s_names() -> None:
    row = make_row("all_reduce", "grpc", 4, 1 << 20, [0.001 * n for n in range(1, 102)])
    assert json.loads(json.dumps(row.as_dict())) == {
        "collective": "all_reduce",
        "impl": "paceline",
        "link": "grpc",
        "world_size": 4,
        "bytes": 1 << 20,
        "median_us": 51000.0,
        "p10_us": 11000.0,
        "p99_us": 100000.0,
        "busbw_GBps": round((1 << 20) / 0.051 * 1.5 / 1e9, 4),
    }
