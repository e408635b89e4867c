"""Documentation guides, whose blocks run in an empty folder with the wheel and print the output shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import guides, preloaded

pytestmark = pytest.mark.programs

PAGES = sorted(guides.GUIDES.glob("*.md"))


@pytest.fixture(scope="session")
def installed(shared_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with the installed wheel in `site` and the files of the guides in `demo`, once per session."""
    shared = shared_folder / "guides"
    if not shared.exists():
        own = tmp_path_factory.mktemp("wheel")
        site = guides.install_wheel(own)
        done = guides.run_with(site, guides.DEMO.split(), own)
        assert done.returncode == 0, done.stderr
        try:
            os.rename(own, shared)
        except OSError:  # another pytest worker was first
            assert shared.exists()
    return shared


def test_guides_run_with_the_wheel(installed, tmp_path):
    done = guides.run_with(installed / "site", ["python", "-c", "import dasksc, sys; print(dasksc.__file__)"], tmp_path)
    assert done.stdout.strip() == str(installed / "site" / "dasksc" / "__init__.py")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guide_prints_what_it_shows(page, installed, tmp_path):
    missing = guides.missing_of(page.read_text())
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    outputs = guides.outputs_of(page, tmp_path, installed / "site", installed / "demo")
    assert not "\n".join(guides.differences(page, outputs))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_guide_runs_its_commands(page):
    blocks = guides.blocks_of(page.read_text())
    commands = [command for block in blocks if block.language == "bash" for command in block.commands]
    assert commands[0] == guides.DEMO
    assert {command.split()[0] for command in commands} <= set(preloaded.PROGRAMS)


# --- The harness itself -------------------------------------------------------------------------------

PAGE = f"""# A page

```bash
{guides.DEMO}
pip install "dasksc[remote]"
```

```python
print("2 batches, 1,204 cells/s")
```

```text
2 batches, 88 cells/s
```

```yaml
# run/settings.yaml
seed: 1
```

```bash
cat run/settings.yaml  # what was written
```

```text
# run/settings.yaml
seed: 1
```
"""
PRINTED = {0: "", 1: "2 batches, 1,204 cells/s\n", 3: "# run/settings.yaml\nseed: 1\n"}


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    return path


def test_a_page_is_run_from_top_to_bottom(page, tmp_path):
    for name in ("site", "demo", "empty"):
        (tmp_path / name).mkdir()
    assert guides.outputs_of(page, tmp_path / "empty", tmp_path / "site", tmp_path / "demo") == PRINTED
    assert not [*guides.differences(page, PRINTED)]
    failing = page.read_text().replace("print(", "pint(")
    page.write_text(failing)
    (tmp_path / "again").mkdir()
    with pytest.raises(AssertionError, match="line 9, in <module>"):
        guides.outputs_of(page, tmp_path / "again", tmp_path / "site", tmp_path / "demo")


def test_different_output_and_output_without_a_block_are_reported(page):
    (reported,) = guides.differences(page, PRINTED | {1: "3 batches, 1,204 cells/s\n"})
    assert reported.startswith("page.md:8: the block prints\n3 batches")
    page.write_text(PAGE + "\nProse.\n\n```text\nmore\n```\n")
    (reported,) = guides.differences(page, PRINTED)
    assert reported == "page.md:32: text that no block above prints"


def test_what_differs_is_written_into_the_page(page):
    guides.record(page, PRINTED)
    assert page.read_text() == PAGE
    guides.record(page, PRINTED | {1: "3 batches\n", 3: ""})
    assert page.read_text() == PAGE.replace("2 batches, 88 cells/s", "3 batches").replace(
        PAGE[PAGE.rindex("\n```text") :], ""
    )


@pytest.mark.parametrize(
    ("printed", "documented"),
    [
        ("all.zarr: 600 cells, 83.35 kiB, in 5.0 s", "all.zarr: 600 cells, 9 MiB, in 812 ms"),
        ("  dense batches    27,489 cells/s", "  dense batches     7,489 cells/s"),
        ("watch at http://127.0.0.1:8787/loader", "watch at http://127.0.0.1:46671/loader"),
        ("rank 1: 2\nrank 0: 3\nall", "rank 0: 3\nrank 1: 2\nall"),
        ("  block_size       4", "  block_size     256"),
    ],
)
def test_figures_of_the_machine_are_not_compared(printed, documented):
    assert guides.comparable(printed) == guides.comparable(documented)


@pytest.mark.parametrize(
    ("printed", "documented"),
    [
        ("600 cells in 5 s", "601 cells in 5 s"),
        ("torch.Size([64, 300])", "torch.Size([64, 3])"),
        ("rank 0: 2\nrank 1: 3", "rank 0: 2\nrank 1: 4"),
        ("BlockShuffling(block_size=4)", "BlockShuffling(block_size=8)"),
        ("a  b", "a b"),
    ],
)
def test_other_figures_are_compared(printed, documented):
    assert guides.comparable(printed) != guides.comparable(documented)
