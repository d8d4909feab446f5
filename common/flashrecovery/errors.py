"""Every error that FlashRecovery raises on purpose. Decisions are taken on these types, never on texts."""

from __future__ import annotations


class FlashRecoveryError(Exception):
    """Base of all errors of this package."""


class ConfigError(FlashRecoveryError):
    """A configuration key, option or argument is wrong; the message names it, its value and what is allowed."""


class AuthenticationError(FlashRecoveryError):
    """The process that listens, or calls, has not proven that it knows the job's token, or a message was changed on its
    way."""


class StrangerError(AuthenticationError):
    """The process that listens at an address is not the service of this job that was expected there."""


class RegistrationError(FlashRecoveryError):
    """The script registered something twice, nothing at all, or something that cannot be recovered."""


class DataSourceError(FlashRecoveryError):
    """A data source cannot be replayed: it ended early or gave other samples than before the failure."""


class DataEndedError(DataSourceError):
    """The data of one rank has ended in the middle of the training, and nothing of the script expects that."""


class UnsupportedError(FlashRecoveryError):
    """A layout, option or version that recovery cannot protect; refused at start, by name."""


class BuildError(FlashRecoveryError):
    """The C++ process-group backend could not be compiled or loaded."""


class PluginError(FlashRecoveryError):
    """A device plugin cannot be loaded, or gives something that is no finding."""


class RestoreError(FlashRecoveryError):
    """State could not be transferred or did not match its digest."""


class DamagedCheckpointError(RestoreError):
    """A checkpoint cannot be read, or is not what was written. Another one may be whole."""


class RegroupError(FlashRecoveryError):
    """The process groups of a new generation could not be formed within their deadline."""


class DrainError(FlashRecoveryError):
    """Operations of a process have not let go of its tensors in time, so the process must be replaced."""


class ProtocolError(FlashRecoveryError):
    """A message that the receiver's state does not allow (a bug, or a peer of another version)."""


class JobFailedError(FlashRecoveryError):
    """The job cannot be recovered; the message says why."""


class DivergedError(JobFailedError):
    """Ranks that should hold equal state do not; the message names what differs, and on which ranks. Replacing a
    process cannot help.

    Args:
        suspects: ranks that differ from a majority, whose nodes may be to blame.
        alike: the newest version at which all are known to have been alike, 0: none; None: nobody has looked.
        partly: only a part of each tensor was compared then.
    """

    def __init__(
        self, message: str, *, suspects: tuple[int, ...] = (), alike: int | None = None, partly: bool = False
    ) -> None:
        super().__init__(message)
        self.suspects, self.alike, self.partly = suspects, alike, partly


class StepInterrupted(BaseException):
    """Raised in the training thread when the current step has been given up for a recovery.

    It derives from ``BaseException`` so that an ``except Exception`` around user code does not swallow it;
    ``with step:`` catches it.
    """
