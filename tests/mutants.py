"""Plants one-line bugs in a copy of the tree and runs the tests that should notice: `make mutants`.

Each `Mutant` replaces one piece of text, which must occur exactly once in its file. The tests named with it must fail
then. A mutant that no test notices survives, and the script lists it and exits with status 1. The tree that the script
runs from is only read.

Where a line of the table is gone from the code, `tests/unit/repository/test_mutants.py` fails: change the table with
the code.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[1]

SERVER = "server/paceline_server"
PROTOCOL = "protocol/paceline_protocol"
ELASTIC = "client/paceline/_elastic"
MICROBATCH = "client/paceline/_microbatch"
SESSION = "client/paceline/_session"

TIMEOUT_S = 120
"""For the tests of one mutant. A test that hangs has noticed the bug."""


@dataclass(frozen=True)
class Mutant:
    """One change of the code that the tests must notice.

    Attributes:
        what: the bug, in words.
        file: the file that is changed, relative to the root.
        old: the text that is replaced; it occurs once.
        new: the text in its place.
        tests: files of tests that are run, relative to `tests`.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    # Versions of the protocol.
    Mutant(
        "a member that has come back speaks no more than its view",
        f"{PROTOCOL}/_membership.py",
        "        self.state.sessions.learn(session, event.versions)\n",
        "",
        ("unit/protocol/test_versions.py",),
    ),
    Mutant(
        "a member that is away bars no newcomer with which it has no version in common",
        f"{PROTOCOL}/_admission.py",
        "        if other.stream is None and other.standing is Standing.CANDIDATE:  # it",
        "        if other.stream is None:  # it",
        ("unit/protocol/test_versions.py",),
    ),
    Mutant(
        "a view that the last release has stored gets the version of an earlier one",
        f"{SERVER}/storage/schema.py",
        "told.get((name, generation, first), UNTOLD)",
        "next((v for (n, _, f), v in told.items() if (n, f) == (name, first)), UNTOLD)",
        ("unit/server/test_storage.py",),
    ),
    Mutant(
        "a range of versions that cannot be read back is stored",
        f"{SERVER}/wire.py",
        "if not 0 < versions.oldest <= versions.newest <= MOST_VERSION:",
        "if versions.oldest > versions.newest:",
        ("unit/server/test_settings_wire_streams.py",),
    ),
    Mutant(
        "a member that is refused for its version pauses for longer than its lease",
        "client/paceline/_session/control.py",
        "min(_OTHER_VERSION_S, self._config.failure_timeout / 2, deadline - began)",
        "min(_OTHER_VERSION_S, deadline - began)",
        ("unit/session/test_control_versions.py",),
    ),
    Mutant(
        "generations that fail before their first step are not counted",
        "client/paceline/_elastic/training_loop.py",
        '        self._failures.begin(f"step {self._state.step + 1}", self._job_line.group._core.mesh.peers)\n',
        "",
        ("unit/elastic/test_training_loop_views.py",),
    ),
    Mutant(
        "a standby takes over a state that it cannot read",
        f"{SERVER}/failover.py",
        "        await self.check_format()\n",
        "",
        ("unit/server/test_takeover.py",),
    ),
    Mutant(
        "a door that refused a version explains a death",
        f"{PROTOCOL}/_verdict.py",
        "by_reason[_VERSION]) and not case.gone:",
        "by_reason[_VERSION]):",
        ("unit/protocol/test_verdict.py",),
    ),
    Mutant(
        "each batch says the format of the state anew",
        f"{SERVER}/storage/etcd.py",
        "        self._format = {}\n\n    async def _repeat",
        "\n    async def _repeat",
        ("unit/server/test_etcd_storage.py",),
    ),
    Mutant(
        "what a session spoke that has ended still counts",
        f"{PROTOCOL}/_job_state.py",
        "        super().__delitem__(member_id)\n        self._forget(session.versions)\n",
        "        super().__delitem__(member_id)\n",
        ("unit/protocol/test_versions.py",),
    ),
    Mutant(
        "a state file names the first release that has used it",
        f"{SERVER}/storage/schema.py",
        "if _writer(connection) != RELEASE:",
        "if not _writer(connection):",
        ("unit/server/test_storage.py",),
    ),
    # Gradients that an engine carries.
    Mutant(
        "a failed generation does not abort the engine",
        "client/paceline/_group/wrapper_calls.py",
        "bound.mesh.fault.on_failure(engine.abort)",
        "pass",
        ("unit/engines/test_carried_gradients.py",),
    ),
    Mutant(
        "the engine starts before all members are in the operation",
        "client/paceline/_collectives/carried_tasks.py",
        "        links.body(call)\n        try:\n",
        "        carrier.all_reduce(x)\n        links.body(call)\n        try:\n",
        ("unit/engines/test_carried_gradients.py",),
    ),
    Mutant(
        "an interrupted sum may still write to the array",
        "client/paceline/_collectives/carried_tasks.py",
        "            _let_go(carrier)\n",
        "",
        ("unit/engines/test_carried_gradients.py",),
    ),
    Mutant(
        "the engine of the last generation stays open",
        "client/paceline/_group/group_core.py",
        "            self.carrier.close(deadline)\n",
        "",
        ("unit/engines/test_carried_gradients.py",),
    ),
    Mutant(
        "an engine is used although the job uses TLS",
        "client/paceline/_group/wrapper_calls.py",
        "if bound.mesh.encrypted:",
        "if False:",
        ("unit/engines/test_carried_gradients.py",),
    ),
    # What one job may take from the others.
    Mutant(
        "one takes all that is free",
        f"{SERVER}/limits.py",
        "return self.held(who) + size <= self.total - self.used - size",
        "return size <= self.total - self.used",
        ("unit/server/test_budget.py",),
    ),
    Mutant(
        "calls that wait for a key leave no room for who sets it",
        f"{SERVER}/services/calls.py",
        "self._spare if lasts else 0",
        "0",
        ("unit/server/test_budget.py",),
    ),
    Mutant(
        "what comes of a request is not counted",
        f"{SERVER}/services/calls.py",
        "call.take_message(len(message))",
        "pass",
        ("security/test_budgets.py",),
    ),
    Mutant(
        "a request that is refused half way keeps its room until it is read",
        f"{SERVER}/services/calls.py",
        "call.give_back()",
        "pass",
        ("security/test_budgets.py",),
    ),
    # What the store answers.
    Mutant(
        "a read tells what a restart may take back",
        f"{SERVER}/services/store.py",
        "if not self._dispatcher.epoch:  # with an epoch",
        "if False:  # with an epoch",
        ("integration/test_coordinator_store.py",),
    ),
    Mutant(
        "a repeat says that a write is stored which could not be",
        f"{SERVER}/services/store.py",
        "isinstance(stored.exception(), OSError)",
        "stored.exception() is None",
        ("integration/test_coordinator_store.py",),
    ),
    Mutant(
        "a copy of a write that comes late is made again",
        f"{SERVER}/key_values.py",
        "if kept > call > 0:",
        "if False:",
        ("unit/server/test_key_values.py",),
    ),
    Mutant(
        "a restart forgets which calls were made",
        f"{SERVER}/dispatcher.py",
        "self._values(stored.name, stored.keys, stored.answers)",
        "self._values(stored.name, stored.keys)",
        ("integration/test_coordinator_store.py",),
    ),
    Mutant(
        "a write that is repeated is made twice",
        f"{SERVER}/key_values.py",
        "return answer if call and kept == call else None",
        "return None",
        ("unit/server/test_key_values.py",),
    ),
    Mutant(
        "candidates do not hear of the secret of the next line",
        f"{SERVER}/dispatcher.py",
        "self._push(member_id, renewed)",
        "pass",
        ("integration/test_coordinator_sessions.py",),
    ),
    Mutant(
        "a worker for whose call there is no room gives up",
        f"{SERVER}/errors.py",
        "NoRoom: grpc.StatusCode.UNAVAILABLE",
        "NoRoom: grpc.StatusCode.RESOURCE_EXHAUSTED",
        ("security/test_budgets.py",),
    ),
    Mutant(
        "a worker's token drains others",
        f"{SERVER}/services/authenticate.py",
        "return Role.OPERATOR if method.startswith(_ADMIN) else Role.WORKER",
        "return Role.WORKER",
        ("unit/server/test_tokens.py",),
    ),
    Mutant(
        "a job's keys stay when it is over",
        f"{SERVER}/dispatcher.py",
        "        if had_keys:\n            self.keeper.clear(state.name)\n",
        "",
        ("integration/test_admin_orders.py",),
    ),
    Mutant(
        "a job that was forgotten for want of room begins at 1 again",
        f"{SERVER}/dispatcher.py",
        "self._used_up = max(self._used_up, oldest.generation)",
        "self._used_up = max(self._used_up, 0)",
        ("security/test_job_names.py",),
    ),
    # What the coordinator keeps.
    Mutant(
        "the secret of a job's members is another one after a restart",
        f"{SERVER}/storage/schema.py",
        "reached=reached, door_secret=door_secret)",
        "reached=reached)",
        ("unit/server/test_storage.py",),
    ),
    Mutant(
        "a commit is not synced to the disk",
        f"{SERVER}/storage/schema.py",
        "PRAGMA synchronous=FULL",
        "PRAGMA synchronous=OFF",
        ("unit/server/test_storage.py",),
    ),
    Mutant(
        "a verdict on an older view is stored as the latest one's",
        f"{SERVER}/storage/schema.py",
        "operation = ?, text = ? WHERE name = ? AND generation = ?",
        "operation = ?, text = ? WHERE name = ? AND generation >= ?",
        ("unit/server/test_storage.py",),
    ),
    Mutant(
        "a failed transaction is taken for stored",
        f"{SERVER}/storage/sqlite.py",
        "            return False\n        for batch in batches:",
        "            pass\n        for batch in batches:",
        ("unit/server/test_storage.py",),
    ),
    Mutant(
        "a view whose write failed is announced",
        f"{SERVER}/keeper.py",
        "        if error is None:\n            self._apply(job, ViewStored(generation))",
        "        if True:\n            self._apply(job, ViewStored(generation))",
        ("unit/server/test_keeper.py",),
    ),
    Mutant(
        "a view is announced before it is stored",
        f"{SERVER}/keeper.py",
        "written.add_done_callback(functools.partial(self._view_written, job, view.generation, began))",
        "self._apply(job, ViewStored(view.generation))",
        ("unit/server/test_keeper.py",),
    ),
    Mutant(
        "a coordinator that has stopped still acts on what was written",
        f"{SERVER}/keeper.py",
        "        if self._closed:\n            return\n",
        "",
        ("unit/server/test_keeper.py",),
    ),
    # Who leads, of several coordinators.
    Mutant(
        "a batch without an answer counts as refused, though it is stored",
        f"{SERVER}/storage/etcd.py",
        "isinstance(found, Item) and found.value == value:",
        "isinstance(found, Item) and not value:",
        ("unit/server/test_etcd_storage.py",),
    ),
    Mutant(
        "a deposed leader believes that its batch is stored",
        f"{SERVER}/storage/etcd.py",
        "                raise _Deposed(_who_leads(found))\n",
        "                pass\n",
        ("unit/server/test_etcd_storage.py",),
    ),
    Mutant(
        "a standby tries to take over from a leader that stores",
        f"{SERVER}/election.py",
        "        if silent >= self._fence_s:\n",
        "        if True:\n",
        ("unit/server/test_election.py",),
    ),
    Mutant(
        "a member takes orders of a coordinator that leads no longer",
        "client/paceline/_session/control.py",
        "        if message.epoch < self._epoch:\n",
        "        if message.epoch < 0:\n",
        ("unit/session/test_control_epochs.py",),
    ),
    # Who may come to a member's door.
    Mutant(
        "what was overheard opens a door again",
        "client/paceline/_base/proofs.py",
        'return "this call was made before" if again else ""',
        'return ""',
        ("unit/base/test_proofs.py",),
    ),
    Mutant(
        "calls with a stream of answers prove nothing",
        "client/paceline/_base/proofs.py",
        "return [_ProvesUnary(key), _ProvesStream(key)]",
        "return [_ProvesUnary(key)]",
        ("security/test_doors.py",),
    ),
    Mutant(
        "requests are read of whoever sends them",
        "client/paceline/_links/grpc_methods.py",
        "if self._key is not None and",
        "if self._key is None and",
        ("security/test_doors.py",),
    ),
    # Links to members that leave.
    Mutant(
        "a link that no operation has asked for is a death if it does not open",
        "client/paceline/_links/grpc_mesh.py",
        "forgotten = not (link.asked or link.opened or self._closed)",
        "forgotten = False",
        ("integration/test_goodbyes.py",),
    ),
    Mutant(
        "a member that left before a link to it opened counts as lost",
        "client/paceline/_links/grpc_mesh.py",
        "orderly=refused",
        "orderly=False",
        ("integration/test_goodbyes.py",),
    ),
    Mutant(
        "a door does not wait for its last words",
        "client/paceline/_links/grpc_door.py",
        "await asyncio.wait(streams, timeout=LAST_WORD_SECONDS)",
        "pass",
        ("integration/test_goodbyes.py",),
    ),
    # How a line goes on.
    Mutant(
        "a generation number that a member showed is used again",
        f"{PROTOCOL}/_lineage.py",
        "        self._state.generation = max(self._state.generation, generation)\n        self._state.patient_until",
        "        self._state.patient_until",
        ("unit/protocol/test_membership.py", "unit/protocol/test_lineage_stale_state.py"),
    ),
    Mutant(
        "the generation of a checkpoint that a candidate brings is used again",
        f"{PROTOCOL}/_lineage.py",
        "self._state.generation = max(self._state.generation, *tags, 0)",
        "assert tags is not None",
        ("unit/protocol/test_lineage_stale_state.py",),
    ),
    Mutant(
        "a coordinator with an old copy of its state still believes in the view of that copy",
        f"{PROTOCOL}/_lineage.py",
        "if view is None or not is_old:",
        "if view is None or is_old:",
        ("unit/protocol/test_lineage_stale_state.py",),
    ),
    Mutant(
        "a member of another generation finishes the line",
        f"{PROTOCOL}/_lineage.py",
        "if event.generation != session.generation or self._state.view is None or",
        "if self._state.view is None or",
        ("unit/protocol/test_lineage.py",),
    ),
    Mutant(
        "a line whose members have yet to compare their states is finished",
        f"{PROTOCOL}/_lineage.py",
        "self._state.view.base is None:\n            return []\n        if self._state.finishing is not",
        "self._state.view.seats is None:\n            return []\n        if self._state.finishing is not",
        ("unit/protocol/test_lineage.py",),
    ),
    Mutant(
        "a member that is only silent does not keep its line",
        f"{PROTOCOL}/_lineage.py",
        "return view.base is None or is_done",
        "return True",
        ("unit/protocol/test_lineage.py",),
    ),
    Mutant(
        "a line begins anew before a member that came back has said what it holds",
        f"{PROTOCOL}/_policy.py",
        "if meeting.over and state.returning():",
        "if meeting.over and not state.sessions:",
        ("unit/protocol/test_lineage.py",),
    ),
    Mutant(
        "who came first gets the seats, whatever others bring",
        f"{PROTOCOL}/_policy.py",
        "sorted(replicas, key=lambda ranks: min(map(_brings, ranks)), reverse=True)[:most]",
        "replicas[:most]",
        ("unit/protocol/test_lineage.py",),
    ),
    Mutant(
        "candidates that all leave and are too few for a view wait for ever",
        f"{PROTOCOL}/_policy.py",
        "return replace(decision, meeting=Meeting(decision.reason, dismissed=tuple(candidates)))",
        "return decision",
        ("unit/protocol/test_lineage.py",),
    ),
    Mutant(
        "a view forms before members have had time to find the coordinator again",
        f"{PROTOCOL}/_policy.py",
        "max(state.patient_until, state.restored_at + candidate.settings.failure_timeout)",
        "state.patient_until",
        ("unit/protocol/test_lineage_stale_state.py",),
    ),
    Mutant(
        "a line's view is given up because a member went while it was stored",
        f"{PROTOCOL}/_lineage.py",
        "if view.base is None and len(attached) < len(view.seats):",
        "if len(attached) < len(view.seats):",
        ("unit/protocol/test_lineage.py",),
    ),
    Mutant(
        "a Meet from before the latest view counts",
        f"{PROTOCOL}/_lineage.py",
        "if met.generation < session.generation:",
        "if met.generation < 0:",
        ("unit/protocol/test_lineage.py",),
    ),
    Mutant(
        "a view forms before all members have stopped",
        f"{PROTOCOL}/_meeting.py",
        "late = [session for session in present if not session.has_met]",
        "late = [session for session in present if not present]",
        ("unit/protocol/test_meeting.py",),
    ),
    Mutant(
        "silent members that may hold the state are not waited for",
        f"{PROTOCOL}/_meeting.py",
        "    if silent:\n        return Meeting(",
        "    if not view:\n        return Meeting(",
        ("unit/protocol/test_meeting.py",),
    ),
    Mutant(
        "newcomers speak for the line as soon as they hold its base",
        f"{PROTOCOL}/_meeting.py",
        "return view.base is None or any(s.rank not in newcomers or _met(s).tag != view.base for s in leaders)",
        "return True",
        ("unit/protocol/test_meeting.py",),
    ),
    Mutant(
        "a member that never held the base leads",
        f"{PROTOCOL}/_meeting.py",
        "return met.tag is not None and (met.holds_base or view.base is None)",
        "return met.tag is not None",
        ("unit/protocol/test_meeting.py",),
    ),
    # How members end.
    Mutant(
        "the last member that may hold the state is parted with",
        f"{PROTOCOL}/_departures.py",
        "return any(session.stream is not None and _may_lead(view, newcomers, session) for session in rest)",
        "return bool(rest)",
        ("unit/protocol/test_departures.py",),
    ),
    Mutant(
        "a member is parted with although the others that may hold the state are not heard of",
        f"{PROTOCOL}/_departures.py",
        "return any(session.stream is not None and _may_lead(view, newcomers, session) for session in rest)",
        "return any(_may_lead(view, newcomers, session) for session in rest)",
        ("unit/protocol/test_departures.py",),
    ),
    Mutant(
        "a process of another pid namespace is taken for one of this one",
        f"{SESSION}/identity.py",
        "or here != (other.boot_id, other.pid_namespace) or",
        "or here[0] != other.boot_id or",
        ("unit/session/test_identity.py",),
    ),
    Mutant(
        "a zombie counts as a process that runs",
        f"{SESSION}/identity.py",
        "    return fields[_STATE] in _DEAD or bool(int(fields[_FLAGS]) & _EXITING)\n",
        "    return False\n",
        ("unit/session/test_identity.py",),
    ),
    Mutant(
        "a process is taken for dead because its first thread has ended",
        f"{SESSION}/identity.py",
        ' and (int(fields[_THREADS]) <= 1 or _all_over(Path(f"/proc/{other.pid}/task")))',
        "",
        ("unit/session/test_identity.py",),
    ),
    Mutant(
        "a silent member is looked for once",
        f"{PROTOCOL}/_lookouts.py",
        "    if now < search.due:\n",
        "    if search.due > now or names <= search.asked:\n",
        ("unit/protocol/test_lookouts.py",),
    ),
    Mutant(
        "nothing wakes the coordinator to look for silent members again",
        f"{PROTOCOL}/_lineage.py",
        "tell_at = min(self._announcer.announce_at, self._orders.lookouts.ask_at)",
        "tell_at = self._announcer.announce_at",
        ("unit/protocol/test_lookouts.py",),
    ),
    Mutant(
        "one link of which an end is known to have gone ends the wait for news of the others",
        f"{PROTOCOL}/_verdict.py",
        "return bool(lost) and all(report.accused in known or report.reporter in known for report in lost)",
        "return bool(lost) and any(report.accused in known or report.reporter in known for report in lost)",
        ("unit/protocol/test_verdict.py",),
    ),
    Mutant(
        "a survivor is blamed for a link to one whose death is not known yet",
        f"{PROTOCOL}/_verdict.py",
        "    if not known and not blamed:\n",
        "    if True:\n",
        ("unit/protocol/test_verdict_event_order.py",),
    ),
    Mutant(
        "a survivor that has just spoken is blamed in place of a member that is quiet",
        f"{PROTOCOL}/_verdict.py",
        "(degree[rank], rank in quiet, age[rank])",
        "(degree[rank], age[rank])",
        ("unit/protocol/test_verdict_event_order.py",),
    ),
    Mutant(
        "newcomers that are slow blame the hub",
        f"{PROTOCOL}/_verdict.py",
        "return report.unopened and report.reporter in newcomers and",
        "return False and",
        ("unit/protocol/test_verdict_event_order.py",),
    ),
    Mutant(
        "a death that becomes known after the verdict on another waits for its lease",
        f"{PROTOCOL}/_departures.py",
        "self._unexplained = self.evidence.unexplained(verdict)",
        "pass",
        ("unit/protocol/test_verdict_event_order.py",),
    ),
    Mutant(
        "the word of one member parts with another",
        f"{PROTOCOL}/_breaches.py",
        "return len(by) > 1 or process in by",
        "return bool(by)",
        ("unit/protocol/test_breaches.py",),
    ),
    Mutant(
        "a member that breaks the protocol is taken for ever",
        f"{PROTOCOL}/_breaches.py",
        "if len(hows) >= _TAKEN:",
        "if False:",
        ("unit/protocol/test_breaches.py",),
    ),
    Mutant(
        "a broken link after the verdict parts with a member that is well",
        f"{PROTOCOL}/_membership.py",
        "if other is None or other.stream is not None:",
        "if other is None:",
        ("unit/protocol/test_departures.py",),
    ),
    Mutant(
        "a session is resumed without its token",
        f"{PROTOCOL}/_membership.py",
        "if session is None or session.token_sha256 != event.token_sha256:",
        "if session is None:",
        ("unit/protocol/test_membership.py",),
    ),
    Mutant(
        "a lapse counts at the first look",
        f"{PROTOCOL}/_silence.py",
        "            session.overdue_from = now\n            due = now + LOOK_AGAIN",
        "            return True",
        ("unit/protocol/test_silence_leases.py", "unit/protocol/test_membership.py"),
    ),
    Mutant(
        "a coordinator that slept judges its members",
        f"{PROTOCOL}/_silence.py",
        "if slept > session.settings.heartbeat_interval:",
        "if slept < 0.0:",
        ("unit/protocol/test_silence_leases.py", "unit/protocol/test_membership.py"),
    ),
    Mutant(
        "a coordinator that hears nobody evicts everybody",
        f"{PROTOCOL}/_silence.py",
        "if session.standing not in _OF_VIEW or now >= min(self._nobody_at + _timeout(session), last):",
        "if session.standing or now >= min(self._nobody_at + _timeout(session), last):",
        ("unit/protocol/test_silence_leases.py",),
    ),
    Mutant(
        "a member that has hung up keeps its place for as long as others speak for it",
        f"{PROTOCOL}/_silence.py",
        "(session.heard if session.stream_ended is None else session.stream_ended) + self._longest",
        "_NEVER",
        ("unit/protocol/test_silence_leases.py",),
    ),
    Mutant(
        "a member that was silent for long has no time to come back once its stream has ended",
        f"{PROTOCOL}/_silence.py",
        "(session.heard if session.stream_ended is None else session.stream_ended) + self._longest",
        "session.heard + self._longest",
        ("unit/protocol/test_silence_leases.py",),
    ),
    Mutant(
        "a process that listens while it dies is knocked at once",
        f"{SERVER}/probe_address.py",
        "while waited <= min(patience, _LONGEST_S):",
        "while waited < 0.0:",
        ("unit/server/test_probe_address_watch.py",),
    ),
    Mutant(
        "members that vanish together are all knocked at at one time",
        f"{SERVER}/probe_address.py",
        "            async with self._watching:\n",
        "            if True:\n",
        ("unit/server/test_probe_address_watch.py",),
    ),
    # A busy interpreter.
    Mutant(
        "doors are asked on and on while nobody is heard",
        f"{PROTOCOL}/_silence.py",
        "if session.stream is None or session.overdue_from is not None:",
        "if session.stream is None:",
        ("unit/protocol/test_silence_leases.py",),
    ),
    Mutant(
        "a door that answers stands for a stream",
        f"{PROTOCOL}/_membership.py",
        "if session is not None and session.stream is not None:  # else its silence is counted",
        "if session is not None:  # else its silence is counted",
        ("unit/protocol/test_silence_leases.py",),
    ),
    Mutant(
        "a door that takes a connection answers, although its process is stopped",
        f"{SERVER}/probe_address.py",
        "return bool(await reader.read(1))",
        "return True",
        ("unit/server/test_probe_address.py",),
    ),
    # A step at a member.
    Mutant(
        "the gate opens while collectives of the step are still running",
        f"{ELASTIC}/gate.py",
        "        self._group._core.flush()\n        self._group._core.mesh.fault.check()",
        "        self._group._core.mesh.fault.check()",
        ("unit/elastic/test_step_gate.py",),
    ),
    Mutant(
        "the gate opens though members hold different bits",
        f"{ELASTIC}/gate.py",
        "if not agrees(sums, self._group.size):",
        "if not sums:",
        ("unit/elastic/test_step_gate.py",),
    ),
    Mutant(
        "the gate opens though the generation has failed",
        f"{ELASTIC}/gate.py",
        "        self._group._core.flush()\n        self._group._core.mesh.fault.check()",
        "        self._group._core.flush()",
        ("unit/elastic/test_step_gate.py",),
    ),
    Mutant(
        "a step that failed leaves its small state behind",
        f"{ELASTIC}/step.py",
        "self._state.undo(self._small)",
        "self._state.clear_gradients()",
        ("unit/elastic/test_step_solo.py",),
    ),
    Mutant(
        "an update that was interrupted counts",
        f"{ELASTIC}/step.py",
        "if self._gate.is_open and not self._spoiled and not",
        "if self._gate.is_open and not",
        ("unit/elastic/test_step_solo.py",),
    ),
    Mutant(
        "the first of two updates counts, though the second one failed",
        f"{ELASTIC}/step.py",
        "self.keeps_copy and (self._half_updated or error is not None)",
        "self.keeps_copy and self._half_updated",
        ("unit/elastic/test_step_copies.py",),
    ),
    Mutant(
        "an old view is entered again",
        f"{PROTOCOL}/_member.py",
        "if view.generation <= self.generation:",
        "if view.generation < self.generation:",
        ("unit/protocol/test_member.py",),
    ),
    Mutant(
        "a prepared member's copies do not count for the step that it can finish",
        f"{PROTOCOL}/_meeting.py",
        "shares += met.shares\n",
        "shares += met.shares[:1]\n",
        ("unit/protocol/test_meeting_sharded_state.py",),
    ),
    Mutant(
        "two containers of one machine hold a shard and its copy",
        "client/paceline/_parallel/sharding/_placement.py",
        'peer.node.partition("/")[0] or peer.host',
        "peer.node or peer.host",
        ("unit/parallel/sharding/test_copies.py",),
    ),
    Mutant(
        "copies are updated without the numbers of their owner's optimizer",
        "client/paceline/optim.py",
        'arrays.get(f"{path}/{name}", v) for',
        'arrays.get(f"{path}/{name}", 0) for',
        ("unit/parallel/sharding/test_copies.py",),
    ),
    Mutant(
        "a member enters a view with another state than its base",
        f"{PROTOCOL}/_member.py",
        "if self.held != view.base or share not in self.shares:",
        "if share not in self.shares:",
        ("unit/protocol/test_member.py",),
    ),
    Mutant(
        "a member that was cast out still claims the base",
        f"{PROTOCOL}/_member.py",
        "self.generation, self.holds_base, self.leaving = 0, False, False\n        return self.meet(unproven",
        "self.generation, self.leaving = 0, False\n        return self.meet(unproven",
        ("unit/protocol/test_member.py",),
    ),
    Mutant(
        "sums are kept behind the gate",
        f"{ELASTIC}/step.py",
        "usable=not (self._gate.is_open or self._spoiled)",
        "usable=not self._spoiled",
        ("unit/microbatch/test_kept_sums.py",),
    ),
    Mutant(
        "a microbatch counts as whole, though a wrapper's pass has raised in it",
        f"{MICROBATCH}/attempt.py",
        "(AttemptPhase.FAILED, AttemptEvent.END): AttemptPhase.VOID",
        "(AttemptPhase.FAILED, AttemptEvent.END): AttemptPhase.BETWEEN",
        ("unit/microbatch/test_attempt.py",),
    ),
    Mutant(
        "sums of a second loop over the microbatches are kept",
        f"{MICROBATCH}/attempt.py",
        "if self._loops > 1 or not self._whole:",
        "if not self._whole:",
        ("unit/microbatch/test_kept_sums.py",),
    ),
    Mutant(
        "a wrapper agrees on its model where ranks are at different microbatches",
        f"{MICROBATCH}/attempt.py",
        "if self._attempt.phase is AttemptPhase.ENTERED:",
        "if True:",
        ("unit/microbatch/test_attempt.py",),
    ),
    Mutant(
        "a step that one rank skips counts for all",
        f"{ELASTIC}/gate.py",
        "if (self._state.is_sharded or skips) and self._group.size > 1:",
        "if self._state.is_sharded and self._group.size > 1:",
        ("unit/elastic/test_step_gate.py",),
    ),
    Mutant(
        "a rank that is alone with what it does is not named",
        "client/paceline/_links/fault.py",
        "if self.account and suspicion.reason ==",
        "if not suspicion.reason ==",
        ("unit/links/test_fault.py",),
    ),
    Mutant(
        "the end of the line is not said again after a reconnect",
        f"{SESSION}/line_client.py",
        "(self._meet, self._finish) if",
        "(self._meet,) if",
        ("unit/session/test_line_client.py",),
    ),
    # A line at a member.
    Mutant(
        "a late view of the member that this worker was before is entered",
        f"{ELASTIC}/training_loop.py",
        "case ViewLinked(member_id=member_id) if member_id != self._job_line.member_id:",
        "case ViewLinked(member_id=member_id) if member_id is None:",
        ("unit/elastic/test_training_loop_views.py",),
    ),
    Mutant(
        "a member that refuses a view tells nobody",
        f"{ELASTIC}/training_loop.py",
        "if isinstance(order, Meet) and view.base is not None:",
        "if isinstance(order, Meet) and view.base is None:",
        ("unit/elastic/test_training_loop_views.py",),
    ),
    Mutant(
        "a newcomer announces the commits of steps before its time",
        f"{ELASTIC}/training_loop.py",
        "self._committed, self._recovery.read_a_checkpoint = view.base.step, False",
        "self._recovery.read_a_checkpoint = False",
        ("unit/elastic/test_training_loop_commits.py",),
    ),
    Mutant(
        "a member goes on in a generation that has failed because the coordinator is away",
        f"{ELASTIC}/waiting.py",
        "if self.planned and not self._job_line.group._core.mesh.fault.failed:",
        "if self.planned:",
        ("unit/elastic/test_waiting.py",),
    ),
    Mutant(
        "a verdict on links that the group has yet to move to is dropped",
        f"{SESSION}/generations.py",
        "        for mesh in (self.coming, self.mesh):\n            if mesh is not None and verdict.generation",
        "        for mesh in (self.mesh,):\n            if mesh is not None and verdict.generation",
        ("unit/session/test_generations.py",),
    ),
    Mutant(
        "a verdict that is there before the links of its view is dropped",
        f"{SESSION}/generations.py",
        "        self._early = verdict",
        "        self._early = None",
        ("unit/session/test_generations.py",),
    ),
    Mutant(
        "a member goes on in its generation after the next one has formed",
        f"{SESSION}/generations.py",
        '            self.outdate(f"generation {generation} has formed")\n',
        "",
        ("unit/session/test_generations.py",),
    ),
    # Checkpoints.
    Mutant(
        "the job is done before its last checkpoint is written",
        f"{ELASTIC}/training_loop.py",
        "            self._saver.keep(self._member.held, self._state, group)\n        except",
        "            self._job_line.finish(self._total)\n"
        "            self._saver.keep(self._member.held, self._state, group)\n        except",
        ("unit/elastic/test_training_loop_commits.py",),
    ),
    Mutant(
        "nobody writes the last state where the lowest rank is gone",
        f"{ELASTIC}/saver.py",
        'self._write_now(held, state, "")',
        'self._write_now(held, state, "") if _is_lowest(group) else None',
        ("unit/elastic/test_saver.py",),
    ),
    Mutant(
        "a member is done with the last checkpoint while another still writes it",
        f"{ELASTIC}/saver.py",
        'int(group.all_reduce(np.int64(refused), op="max", timeout=math.inf, label="kept"))',
        "refused * group.size // group.size",
        ("unit/elastic/test_saver.py",),
    ),
    Mutant(
        "a state that the line left behind is written",
        f"{ELASTIC}/saver.py",
        "if self._pending is not None and self._pending[0] != held:",
        "if self._pending is not None and self._pending[0] == held:",
        ("unit/elastic/test_saver.py",),
    ),
    Mutant(
        "a checkpoint is written before its step is committed",
        f"{ELASTIC}/saver.py",
        "if self._pending is None or self._pending[0].step > step:",
        "if self._pending is None:",
        ("unit/elastic/test_saver.py",),
    ),
    # What a newcomer trains, and the rules of the loop.
    Mutant(
        "an unfreezing that is undone stays",
        f"{ELASTIC}/parts.py",
        '            if trains(parameter) == (path in rest["frozen"]):',
        "            if False:",
        ("unit/elastic/test_parts.py",),
    ),
    Mutant(
        "rank 0 is what newcomers are compared with, though it is one",
        "client/paceline/_parallel/_agreement.py",
        "reference = int(np.argmax(table[:, 2]))",
        "reference = 0",
        ("unit/parallel/test_agreement.py",),
    ),
    Mutant(
        "nobody knows who has agreed on a wrapper before",
        "client/paceline/_parallel/_synchronizer.py",
        "agreed_in=self._generation",
        "agreed_in=0",
        ("unit/parallel/test_agreement.py",),
    ),
    Mutant(
        "a step takes another session's error for its own",
        f"{ELASTIC}/step.py",
        " and error.newcomer in self._mesh.peers:",
        ":",
        ("unit/elastic/test_step_gate.py",),
    ),
    Mutant(
        "a newcomer with other settings ends those who train",
        f"{ELASTIC}/step.py",
        "        if isinstance(error, NewcomerDiffers) and error.newcomer in self._mesh.peers:",
        "        if False:",
        ("unit/elastic/test_step_gate.py",),
    ),
    Mutant(
        "collectives are open between two steps",
        f"{ELASTIC}/step.py",
        "        self._group._core.ban_collectives(BETWEEN_STEPS)",
        '        self._group._core.ban_collectives("")',
        ("unit/elastic/test_step_solo.py",),
    ),
    Mutant(
        "a retry inside of a step opens what is barred",
        f"{ELASTIC}/retry.py",
        "        if self._barred == BETWEEN_STEPS:",
        "        if self._barred:",
        ("unit/elastic/test_step_solo.py",),
    ),
    Mutant(
        "a state that was changed between steps can be trained on",
        f"{ELASTIC}/guard.py",
        "        except StepOrderError:\n            self.spoil()\n",
        "        except StepOrderError:\n",
        ("unit/elastic/test_rules.py",),
    ),
    Mutant(
        "a step that keeps a copy may not change anything before its update",
        f"{ELASTIC}/guard.py",
        "        if self.step is not None and not self.step.keeps_copy:\n            self._check_state",
        "        if self.step is not None:\n            self._check_state",
        ("unit/elastic/test_rules.py",),
    ),
    Mutant(
        "the state of another generation is compared with",
        f"{ELASTIC}/rules.py",
        "        self._after = self._before = None",
        "        pass",
        ("unit/elastic/test_rules.py",),
    ),
    Mutant(
        "a rank gives to a step what it computes from half an update",
        f"{ELASTIC}/step.py",
        "            self._group._core.ban_collectives(HALF_UPDATED)\n",
        "",
        ("unit/elastic/test_step_copies.py",),
    ),
    Mutant(
        "a newcomer brings sums that it has kept of another state (0, 0)",
        f"{ELASTIC}/training_loop.py",
        "self._kept_sums.enter(None if view.rank in view.newcomers else view.base)",
        "self._kept_sums.enter(view.base)",
        ("unit/elastic/test_training_loop_views.py",),
    ),
    # Who is waited for, and who is there.
    Mutant(
        "most members that hang are waited for without end",
        f"{PROTOCOL}/_silence.py",
        "patience if late and stopped else None",
        "None",
        ("unit/protocol/test_silence_stragglers.py",),
    ),
    Mutant(
        "members that never stop are given up before a step can have ended",
        f"{PROTOCOL}/_silence.py",
        "patience = max([timeout, *(session.met.step_timeout for session in stopped if session.met is not None)])",
        "patience = timeout",
        ("unit/protocol/test_silence_stragglers.py",),
    ),
    Mutant(
        "a member that waits and could not say so does not say it again",
        "client/paceline/_collectives/exchange.py",
        "asked = asked or self._tell(link)",
        "asked = asked or self._tell(link) or True",
        ("integration/test_reference_defects.py",),
    ),
    Mutant(
        "a host that is silent at one of its addresses is taken for gone",
        "client/paceline/_base/addresses.py",
        "None if None in said or not said else False",
        "False",
        ("unit/base/test_addresses.py",),
    ),
    Mutant(
        "workers of torchrun train alone, each for itself",
        f"{ELASTIC}/join.py",
        "        if torchruns == 1:",
        "        if torchruns < 9:",
        ("unit/elastic/test_join.py",),
    ),
    Mutant(
        "workers of torchrun that name a coordinator are a world each",
        f"{ELASTIC}/join.py",
        "    if torchruns > 1 and coordinator is not None:",
        "    if torchruns > 9 and coordinator is not None:",
        ("integration/test_join.py",),
    ),
    Mutant(
        "a token for a run is not good for its rounds",
        f"{SERVER}/security/tokens.py",
        "    return job if found is None else found[1]",
        "    return job",
        ("unit/server/test_tokens.py",),
    ),
    Mutant(
        "members of a view that is over are gone before they leave",
        f"{SERVER}/services/admin.py",
        "in_view = state.present() if state.view is not None else []",
        "in_view = state.present() if state.live is not None else []",
        ("integration/test_scheduler_calls.py",),
    ),
    # Once for each host.
    Mutant(
        "a Ctrl-C in a finalizer has no effect",
        "client/paceline/_base/waits.py",
        "            repeat_dropped_interrupts(_current[1].loop)\n",
        "",
        ("unit/base/test_interrupts.py",),
    ),
    Mutant(
        "a block that has ended well is run again",
        "client/paceline/_base/processes.py",
        "            os.write(descriptor, _DONE)\n",
        "",
        ("unit/elastic/test_once_per_host.py",),
    ),
    Mutant(
        "a block that raised counts as done",
        "client/paceline/_base/processes.py",
        "        yield first\n        if first:\n            os.write(descriptor, _DONE)\n",
        '        os.write(descriptor, _DONE if first else b"")\n        yield first\n        if first:\n',
        ("unit/elastic/test_once_per_host.py",),
    ),
    # Replicas.
    Mutant(
        "half a replica gets seats",
        f"{PROTOCOL}/_replicas.py",
        "if len(found[replica]) == found[replica][min(found[replica])].settings.replica_size",
        "if found[replica]",
        ("unit/protocol/test_replicas.py",),
    ),
    Mutant(
        "an old session of a rank counts instead of its new one",
        f"{PROTOCOL}/_replicas.py",
        "sorted(there, key=lambda session: session.arrival):",
        "sorted(there, key=lambda session: -session.arrival):",
        ("unit/protocol/test_replicas.py",),
    ),
    Mutant(
        "a newcomer joins without a rank that trains something else",
        f"{PROTOCOL}/_meeting.py",
        "fitting = whole(s for s in proven if _met(s).manifest == meeting.manifest and s not in going)",
        "fitting = [s for s in proven if _met(s).manifest == meeting.manifest and s not in going]",
        ("unit/protocol/test_replicas.py",),
    ),
    Mutant(
        "a replica whose ranks hold different states leads",
        f"{PROTOCOL}/_meeting.py",
        "leaders = of_one_mind(leading)",
        "leaders = leading",
        ("unit/protocol/test_replicas.py", "unit/protocol/test_replicas_random.py"),
    ),
    Mutant(
        "mates of a rank that came back keep waiting in the old view",
        f"{PROTOCOL}/_lineage.py",
        " + self._gather_mates(now)",
        "",
        ("unit/protocol/test_replicas.py",),
    ),
    Mutant(
        "the end of a process is forgotten once its mates are in no view",
        f"{PROTOCOL}/_membership.py",
        "self._departures.find_astray(event.process, ending)",
        "pass",
        ("unit/protocol/test_replicas.py",),
    ),
    Mutant(
        "a session that ended for an old copy of the state breaks its replica",
        f"{PROTOCOL}/_lineage.py",
        'Ending("belongs to an old copy of the state", orderly=False, lives=True)',
        'Ending("belongs to an old copy of the state", orderly=False)',
        ("unit/protocol/test_replicas_registration.py",),
    ),
    Mutant(
        "what was stored of a rank that came back breaks its replica",
        f"{PROTOCOL}/_departures.py",
        "now < self._patient_until and (replica, position) in self._stored",
        "False",
        ("unit/protocol/test_replicas_registration.py",),
    ),
    Mutant(
        "mates that may go are told that their replica is lost",
        f"{PROTOCOL}/_departures.py",
        "if mate.standing is not Standing.DISMISSED:",
        "if mate:",
        ("unit/protocol/test_replicas.py",),
    ),
    Mutant(
        "a timeout blames ranks of other positions",
        f"{PROTOCOL}/_verdict.py",
        "for r, p in progress.items() if r % size == report.reporter % size}",
        "for r, p in progress.items()}",
        ("unit/protocol/test_replicas.py",),
    ),
    Mutant(
        "a rank takes the state from ranks of other positions",
        f"{PROTOCOL}/_orders.py",
        "[donor for donor in live if donor.position == lane]",
        "live",
        ("unit/protocol/test_replicas.py",),
    ),
    Mutant(
        "each rank of a replica counts its samples",
        f"{SERVER}/tally.py",
        "if position == 0:",
        "if position >= 0:",
        ("unit/server/test_tally.py",),
    ),
    # The launcher's replicas.
    Mutant(
        "the mates of a failed rank are left alone",
        "client/paceline/launch/_replicas.py",
        "for replica in over for slot",
        "for replica in () for slot",
        ("unit/launch/test_replica_supervision.py",),
    ),
    Mutant(
        "a replica that failed twice is forgotten",
        "client/paceline/launch/_replicas.py",
        "self._killed.discard(replica)",
        "pass",
        ("unit/launch/test_replica_supervision.py",),
    ),
    Mutant(
        "a replica that starts again meets where the old one did",
        "client/paceline/cli/launcher/torch_worlds.py",
        "if not position:",
        "if not position and replica not in self._held:",
        ("unit/cli/test_torch_worlds.py",),
    ),
    Mutant(
        "readers see what workers have printed",
        f"{SERVER}/services/authenticate.py",
        "if role >= Role.OPERATOR or not any(",
        "if True or not any(",
        ("integration/test_http_questions.py",),
    ),
    Mutant(
        "a stopping coordinator does not tell its viewers how a job has ended",
        f"{SERVER}/web/stream.py",
        "self.close(last)",
        "self.close()",
        ("integration/test_http_questions.py",),
    ),
    Mutant(
        "a foreign page makes a browser ask members over plain HTTP",
        f"{SERVER}/web/asking.py",
        'if OWN_HEADER not in request.headers and "Authorization" not in request.headers:',
        "if False:",
        ("integration/test_http_questions.py",),
    ),
    Mutant(
        "a process that reads answers runs on when nobody waits for it",
        f"{SERVER}/web/reading.py",
        "            process.kill()",
        "            pass",
        ("integration/test_reading_answers.py",),
    ),
    Mutant(
        "a trace has as many operations as a member cares to send",
        "protos/pacelinepb/debug/records.py",
        "for each in operations[-MOST_OPERATIONS:]",
        "for each in operations",
        ("integration/test_reading_answers.py", "unit/session/test_answers.py"),
    ),
    Mutant(
        "a text that is half written counts as the last lines of a worker",
        "client/paceline/_session/output_file.py",
        " and zlib.crc32(text) == checksum",
        "",
        ("unit/session/test_output_file.py",),
    ),
    Mutant(
        "what a worker prints last before it hangs is not shown",
        "client/paceline/cli/launcher/launcher.py",
        "next_spare, *remarks, *outputs)",
        "next_spare, *remarks)",
        ("integration/test_last_lines.py",),
    ),
    # A worker that hangs or is frozen, and without which the job goes on.
    Mutant(
        "a worker that waits to be taken in again counts as hung",
        "client/paceline/cli/launcher/worker.py",
        " or self._waits or self._has_left:",
        " or self._has_left:",
        ("unit/cli/test_left_behind.py",),
    ),
    Mutant(
        "a restart is made though the job is done",
        "client/paceline/launch/_supervision.py",
        "        if done:\n            self._lose_pending()",
        "        if False:\n            pass",
        ("unit/launch/test_supervision_elastic.py",),
    ),
    # A job that hangs, and what is counted and kept of a job.
    Mutant(
        "a rank that is heard of rarely counts as silent",
        f"{SERVER}/stalls.py",
        "_holds_up(now, lane, max(LEAST_S, 2 * heartbeat))",
        "_holds_up(now, lane, LEAST_S)",
        ("unit/server/test_stalls.py",),
    ),
    Mutant(
        "how long is usual is forgotten at once",
        f"{SERVER}/stalls.py",
        "max(gap, self._remembered(now))",
        "gap",
        ("unit/server/test_stalls.py",),
    ),
    Mutant(
        "the first step has as little time as all others",
        f"{SERVER}/stalls.py",
        "least = LEAST_S if self._gaps >= _FEWEST_GAPS else FIRST_S",
        "least = LEAST_S",
        ("unit/server/test_stalls.py",),
    ),
    Mutant(
        "workers without a seat log values for the job",
        f"{SERVER}/tally.py",
        "        if member.session.standing is Standing.IN_VIEW:\n            more =",
        "        if member.session:\n            more =",
        ("unit/server/test_stalls.py",),
    ),
    Mutant(
        "a stall begins anew when the coordinator is restarted",
        f"{SERVER}/reports.py",
        "            self._pace.stood_since(event.progress.since)\n",
        "            self._pace.moved(now, is_first=False)\n",
        ("unit/server/test_stalls.py",),
    ),
    Mutant(
        "a history that is full grows on",
        f"{SERVER}/history.py",
        "            self._interval *= 2\n",
        "",
        ("unit/server/test_history.py",),
    ),
)


