"""The protocol of elastic training: what the coordinator and the members of a job say, remember and decide.

Everything here is a value or a function of (time, state, settings): no socket, clock, thread or file. `paceline_server`
and `paceline` are the shells: they carry the messages (protobuf, `pacelinepb`), tell the time and perform what is
decided; `paceline_protocol.translation` writes and reads them. This package exports what both sides use,
`paceline_protocol.messages` what the coordinator says, `paceline_protocol.coordinator` what only the coordinator uses.
DESIGN.md draws a death, a join and a member's phases; `tests/protocol/transcripts` has whole stories, line by line.

Words
    job         a training run, known by its name; its coordinator keeps it
    worker      a process that takes part, or wants to; a member once it is in a view
    view        the members of one generation, each with a rank
    generation  number of a view; it never falls and is never used twice, not even after the coordinator has failed (I3)
    seat        a member's rank in a view, and how to reach it
    candidate   a worker in no view that waits for one; a newcomer in the first view that it is in
    spare       a candidate without a seat in the next view, because members come in nodes that share one state
    step        one update of the training state; applied at a member, committed once all members have applied it
    step word   the message, summed over all members, with which they enter a step together
    tag         (generation, step): names a training state; equal tags are equal bits
    base        the state that a generation starts from; None in a first view, whose members compare what they brought
    share       which part of a sharded state a member holds
    manifest    hash of what the state consists of and of the run's settings: the same for all members
    line        consecutive generations that carry one training state on; also lineage
    meeting     the time between two generations: members have stopped, and each has said what state it holds
    leader      a member whose state the line may go on from: it got its generation's base
    laggard     a member that has to take the base before the next view forms; a donor gives it
    prepared    said of a member that can finish a step which others may have applied
    lease       how long a member may be silent; evicted: without its session, though it may be alive
    version     of the protocol: each program speaks a range of them, and each view has one that all its members speak
    void        said of a generation that is over because of a failure; its verdict says which, and who is to blame

A worker, as the coordinator sees it (`Standing`)
    CANDIDATE   waits for a view
    IN_VIEW     a member of the live view
    VOID        a member of a view that is void: it goes, or meets the others for the next one
    DISMISSED   it wanted to leave, and may

A member, as it sees itself (`Phase` of its `MemberState`)
    MEETING     waits for the coordinator
    TAKING      takes the base from others, or from a checkpoint
    READY       holds the state and may begin a step
    STEPPING    is inside a step

What a member says (an event of the job: `Membership.handle` takes it)
    Registered      a worker asks to become a member
    Resumed         a member takes its session up again on a new stream
    Heard           a heartbeat, with where the member is (`Progress`)
    MetOthers       it has stopped in its generation, or is ready for its first one, and holds this state (`Meet`)
    Reported        it saw something go wrong: a lost link, an exception, a timeout (`Report`)
    FinishedLine    it saw the closing word complete, after the last step
    LeftJob         it leaves for good
    BarrierEntered  it arrives at a named barrier

What happens besides (events too)
    StreamEnded     a member's stream has ended: this is only a suspicion
    AddressRefused  and nobody listens at its address either: it is dead
    DoorAnswered    a member that had sent nothing for some time answers at its address: its process runs
    ExitReported    a launcher saw a process end, or another worker of its host found it gone
    DrainAsked      an operator wants members to leave at their next step boundary
    RestartAsked    an operator says that the last members are dead, or that a finished job must start again
    ViewStored, FinishStored, StoreFailed    the storage has answered
    Ticked          time has passed

What the coordinator says to a member (an effect of an event)
    Welcome         it is registered, or its session goes on
    Send            one of the messages below
    EndSession      its session is over, and why

Its messages (`messages`; in `session.proto` they have the same names)
    Waiting         what is waited for, in a sentence
    ViewFormed      a view has formed with it
    Verdict         its generation is void, and why
    Running         the line trains without it: it must connect to all members, and then say what it holds
    Summons         it must raise the flag JOIN in its next step word: candidates are ready
    CatchUp         it must take a state, or its share of one, from these donors
    Mismatch        its manifest differs from the line's, which this member has
    Missing         it must check whether these processes of its host still exist
    Drain           it must leave after its step
    Dismissed       it may go
    Spare           the next view has no seat for it
    StateLost       the line's state is no longer complete: it must go back to a checkpoint
    Finished        the job is done
    BarrierPassed, BarrierFailed    the answer to a barrier

What the coordinator finds out (an effect too)
    AskDoor         whether the process of a member runs: `DoorAnswered` follows if its door answers

What the coordinator has stored (effects too)
    StoreView       a view, before any member is told of it
    ForgetView      that a line is over, or that a view never began
    StoreVerdict, StoreEnding, StoreFinished, StoreReached    why a view is void; how a member ended; that the job is
                    done; how far it got
"""

from __future__ import annotations

from paceline_protocol._member import MemberState, MemberView, Phase, Take
from paceline_protocol._replicas import lane
from paceline_protocol._step_word import STEP_WORD_SIZE, StepFlag, agrees, flags_of, members_with, step_word
from paceline_protocol._values import (
    WHOLE,
    Counters,
    Ending,
    JobSettings,
    Meet,
    Member,
    Process,
    Progress,
    ProtocolSettings,
    Report,
    Seat,
    Share,
    Tag,
    Verdict,
    View,
    rank_name,
    share_of,
)
from paceline_protocol._versions import OURS, UNTOLD, Versions, has_our_frames

__all__ = [
    "Counters",
    "Ending",
    "JobSettings",
    "Meet",
    "Member",
    "MemberState",
    "MemberView",
    "OURS",
    "Phase",
    "Process",
    "Progress",
    "ProtocolSettings",
    "Report",
    "STEP_WORD_SIZE",
    "Seat",
    "Share",
    "StepFlag",
    "Tag",
    "Take",
    "UNTOLD",
    "Verdict",
    "Versions",
    "View",
    "WHOLE",
    "agrees",
    "flags_of",
    "has_our_frames",
    "lane",
    "members_with",
    "rank_name",
    "share_of",
    "step_word",
]
