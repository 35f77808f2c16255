"""The stories in `transcripts/` are what the protocol does, to the letter.

After a change that is meant, `UPDATE_TRANSCRIPTS=1 pytest tests/protocol` writes them anew: read the difference. A new
story is a file with a comment and its inputs (`support.story` says what they may be).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.story import play

_STORIES = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", _STORIES, ids=lambda path: path.stem)
def test_the_protocol_does_what_the_transcript_says(path: Path) -> None:
    text = path.read_text()
    played = play(text)
    if os.environ.get("UPDATE_TRANSCRIPTS"):
        path.write_text(played)
        return
    assert played == text, f"UPDATE_TRANSCRIPTS=1 pytest {path.parent.parent} writes it anew"


def test_an_unknown_story_line_raises_value_error() -> None:
    with pytest.raises(ValueError, match=r"line 2: .*host-z"):
        play("job: 1 to 1 workers, failure timeout 3 s\nt=0 host-z is killed\n")
    with pytest.raises(ValueError, match="nobody knows what this means"):
        play("job: 1 to 1 workers, failure timeout 3 s\nt=0 host-a sings\n")
