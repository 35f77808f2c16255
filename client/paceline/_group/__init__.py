"""The group: the members of a generation, or some of them, as the object that users call collectives on."""

from paceline._group.group import Group

__all__ = ["Group"]