def stale(mutants: Sequence[Mutant] = MUTANTS, root: Path = ROOT) -> list[str]:
    """What of the table does not fit the code any more, in words.

    Args:
        mutants: the table.
        root: of the tree.
    """
    found = []
    for mutant in mutants:
        count = (root / mutant.file).read_text().count(mutant.old)
        if count != 1:
            found.append(f"{mutant.file} has this text {count} times, not once: {mutant.old!r}")
        found += [f"there is no tests/{test}" for test in mutant.tests if not (root / "tests" / test).is_file()]
    return found


class Copy:
    """A copy of the tree in which one mutant at a time is planted."""

    def __init__(self, folder: Path) -> None:
        names = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        listed = subprocess.run(names, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        for name in listed.split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name)
        self._folder = folder
        # Before site-packages, where the installed package is the tree that this was copied from.
        plug_ins = [each.parent for each in folder.glob("integrations/*/paceline_*")]
        packages = [folder / package for package in ("client", "server", "protocol", "protos")]
        path = os.pathsep.join(map(str, [*packages, *plug_ins]))
        self._environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}

    def passes(self, tests: Sequence[str]) -> tuple[bool, str]:
        """Runs files of tests in the copy; returns whether all pass, and what pytest wrote."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not alone"]
        try:
            ran = subprocess.run(
                [*command, *(f"tests/{test}" for test in tests)],
                cwd=self._folder,
                env=self._environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False, f"the tests did not end within {TIMEOUT_S} s"
        if ran.returncode not in (0, 1):  # no tests were found, or pytest itself failed: that says nothing of the bug
            sys.exit(f"pytest ended with status {ran.returncode}:\n{ran.stdout}")
        return ran.returncode == 0, ran.stdout

    def survives(self, mutant: Mutant) -> bool:
        """Plants a mutant, runs its tests, and takes it out; returns whether no test noticed."""
        file = self._folder / mutant.file
        before = file.read_text()
        file.write_text(before.replace(mutant.old, mutant.new))
        try:
            return self.passes(mutant.tests)[0]
        finally:
            file.write_text(before)


def main() -> int:
    """Returns the exit status: 1 if a mutant survives, 2 if there is nothing to judge by."""
    parser = argparse.ArgumentParser(description="Plants one-line bugs in a copy of the tree and runs its tests.")
    parser.add_argument("words", nargs="*", help="only mutants whose description or file has one of these words")
    options = parser.parse_args()
    chosen = [
        m for m in MUTANTS if not options.words or any(word in m.what or word in m.file for word in options.words)
    ]
    if trouble := stale(chosen):
        print("the table of mutants does not fit the code any more:", *trouble, sep="\n  ")
        return 2
    began, jobs = monotonic(), min(len(chosen), os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor(jobs) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(jobs):
            copies.put(Copy(Path(scratch, str(number))))
        first = copies.get()
        good, output = first.passes(sorted({test for mutant in chosen for test in mutant.tests}))
        copies.put(first)
        if not good:
            print(f"{output}\nthe tests fail without any mutant")
            return 2

        def survives(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                return copy.survives(mutant)
            finally:
                copies.put(copy)

        survivors = []
        for mutant, survived in zip(chosen, pool.map(survives, chosen), strict=True):
            print(f"{'SURVIVES' if survived else 'killed':9} {mutant.what} ({mutant.file})", flush=True)
            survivors += [mutant] * survived
    print(f"{len(chosen)} mutants, {len(survivors)} survive; {monotonic() - began:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
