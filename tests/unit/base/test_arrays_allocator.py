"""malloc's thresholds are set once, unless the user has set his own."""

from __future__ import annotations

import platform

import pytest

from paceline._base.arrays import keep_frame_memory


def test_malloc_thresholds_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1")
    assert not keep_frame_memory()


def test_glibc_malloc_tunables_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1")
    assert not keep_frame_memory()


def test_thresholds_are_set_only_under_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=4194816")  # of something else
    assert keep_frame_memory() == (platform.libc_ver()[0] == "glibc")
