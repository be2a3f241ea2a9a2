"""The drawing is the code: every name in ARCHITECTURE.md exists, and its tables are those of the code."""

import importlib
import pkgutil
import re
from pathlib import Path

import msgspec
import pytest

import schemas
from bus.subjects import render_table
from schemas.message import Message

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
NAMES = sorted(set(re.findall(r"`((?:schemas|bus|services|deploy)\.[A-Za-z_.]+[A-Za-z_])`", PAGE.read_text())))


def resolve(name: str) -> object:
    """Return what a dotted name stands for: a module, or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def between(marker: str) -> str:
    text = PAGE.read_text()
    return text.split(f"<!-- {marker} -->\n")[1].split(f"<!-- /{marker} -->")[0].strip()


def all_messages() -> list[type[Message]]:
    for module in pkgutil.iter_modules(schemas.__path__):
        importlib.import_module(f"schemas.{module.name}")
    found, queue = [], [Message]
    while queue:
        for child in queue.pop().__subclasses__():
            queue.append(child)
            found.append(child)
    return sorted((cls for cls in found if cls.__module__.startswith("schemas.")), key=tag_of)


def tag_of(cls: type[Message]) -> str:
    return str(msgspec.inspect.type_info(cls).tag)  # type: ignore[attr-defined]


def message_table() -> str:
    """Return the message table as Markdown: tag, module and the first sentence of what it is for."""
    rows = ["| tag | where | what |", "|---|---|---|"]
    for cls in all_messages():
        summary = re.split(r"(?<=[.;])\s", " ".join((cls.__doc__ or "").split()))[0].rstrip(";")
        rows.append(f"| `{tag_of(cls)}` | `{cls.__module__}.{cls.__name__}` | {summary} |")
    return "\n".join(rows)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_the_page_exists(name: str) -> None:
    assert resolve(name) is not None


def test_the_subject_table_is_the_codes_own() -> None:
    assert between("subjects") == render_table()


def test_the_message_table_lists_every_message() -> None:
    assert between("messages") == message_table()


def test_every_row_of_the_failure_table_names_tests_that_exist() -> None:
    rows = between("failures").splitlines()[2:]
    assert len(rows) == 22
    for row in rows:
        named = re.findall(r"`(test_\w+)::(test_\w+)`", row)
        assert named, row
        for file, test in named:
            source = (ROOT / "tests" / "faults" / f"{file}.py").read_text()
            assert re.search(rf"^async def {test}\(", source, re.MULTILINE), test


def test_the_walk_names_a_function_at_each_step() -> None:
    walk = PAGE.read_text().split("## The walk of one request")[1].split("## Subjects")[0]
    steps = re.split(r"\n(?=\d\. )", walk)[1:]
    assert len(steps) == 7
    for step in steps:
        assert re.search(r"`(bus|services)\.[^`]+`", step), step
