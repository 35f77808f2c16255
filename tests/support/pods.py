"""A node of Kubernetes, as far as the commands of pods need it to run as processes of this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.certificates import make_folder
from support.ports import free_port

__all__ = ["Node"]

ROOT = Path(__file__).parents[2]


class Node:
    """What a node gives to a container: folders in place of mounts, ports of this machine in place of other addresses.

    Args:
        folder: for the files.
        addresses: HOST:PORT, where pods reach each other, or listen beside that.

    Attributes:
        addresses: where each of them is on this machine.
        reader: a token that only reads.
        brake: steps are slow as long as this file is there, so that the training does not end before its story.
    """

    def __init__(self, folder: Path, addresses: list[str]) -> None:
        self.folder = folder
        self.addresses = {address: f"127.0.0.1:{free_port()}" for address in addresses}
        made = make_folder(folder / "tls").path
        for name, files in (
            ("coordinator", ("coordinator.pem", "coordinator.key")),
            ("member", ("ca.pem", "member.pem", "member.key")),
        ):
            (folder / name).mkdir()
            for file in files:
                (folder / name / file).write_bytes((made / file).read_bytes())
        for name in ("paceline", "checkpoints", "state/paceline", "state/etcd"):
            (folder / name).mkdir(parents=True)
        operator, worker = "an-operators-token-of-this-test", "a-workers-token-of-this-test"
        self.reader = "a-token-to-read-of-this-test"
        (folder / "paceline" / "token").write_text(worker)
        jobs = ("digits", "paceline-digits")
        lines = [operator, *(f"{worker} role=worker {job}" for job in jobs), f"{self.reader} role=read"]
        (folder / "paceline" / "tokens").write_text("\n".join(lines))
        made = make_folder(folder / "etcd-tls").path  # the names of the files are those of the secrets
        (folder / "etcd").mkdir()
        for there, here in (("server", "coordinator"), ("peer", "member"), ("client", "member")):
            for kind in ("pem", "key"):
                (folder / "etcd" / f"{there}.{kind}").write_bytes((made / f"{here}.{kind}").read_bytes())
        (folder / "etcd" / "ca.pem").write_bytes((made / "ca.pem").read_bytes())
        for file in (file for file in folder.glob("*/*") if file.is_file()):
            file.chmod(0o600)
        self.brake = folder / "brake"
        self.brake.touch()
        script, pause = (ROOT / "examples" / "digits_elastic.py").read_text(), "time.sleep(asked.pause)"
        assert script.count(pause) == 1
        held = f"time.sleep(0.3 if __import__('os').path.exists({str(self.brake)!r}) else 0)"
        (folder / "digits_elastic.py").write_text(script.replace(pause, held))

    def here(self, text: str) -> str:
        """A word of a container, for this machine."""
        for there, here in (
            ("/run/secrets", self.folder),
            ("/var/lib", self.folder / "state"),
            ("/checkpoints", self.folder / "checkpoints"),
            ("digits_elastic.py", self.folder / "digits_elastic.py"),  # the image's working directory
        ):
            text = re.sub(rf"(^|=){re.escape(there)}", rf"\g<1>{here}", text)
        for there, here in self.addresses.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(there)}(?!\d)", here, text)
        return text

    def start(
        self, template: dict[str, Any], fields: dict[str, str], listens: str | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """The command line and the variables of a pod's container.

        Args:
            template: of the pod.
            fields: of the pod, by their paths, which variables name.
            listens: which of the node's addresses is the pod's own; None for the only one.
        """
        (container,) = template["spec"]["containers"]
        (own,) = [self.addresses[listens]] if listens is not None else self.addresses.values()
        variables = {
            entry["name"]: fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            if "valueFrom" in entry
            else self.here(entry["value"])
            for entry in container.get("env", [])
        }
        words = []
        for word in [*container.get("command", []), *container.get("args", [])]:
            for name, value in variables.items():
                word = word.replace(f"$({name})", value)
            assert "$(" not in word, f"{word} names a variable that the container does not have"
            word = word.replace("0.0.0.0:7401", "127.0.0.1:0")  # metrics, which no other pod needs
            words.append(re.sub(r"0\.0\.0\.0:\d+", own, self.here(word)))
        return words, variables
