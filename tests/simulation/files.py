"""Where checkpoints are: directories that hosts share, or have for themselves; in place of `paceline.checkpoint`.

A checkpoint takes a while to write, and is there at once or not at all: whoever dies meanwhile leaves none. A disk may
refuse. As the real one, a tag that is there stays as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from simulation.threads import current

from paceline.errors import CheckpointDamaged, CheckpointFailed
from paceline_protocol import Tag

if TYPE_CHECKING:
    from simulation.group import Group
    from simulation.world import World

__all__ = ["Files", "ShardedSaver"]

_KEEP = 2


class _Found(NamedTuple):
    state: Any
    tag: Tag
    folder: Path


class Files:
    """All directories of a world.

    Attributes:
        refuse_until: no disk takes anything before.
        has_refused: one has not taken something.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._folders: dict[str, dict[Tag, Any]] = {}
        self.refuse_until = 0.0
        self.has_refused = False
        self._attempts: set[tuple[str, Tag, str]] = set()

    # As `paceline.checkpoint`, on a thread of the process that writes or reads.

    def save(self, directory: str, state: Any, tag: tuple[int, int]) -> Path:
        """Writes a checkpoint."""
        self.spend()
        self.put(directory, state, Tag(*tag))
        return Path(directory) / str(Tag(*tag))

    def save_once(self, directory: str, state: Any, tag: Tag, attempt: str) -> bool:
        """Writes a checkpoint, if no other writes under the same name."""
        if (str(directory), tag, attempt) not in self._attempts:
            self._attempts.add((str(directory), tag, attempt))
            if not self.is_there(Path(directory) / str(tag)):
                self.save(directory, state, tag)
                return True
        return False

    def fingerprint(self, folder: Path) -> bytes:
        """What tells a checkpoint from others of its tag."""
        return repr(self.get(folder)).encode()[-64:]

    def load(self, directory: str) -> _Found | None:
        """The greatest there."""
        there = self._folders.get(str(directory))
        if not there:
            return None
        tag = max(there)
        return _Found(there[tag], tag, Path(directory) / str(tag))

    def tags(self, directory: str) -> list[Tag]:
        """Of all there."""
        return sorted(self._folders.get(str(directory), ()))

    def is_there(self, folder: Path) -> bool:
        """True if that one is there."""
        return Tag.parse(folder.name) in self._folders.get(str(folder.parent), ())

    def damage_of(self, folder: Path) -> CheckpointDamaged | None:
        """None if that one is there."""
        return None if self.is_there(folder) else CheckpointDamaged(f"{folder} is missing")

    # Below.

    def get(self, folder: Path) -> Any:
        """What is in a checkpoint; None if it is not there."""
        tag = Tag.parse(folder.name)
        assert tag is not None
        return self._folders.get(str(folder.parent), {}).get(tag)

    def spend(self) -> None:
        """The time that a write takes.

        Raises:
            CheckpointFailed: the disk refuses.
        """
        world = self._world
        world.moment("write")
        current().park(world.delay(0.005, 0.3) if world.rng.random() < 0.8 else world.delay(0.3, 2.5))
        if world.clock.now < self.refuse_until:
            self.has_refused = True
            raise CheckpointFailed("no space left on device")

    def put(self, directory: str, state: Any, tag: Tag) -> None:
        """A checkpoint is there."""
        there = self._folders.setdefault(str(directory), {})
        self._world.note(current().process.name, f"has written the checkpoint {tuple(tag)} to {directory}")
        self._world.checks.written(tag, state)
        there.setdefault(tag, state)
        for old in sorted(there)[:-_KEEP]:
            del there[old]

    def has_step(self, step: int) -> bool:
        """True if some directory has a checkpoint of that step, or of a later one."""
        return any(tag.step >= step for there in self._folders.values() for tag in there)

    def greatest(self) -> Tag:
        """The greatest tag on any disk, Tag(0, 0) for none."""
        return max((tag for there in self._folders.values() for tag in there), default=Tag(0, 0))

    def lose(self, directory: str) -> None:
        """A host's disk is another one."""
        self._folders.pop(directory, None)


class ShardedSaver:
    """`checkpoint.ShardedSaver`: the same collectives, and what they decide."""

    def __init__(self, directory: Path, group: Group) -> None:
        self._directory = directory
        self._group = group
        self._process = group.process
        self._state: Any = None
        self._tag = Tag(0, 0)
        self._error: CheckpointFailed | None = None
        self._begun = self._writes = False
        self._thread: Any = None

    def begin(self, state: Any, tag: tuple[int, int]) -> None:
        self._tag, self._state, self._error = Tag(*tag), state, None
        there = self._process.world.files.is_there(Path(self._directory) / str(self._tag))
        self._writes = not self._group.tell_all("opened", there)
        self._begun = True
        if self._writes:
            self._thread = self._process.thread(self._write)
            self._thread.start()

    def wait_until_copied(self) -> None:
        pass

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        self._begun = False
        if not self._writes:
            return
        self._thread.join()
        failed = any(self._group.hear_all("written", self._error is not None))
        if not failed and self._group.rank == 0:
            self._process.world.files.put(str(self._directory), self._state, self._tag)
        self._group.tell_all("published", None)
        if failed:
            raise CheckpointFailed("a rank could not write its part")

    def abandon(self) -> None:
        self._begun = False
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        try:
            self._process.world.files.spend()
        except CheckpointFailed as error:
            self._error = error


def save_sharded(directory: Path, state: Any, tag: tuple[int, int], group: Group) -> None:
    """`checkpoint.save_sharded`."""
    saver = ShardedSaver(directory, group)
    saver.begin(state, tag)
    saver.finish()
