"""Lists an image's packages as CycloneDX 1.6; it runs inside the image, on its Python (`make image`).

Python packages are those of Paceline's environment and of the interpreter below it; system packages are those that dpkg
knows.
"""

from __future__ import annotations

import json
import platform
import site
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

DPKG = Path("/var/lib/dpkg/status")


def component(kind: str, name: str, version: str, **more: Any) -> dict[str, Any]:
    """Makes one entry; `kind` is the beginning of its package URL."""
    return {
        "type": "library",
        "name": name,
        "version": version,
        "purl": f"pkg:{kind}/{quote(name)}@{quote(version, safe='')}",
        **more,
    }


def of_python() -> Iterator[dict[str, Any]]:
    """Yields Python's packages and the interpreter."""
    yield component("generic", "python", platform.python_version())
    for found in distributions(path=[*sys.path, *site.getsitepackages([sys.base_prefix])]):
        expression = found.metadata.get("License-Expression")
        licenses = {"licenses": [{"expression": expression}]} if expression else {}
        yield component("pypi", found.metadata["Name"].lower().replace("_", "-"), found.version, **licenses)


def of_system() -> Iterator[dict[str, Any]]:
    """Yields the installed Debian packages."""
    for paragraph in DPKG.read_text().split("\n\n") if DPKG.exists() else []:
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status") == "install ok installed":
            yield component("deb/debian", fields["Package"], fields["Version"])


def main() -> None:
    """Prints the list, whose subject is Paceline itself."""
    found = {entry["purl"]: entry for entry in [*of_system(), *of_python()]}
    (subject,) = [found.pop(purl) for purl in list(found) if purl.startswith("pkg:pypi/paceline@")]
    whole = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    whole["metadata"] = {"component": subject | {"type": "application"}}
    print(json.dumps(whole | {"components": [found[purl] for purl in sorted(found)]}, indent=1))


if __name__ == "__main__":
    main()
