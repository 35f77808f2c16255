"""Two coordinators on etcd, and their workers, are upgraded and downgraded one by one, and the job trains on."""

from __future__ import annotations

from pathlib import Path

import pytest
from upgrade.releases import THIS, check_undisturbed, places, replace_workers, start_workers, unpacked

from support.elastic.same_bits import in_microbatches
from support.etcd import cluster, needs_etcd
from support.ports import free_port

pytestmark = [pytest.mark.needs(what="etcd"), needs_etcd, pytest.mark.timeout(180)]


def test_rolling_upgrade_downgrade_and_upgrade_with_a_standby(tmp_path: Path) -> None:
    last = unpacked(tmp_path)
    first = free_port(2)
    addresses = [f"127.0.0.1:{first}", f"127.0.0.1:{first + 1}"]
    leads = "this coordinator leads in epoch"
    with (
        cluster(tmp_path, 1) as etcd,
        places(tmp_path, addresses, etcd.url("upgraded")) as (a, b),
        in_microbatches(tmp_path, "mlp", coordinators=",".join(addresses), total=1 << 30, pace=0.04) as c,
    ):
        a.start(last)
        a.wait_for(leads)
        b.start(last)
        workers = start_workers(c, last, 2)
        a.stop()
        b.wait_for(leads)
        a.start(THIS)
        b.stop()
        a.wait_for(leads)
        b.start(THIS)
        one, two = replace_workers(c, workers, THIS)
        b.stop()
        b.start(last)
        c.wait_for_step(max(c.line()) + 2)
        a.kill()  # at a view of version 9
        b.wait_for(leads)
        three, *_ = replace_workers(c, [one], last)
        a.start(THIS)
        b.kill()  # at a view that the last release has formed
        a.wait_for(leads)
        replace_workers(c, [two, three], THIS)
        check_undisturbed(c, tmp_path, "mlp", [a, b])
