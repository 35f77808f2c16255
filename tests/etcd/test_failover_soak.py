"""A few rounds of faults of coordinators, etcd and networks; `tests/elastic/soak.py --failover` plays more."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.elastic.soak import soak_failover
from support.etcd import needs_etcd


@pytest.mark.needs(what="etcd")
@needs_etcd
@pytest.mark.timeout(180)
def test_failover_soak_for_three_rounds(tmp_path: Path) -> None:
    soak_failover(3, 3, tmp_path, print)
