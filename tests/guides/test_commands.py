"""Commands are found in a guide as a reader finds them, and none is forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import commands
from .commands import Guide, blocks_of

GUIDE = """# A guide

```sh
echo listening on 127.0.0.1:2379 \\
  for a while; exec sleep 60
```

```python
print("saved")
```

```sh
python3 saved.py; test -e README.md
```

```
listening on 127.0.0.1:2379 for a while
```
"""


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Guide:
    (tmp_path / "repository").mkdir()
    (tmp_path / "directory").mkdir()
    for name in ("guide.md", "README.md"):
        (tmp_path / "repository" / name).write_text(GUIDE)
    monkeypatch.setattr(commands, "REPOSITORY", tmp_path / "repository")
    return Guide("guide.md", replaced={"127.0.0.1:2379": "here"}, directory=tmp_path / "directory")


def test_blocks_have_a_line_and_a_language() -> None:
    assert [(block.line, block.language) for block in blocks_of(GUIDE)] == [
        (3, "sh"),
        (8, "python"),
        (12, "sh"),
        (16, ""),
    ]


async def test_commands_run_as_in_two_terminals(guide: Guide) -> None:
    with guide:
        async with guide.running("listening on") as command:
            assert (await command.prints(r"on (\w+) for a while$"))[1] == "here"
            guide.save("saved", "saved.py")
            assert await guide.run("saved.py") == "saved\n"
            await command.interrupt()


async def test_a_forgotten_command_fails_the_test(guide: Guide) -> None:
    guide.save("saved", "saved.py")
    with pytest.raises(AssertionError, match="listening on"), guide:
        await guide.run("saved.py")


async def test_a_failing_command_fails_the_test_with_its_output(guide: Guide) -> None:
    with pytest.raises(AssertionError, match="No such file"):
        await guide.run("saved.py")


async def test_a_command_that_ends_early_fails_the_test_with_its_output(guide: Guide) -> None:
    guide.save("saved", "saved.py")
    async with guide.running("saved.py") as command:
        with pytest.raises(AssertionError, match="saved"):
            await command.prints("never")


def test_what_the_guide_does_not_have_cannot_be_replaced(guide: Guide) -> None:
    with pytest.raises(AssertionError, match="has no 'tcp'"):
        guide.replace({"tcp": "udp"})
