"""Checks what watching may cost at 1,000 members: a scrape, and the page's stream."""

from __future__ import annotations

import http_scale


def test_watching_a_thousand_members_costs_little() -> None:
    figures = http_scale.measure()
    print(f"\n{figures}")
    assert figures["scrape_ms"] < 50
    assert figures["stream_share_of_a_core"] <= 0.01
