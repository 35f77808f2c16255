"""What a worker is told, as messages: effects that do nothing but say something."""

from __future__ import annotations

from paceline_protocol.coordinator import (
    FailBarrier,
    PassBarrier,
    PushCatchUp,
    PushDismissed,
    PushDrain,
    PushFinished,
    PushMisfit,
    PushMissing,
    PushSpare,
    PushStateLost,
    PushSummons,
    PushVerdict,
    PushWaiting,
)
from paceline_server import wire
from pacelinepb.v1 import session_pb2 as pb

__all__ = ["Push", "to_message"]

Push = (
    FailBarrier
    | PassBarrier
    | PushCatchUp
    | PushDismissed
    | PushDrain
    | PushFinished
    | PushMisfit
    | PushMissing
    | PushSpare
    | PushStateLost
    | PushSummons
    | PushVerdict
    | PushWaiting
)
"""Effects that are one message to one member."""


def to_message(effect: Push) -> pb.SessionResponse:
    """The message."""
    match effect:
        case PassBarrier(_, call):
            return pb.SessionResponse(barrier_passed=pb.BarrierPassed(call=call))
        case FailBarrier(_, call, reason, text, culprits):
            failed = pb.BarrierFailed(call=call, reason=reason, text=text, culprits=culprits)
            return pb.SessionResponse(barrier_failed=failed)
        case PushWaiting(_, sentence):
            return pb.SessionResponse(waiting=pb.Waiting(reason=sentence))
        case PushVerdict(_, verdict):
            return pb.SessionResponse(verdict=wire.write_verdict(verdict))
        case PushSummons(_, generation):
            return pb.SessionResponse(summons=pb.Summons(generation=generation))
        case PushCatchUp(_, generation, base, donors, share, fingerprint):
            holders = [pb.Holder(member=wire.write_member(seat), shares=wire.write_shares(has)) for seat, has in donors]
            order = pb.CatchUp(
                generation=generation, base=wire.write_tag(base), holders=holders, fingerprint=fingerprint
            )
            if share is not None:
                order.share.CopyFrom(*wire.write_shares([share]))
            return pb.SessionResponse(catch_up=order)
        case PushMisfit(_, donor):
            return pb.SessionResponse(misfit=pb.Misfit(donor=wire.write_member(donor)))
        case PushMissing(_, processes):
            missing = pb.Missing(processes=[wire.write_process(process) for process in processes])
            return pb.SessionResponse(missing=missing)
        case PushDrain(_, why):
            return pb.SessionResponse(drain=pb.Drain(reason=why))
        case PushDismissed(_, last):
            return pb.SessionResponse(dismissed=pb.Dismissed(last=last))
        case PushSpare(_, generation):
            why = f"generation {generation} has no seat for it"
            return pb.SessionResponse(spare=pb.Spare(reason=why, generation=generation))
        case PushStateLost(_, why):
            return pb.SessionResponse(state_lost=pb.StateLost(reason=why))
        case PushFinished(_, step):
            return pb.SessionResponse(finished=pb.Finished(step=step))
