"""The group: the object on which users call collectives; it has the members of a generation, or some of them."""

from paceline._group.group import Group

__all__ = ["Group"]
