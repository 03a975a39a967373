"""Attributes of other modules that were replaced, and how they come back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_MISSING = object()


class Replacements:
    """What one `install` changed; false where nothing is."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or add one that was not there."""
        before = getattr(owner, name, _MISSING)
        setattr(owner, name, value)
        self.undo_by(lambda: delattr(owner, name) if before is _MISSING else setattr(owner, name, before))

    def undo_by(self, undo: Callable[[], None]) -> None:
        """Remember how to take back a change of another kind."""
        self._undo.append(undo)

    def take_back(self) -> None:
        """Undo everything, the last change first."""
        while self._undo:
            self._undo.pop()()
