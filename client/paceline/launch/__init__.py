"""Tools for a scheduler that starts workers: which run, in which environment, and what follows when one ends.

    supervision = launch.Supervision(10.0, launch.Terms(workers=4, minimum=2, elastic=True, restarts=3))
    with launch.own_coordinator() as served:
        settings = launch.WorkerSettings(served.address, "digits", 2, 4, token=served.token)
        worker = subprocess.Popen(["python", "train.py"], env=launch.worker_environment(os.environ, settings))

A scheduler starts, signals and watches processes; `Supervision` tells it when. It may be a plug-in of `paceline run`
instead: `Host` and `Notice` say how (decision 22).
"""

from paceline.launch._environment import WorkerSettings, worker_environment
from paceline.launch._host import Host, Notice
from paceline.launch._own_coordinator import Served, own_coordinator, token_for
from paceline.launch._replicas import ReplicaSupervision
from paceline.launch._running_job import JobMember, JobStatus, RunningJob
from paceline.launch._supervision import Exit, Supervision, Terms

__all__ = [
    # which workers run
    "Supervision",
    "ReplicaSupervision",
    "Terms",
    "Exit",
    # what workers find
    "WorkerSettings",
    "worker_environment",
    "own_coordinator",
    "Served",
    "token_for",
    # what they do
    "RunningJob",
    "JobStatus",
    "JobMember",
    # plug-ins of `paceline run`
    "Host",
    "Notice",
]
