"""Print a wheel's requirements (no extras) but those named: `requirements_of.py WHEEL [NAME...]`."""

import re
import sys
import zipfile
from email.parser import Parser


def requirements(wheel: str, without: set[str]) -> list[str]:
    """Return the Requires-Dist lines whose package isn't in `without`."""
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    return [line for line in lines if "extra ==" not in line and _name(line) not in without]


def _name(line: str) -> str:
    match = re.match(r"[A-Za-z0-9_.-]+", line)
    assert match is not None, line
    return match.group().lower()


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], set(sys.argv[2:]))))
