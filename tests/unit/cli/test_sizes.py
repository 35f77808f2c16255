"""Sizes of arrays on the command line, and what a collective moves of them."""

from __future__ import annotations

import pytest

from paceline.cli.sizes import bus_factor, measured_size, parse_sizes, size_text


def test_parse_sizes_reads_units() -> None:
    assert parse_sizes("1KiB, 1MiB,64mib,4096,1GiB,4kB") == [1024, 1 << 20, 64 << 20, 4096, 1 << 30, 4000]


@pytest.mark.parametrize("text", ["", "1XiB", "-4", "1.5MiB", "KiB", "0", "6", "1KiB,,2KiB"])
def test_parse_sizes_refuses_invalid_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_sizes(text)


def test_size_text_picks_a_unit() -> None:
    assert [size_text(n) for n in (0, 4, 1024, 1536, 1 << 20, 3 << 30)] == [
        "0 B",
        "4 B",
        "1 KiB",
        "1536 B",
        "1 MiB",
        "3 GiB",
    ]


@pytest.mark.parametrize("collective", ["reduce_scatter", "scatter", "all_gather", "gather", "all_to_all"])
def test_measured_size_is_rounded_up_to_equal_parts(collective: str) -> None:
    assert [measured_size(collective, size, 3) for size in (4, 12, 16, 1024, 1 << 20)] == [12, 12, 24, 1032, 1048584]
    assert measured_size(collective, 1 << 20, 4) == 1 << 20


@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "broadcast", "send_recv"])
def test_measured_size_of_unsplit_collectives_is_the_requested_size(collective: str) -> None:
    assert [measured_size(collective, size, 3) for size in (4, 1024)] == [4, 1024]


def test_a_barrier_has_no_size() -> None:
    assert measured_size("barrier", 1024, 3) == 0


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("all_to_all", 0.75),
        ("scatter", 0.75),
        ("gather", 0.75),
        ("broadcast", 1.0),
        ("reduce", 1.0),
        ("send_recv", 1.0),
        ("barrier", 0.0),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(collective: str, factor: float) -> None:
    assert bus_factor(collective, 4) == factor
