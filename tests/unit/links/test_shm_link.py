"""Links over shared memory keep all rules of links."""

from __future__ import annotations

from unit.links.shm_pair import shm_link_pair

from paceline.testing import check_link


def test_shared_memory_links_keep_the_rules() -> None:
    check_link(shm_link_pair)
