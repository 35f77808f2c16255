"""`init_method="paceline://host:7400/job"`: ranks meet at a coordinator, which is their store too."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from paceline.elastic.join import join
from paceline.torch.store import Store

__all__ = ["SCHEME", "rendezvous"]

SCHEME = "paceline"


def rendezvous(url: str, timeout: timedelta = timedelta(seconds=300), **_: Any) -> Iterator[tuple[Store, int, int]]:
    """Joins the job that a URL names, and yields (store, rank, world size).

    Ranks are as `init_process_group` or the URL says (`?rank=0&world_size=2`), else given out by the coordinator:
    then `world_size` alone, or PACELINE_MIN_WORKERS, tells how many there are to be.

    Args:
        url: paceline://HOST:PORT/JOB; without host or job the environment's are taken.
        timeout: to wait for all ranks.

    Raises:
        ValueError: the URL is malformed.
        PacelineError: the job cannot be joined; the text says why.
    """
    parts = urlparse(url)
    query = {name: int(values[-1]) for name, values in parse_qs(parts.query).items()}
    unknown = query.keys() - {"rank", "world_size"}
    if unknown:
        raise ValueError(f"{url}: there is no {sorted(unknown)}; write paceline://host:port/job?rank=0&world_size=2")
    rank, world = (None if query.get(name, -1) == -1 else query[name] for name in ("rank", "world_size"))
    if rank is not None and world is None:
        raise ValueError(f"{url}: a rank needs a world_size")
    session = join(
        parts.netloc or None,
        job=parts.path.strip("/") or None,
        rank=rank,
        world_size=world if rank is not None else None,
        min_workers=world if rank is None else None,
        timeout=timeout.total_seconds(),
    )
    store = Store(session)
    store.set_timeout(timeout)
    yield store, session.rank, session.size
