"""Every error that FlashRecovery raises on purpose. Decisions are taken on these types, never on texts.

The first lines of a docstring say what an error means, ``Do:`` what to do about it; scripts/generate_errors_docs.py
writes docs/errors_and_notices.md from them.
"""

from __future__ import annotations


class FlashRecoveryError(Exception):
    """Base of all errors of this package.

    Do: see the entry of the type that was raised; to catch all of them, catch this one.
    """


class ConfigError(FlashRecoveryError):
    """A configuration key, option or argument is wrong; the message names it, its value and what is allowed.

    Do: correct the value; see configuration.md.
    """


class AuthenticationError(FlashRecoveryError):
    """The other process has not proven that it knows the job's token, or a message was changed on its way.

    Do: give all nodes of the job the same token file; see security.md.
    """


class StrangerError(AuthenticationError):
    """What listens at an address is not the service of this job that was expected there.

    Do: check the address and port for another job or program, and that all nodes have the same token.
    """


class RegistrationError(FlashRecoveryError):
    """The script registered something twice, nothing at all, or something that cannot be recovered.

    Do: change the call as the message says; see recipes.md.
    """


class DataSourceError(FlashRecoveryError):
    """A data source cannot be replayed: it ended early or gave other samples than before the failure.

    Do: make the loader deterministic, or give it `state_dict`; see limits.md#what-data-sources-must-keep-to.
    """


class DataEndedError(DataSourceError):
    """The data of one rank ended in the middle of training, and the script does not expect that.

    Do: give all ranks equally many batches, or have them agree on the end and leave in the same step. What the ranks
    held is kept, and `--resume` goes on from there.
    """


class UnsupportedError(FlashRecoveryError):
    """A layout, option or version that recovery cannot protect; refused at start, by name.

    Do: change what the message names, or run without protection; see limits.md.
    """


class BuildError(FlashRecoveryError):
    """The C++ process-group backend could not be compiled or loaded.

    Do: install a C++ compiler and Python's headers, then run `flashrecovery doctor --build`; see groups.md#building.
    """


class PluginError(FlashRecoveryError):
    """A device plugin cannot be loaded, or returns something that is no finding.

    Do: correct the plugin, or leave it out; see health.md#writing-ones-own.
    """


class RestoreError(FlashRecoveryError):
    """State could not be transferred or did not match its digest.

    Do: read the reason; another source or the checkpoint was tried first.
    """


class DamagedCheckpointError(RestoreError):
    """A checkpoint cannot be read, or is not what was written. Another one may be whole.

    Do: check the storage; delete the checkpoint and start with `--resume`.
    """


class RegroupError(FlashRecoveryError):
    """The process groups of a new generation could not be formed within their deadline.

    Do: check the network between the nodes; raise `timeouts.regroup_s` if the job is large.
    """


class DrainError(FlashRecoveryError):
    """Operations of a process have not let go of its tensors in time, so the process must be replaced.

    Do: nothing; if it comes often, raise `timeouts.drain_s`.
    """


class ProtocolError(FlashRecoveryError):
    """A message that the receiver's state does not allow: a bug, or a peer of another version.

    Do: run the same version on all nodes; if it is the same, report the bug with `events.jsonl`.
    """


class JobFailedError(FlashRecoveryError):
    """The job cannot be recovered; the message says why.

    Do: remove the cause, then start again with `--resume`; see operations.md#when-a-job-ends-with-an-error.
    """


class DivergedError(JobFailedError):
    """Ranks that should hold equal state do not; the message names what differs, and on which ranks. Replacing a
    process cannot help.

    Do: register what differs, or keep out the node that is named; see operations.md#the-ranks-do-not-agree.

    Args:
        suspects: ranks that differ from a majority, whose nodes may be to blame.
        alike: the newest version at which all are known to have been alike, 0: none; None: not compared.
        partly: only a part of each tensor was compared then.
    """

    def __init__(
        self, message: str, *, suspects: tuple[int, ...] = (), alike: int | None = None, partly: bool = False
    ) -> None:
        super().__init__(message)
        self.suspects, self.alike, self.partly = suspects, alike, partly


class StepInterrupted(BaseException):
    """Raised in the training thread when the current step is given up for a recovery; `with step:` catches it.

    It derives from ``BaseException`` so that an ``except Exception`` around user code does not swallow it.

    Do: let it pass; a bare `except:` or `except BaseException:` in the step must raise it again.
    """
