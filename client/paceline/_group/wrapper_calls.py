"""The collectives that only the wrappers of models call: in a tree over microbatches, and over an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeAlias

import numpy as np

from paceline._base.arrays import Array
from paceline._base.sum_order import Node
from paceline._base.work import Work
from paceline._collectives.carried_tasks import carried_task
from paceline._collectives.tasks import check_terms, reducing_task
from paceline._group.group_core import GroupCore, labelled
from paceline._group.object_calls import ObjectCollectives
from paceline._microbatch.sum_tree import subtrees_by_rank
from paceline.engines import MAX_CONTACT_BYTES, DataEngine, EngineFailed, EngineTimeout, OnDevice, Ticket
from paceline.engines._catalogue import make_engine
from paceline.errors import LimitExceeded, LinkUnavailable, SettingsMismatch, UnsupportedOp

_Nodes: TypeAlias = tuple[tuple[Node, ...], ...] | None


class WrapperCore(GroupCore):
    """The inside of a group, with the collectives of wrappers."""

    def open_engine(self) -> DataEngine | None:
        """Begins to open the engine of this generation, if it is not open; a collective then, else nothing is sent.

        Returns:
            The engine; None if links carry gradients, or there is no other member.

        Raises:
            LinkUnavailable: the engine's package is missing, or it cannot be opened; the text says why.
            UnsupportedOp: the engine does not give all ranks the same bits.
            LimitExceeded: a member's contact is too long.
            SettingsMismatch: members name different engines.
            PacelineError: the generation has failed.
        """
        bound = self.enter()
        if bound.carrier is not None or self.engine_name == "links" or self.mesh.size == 1:
            return bound.carrier
        if bound.mesh.encrypted:
            text = f"the engine {self.engine_name!r} does not encrypt, and the job uses TLS: name no engine"
            raise LinkUnavailable(text)
        engine = make_engine(self.engine_name)
        if not engine.traits.same_bits:
            raise UnsupportedOp(f"the engine {engine.name!r}: training needs the same bits at all ranks (I5)")
        engine.open(self.mesh.rank, self.mesh.peers, self._config.failure_timeout)
        bound.mesh.fault.on_failure(engine.abort)
        bound.carrier = engine
        try:
            mine = engine.contact(monotonic() + self._config.call_timeout)
        except (EngineFailed, EngineTimeout) as error:
            bound.mesh.fault.check()
            raise LinkUnavailable(f"the engine {engine.name!r} did not open: {error}") from error
        told = ObjectCollectives(self).all_gather_object([engine.name, mine])
        names, contacts = zip(*told, strict=True)
        if odd := tuple(rank for rank, name in enumerate(names) if name != names[0]):
            text = (
                f"{self.mesh.peers[odd[0]]} names the engine {names[odd[0]]!r}, and {self.mesh.peers[0]} {names[0]!r}"
            )
            raise SettingsMismatch(text, ranks=tuple(self.mesh.peers[rank].rank for rank in odd))
        for member, contact in zip(self.mesh.peers, contacts, strict=True):
            if not isinstance(contact, bytes) or len(contact) > MAX_CONTACT_BYTES:
                text = f"{member} tells no contact of the engine {engine.name!r}: bytes, at most {MAX_CONTACT_BYTES}"
                raise LimitExceeded(text, ranks=(member.rank,))
        engine.connect(contacts)
        return engine

    def check_renewable(self) -> None:
        """Checks that there may be another generation.

        Raises:
            PacelineError: this generation has failed, and its engine cannot be opened again (`DataEngine.reopens`).
        """
        bound = self.bound
        if bound.mesh.fault.failed and bound.carrier is not None and not bound.carrier.reopens():
            raise bound.mesh.fault.error()

    def all_reduce_carried(
        self,
        x: Any,
        tail: Array,
        *,
        divisor: Callable[[], float] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Sums two arrays over all ranks in place: a large one by the engine, after a small one over links.

        Args:
            x: the large one, shape [N], contiguous, of a dtype that the engine can sum: an array, or an `OnDevice`.
            tail: the small one, shape [M], contiguous.
            divisor: as for `all_reduce`, for `x`; only if `x` lies on the CPU.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            `x`.

        Raises:
            PacelineError: as `open_engine` and `all_reduce`.
        """
        return self._carry(
            lambda engine: engine.all_reduce(x), x, tail, divisor=divisor, timeout=timeout, async_op=async_op
        )

    def all_gather_carried(self, x: OnDevice, *, label: str = "") -> Work[Any]:
        """Has the engine gather the parts of all ranks in place, shape [W S]; see `DataEngine.all_gather`.

        Raises:
            PacelineError: as `open_engine` and `all_gather`, whose `label` this is.
        """
        detail = " all_gather" + labelled(label)
        work: Work[Any] = self._carry(lambda engine: engine.all_gather(x), x, np.zeros(1), detail, async_op=True)
        return work

    def reduce_scatter_carried(self, x: OnDevice, *, label: str = "") -> Work[Any]:
        """Has the engine sum over all ranks, shape [W S]; see `DataEngine.reduce_scatter`.

        Raises:
            PacelineError: as `open_engine` and `reduce_scatter`, whose `label` this is.
        """
        detail = " reduce_scatter" + labelled(label)
        work: Work[Any] = self._carry(lambda engine: engine.reduce_scatter(x), x, np.zeros(1), detail, async_op=True)
        return work

    def _carry(
        self,
        start: Callable[[DataEngine], Ticket],
        x: Any,
        tail: Array,
        detail: str = "",
        *,
        divisor: Callable[[], float] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Issues an operation that the engine carries; see `carried_task`."""
        engine, patience = self.open_engine(), self._config.failure_timeout
        assert engine is not None, "this group has no engine"
        return self.issue(
            lambda bound: carried_task(bound.engine, engine, start, x, tail, self.choose, patience, detail, divisor),
            timeout,
            async_op,
        )

    def all_reduce_tree(
        self,
        terms: Sequence[Array],
        *,
        leaves: int,
        out: Array,
        nodes: tuple[tuple[Node, ...], ...] | None = None,
        label: str = "",
        divisor: Callable[[], float] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Sums the microbatches of a step in one fixed binary tree, so that the bits do not depend on the world.

        Rank r has the leaves from r V // W to (r + 1) V // W - 1, and gives the sums of the greatest subtrees within
        this range: one if V / W is a power of two, at most 2 log2 V otherwise. With `nodes` ranks give other sums of
        the same tree, and the result has the same bits.

        Args:
            terms: these sums, from left to right: contiguous arrays of float32 or float64, of one shape. Dtype and
                shape must agree. With `nodes`, a rank that has no node gives one array, whose values do not count.
            leaves: V, the leaves of the tree, at least W; must agree.
            out: receives the result; may be the last of `terms`.
            nodes: for each rank the nodes (lo, hi) whose sums it gives, from left to right; must agree. Together they
                are the whole tree.
            label: as for `all_reduce`.
            divisor: likewise.
            timeout: seconds.
            async_op: return a `Work`.

        Raises:
            UnsupportedOp: there are fewer leaves than ranks, or not the terms of this rank's nodes, or another dtype;
                or `nodes` are not the tree.
            SizeMismatch: the terms or `out` differ in shape.
            PacelineError: the generation has failed; see `paceline.errors` for how.
        """
        nodes = self._unless_usual(nodes, leaves)
        arrays = check_terms(terms, self.mesh.rank, self.mesh.size, leaves, nodes)
        return self.issue(
            lambda bound: reducing_task(
                bound.engine,
                "all_reduce",
                arrays[-1],
                "sum",
                out,
                self.choose,
                "tree",
                labelled(label),
                divisor,
                terms=arrays,
                leaves=leaves,
                nodes=nodes,
            ),
            timeout,
            async_op,
        )

    def reduce_scatter_tree(
        self,
        terms: Sequence[Array],
        *,
        leaves: int,
        nodes: tuple[tuple[Node, ...], ...] | None = None,
        label: str = "",
        divisor: Callable[[], float] | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Array | Work[Array]:
        """Sums the microbatches of a step as `all_reduce_tree` does; rank r gets the r-th of W equal parts of axis 0.

        Args:
            terms: as for `all_reduce_tree`; each has shape [W * m, ...].
            leaves: likewise.
            nodes: likewise.
            label: as for `all_reduce`.
            divisor: likewise.
            timeout: seconds.
            async_op: return a `Work`.

        Returns:
            An array of shape [m, ...].

        Raises:
            SizeMismatch: the terms differ in shape, or axis 0 has no W equal parts.
            UnsupportedOp, PacelineError: as for `all_reduce_tree`.
        """
        nodes = self._unless_usual(nodes, leaves)
        arrays = check_terms(terms, self.mesh.rank, self.mesh.size, leaves, nodes)
        return self.issue(
            lambda bound: reducing_task(
                bound.engine,
                "reduce_scatter",
                arrays[-1],
                "sum",
                None,
                self.choose,
                "tree",
                labelled(label),
                divisor,
                arrays,
                leaves,
                nodes,
            ),
            timeout,
            async_op,
        )

    def _unless_usual(self, nodes: _Nodes, leaves: int) -> _Nodes:
        """Returns the nodes, None if they follow from equal shares: then the signature has none."""
        return None if nodes == subtrees_by_rank(self.mesh.size, leaves) else nodes
