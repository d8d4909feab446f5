"""The native side of the copies' pace: messages with tags from :data:`PacedNetwork.first_tag` on, on a group of
:func:`.create_control_group`, are held back while an operation of the script is under way (``native/pace.h``)."""

from __future__ import annotations

from flashrecovery.groups.native_build import native


class PacedNetwork:
    """The network side of this process's copies, one copy at a time.

    Attributes:
        first_tag: messages with this tag and with greater ones are held back.
    """

    def __init__(self) -> None:
        self._native = native()
        self.first_tag: int = self._native.PACED_TAG

    def begin(self, nbytes: int, window_s: float, rate: float) -> None:
        """A copy of ``nbytes`` begins, which is not needed for ``window_s`` seconds.

        ``rate``: bytes a second without throttling; 0 if unknown.
        """
        self._native.pace_begin(nbytes, window_s, rate)

    def hurry(self) -> None:
        """The copy is needed now: nothing is held back."""
        self._native.pace_hurry()

    def held_s(self) -> float:
        """Seconds for which the last copy has been held back; the sum over its streams."""
        return float(self._native.pace_held_s())
