"""Messages of errors, warnings and logs, as recorded in `tests/recorded/messages.txt`."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.support.messages import messages
from tests.support.recorder import RECORDED

pytestmark = pytest.mark.core


def test_messages_are_those_recorded() -> None:
    recorded = (RECORDED / "messages.txt").read_text().splitlines()
    changes = list(
        difflib.unified_diff(recorded, messages().splitlines(), "recorded", "in the source", n=1, lineterm="")
    )
    if changes:
        pytest.fail(
            "messages changed; read them as a user would, then: python -m tests.support.recorder messages\n"
            + "\n".join(changes),
            pytrace=False,
        )


def test_messages_of_every_kind_are_collected_with_placeholders(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "def f(n, name):\n"
        "    logger.warning('%s of %d', name, n)\n"
        "    warnings.warn(f'{n:,} cells' + ' are left out', stacklevel=2)\n"
        "    if n:\n"
        "        raise self.broken(f'{name!r} ends early')\n"
        "    error = InputError(\n"
        "        f'n={n} must be positive. '\n"
        "        'Give n=1'\n"
        "    )\n"
        "    print('no message')\n"
        "    error.add_note(f'while {name} was opened')\n"
        "    raise StorageError(message_of(name)) from error\n"
    )
    (tmp_path / "two.py").write_text(
        "'Docstrings are not listed.'\n"
        "_ADVICE = f'{n} rows lack a label'\n"
        "raise ValueError('a' if odd else 'b')\nraise KeyError(name)\nraise TypeError\n"
    )
    name = tmp_path.name
    assert messages(tmp_path) == (
        f"[{name}/one.py]\n"
        "logger.warning: %s of %d | {name} | {n}\n"
        "warnings.warn: {n:,} cells are left out\n"
        "raise self.broken: {name!r} ends early\n"
        "InputError: n={n} must be positive. Give n=1\n"
        "add_note: while {name} was opened\n"
        "StorageError: {message_of(name)}\n"
        "\n"
        f"[{name}/two.py]\n"
        "text: {n} rows lack a label\n"
        "ValueError: {'a' if odd else 'b'}\n"
        "KeyError: {name}\n"
    )
