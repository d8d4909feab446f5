"""Every error that FlashRecovery raises on purpose. Decisions are taken on these types, never on texts.

The first lines of a docstring say what an error means, ``Do:`` what to do about it; scripts/generate_errors_docs.py
writes docs/errors_and_notices.md from them.
"""

from __future__ import annotations


class FlashRecoveryError(Exception):
    """The base class of all errors of this package.

    Do: look up the type that was raised in this table. Catch this class to catch all of them.
    """


class ConfigError(FlashRecoveryError):
    """A configuration key, option or argument is wrong. The message names it, its value and what is allowed.

    Do: correct the value; see configuration.md.
    """


class AuthenticationError(FlashRecoveryError):
    """The other process could not prove that it knows the job's token, or a message was changed on the network.

    Do: give all nodes of the job the same token file; see security.md.
    """


class StrangerError(AuthenticationError):
    """Something other than the expected service of this job answers at an address.

    Do: check whether another job or program uses this address and port, and whether all nodes have the same token.
    """


class RegistrationError(FlashRecoveryError):
    """The script registered something twice, nothing at all, or something that cannot be recovered.

    Do: change the call as the message says; see recipes.md.
    """


class DataSourceError(FlashRecoveryError):
    """A data source cannot be replayed: it ended early, or returned different samples than before the failure.

    Do: make the loader deterministic, or give it a `state_dict()`; see limits.md#what-data-sources-must-keep-to.
    """


class DataEndedError(DataSourceError):
    """One rank ran out of data during training, and the script does not handle that.

    Do: give all ranks the same number of batches, or let them agree on when to stop. The state is saved; `--resume`
    continues from it.
    """


class UnsupportedError(FlashRecoveryError):
    """Recovery does not support this layout, option or version. The message names it.

    Do: change what the message names, or run without FlashRecovery; see limits.md.
    """


class SetupDiffersError(FlashRecoveryError):
    """The set-up of a replacement makes another collective than that of the dead process made at this place. The
    message names both. The next process does not find files that were missing at first. A second difference ends the
    job.

    Do: let the set-up make the same collectives in each process, whether or not a file exists already.
    """


class BuildError(FlashRecoveryError):
    """The C++ process-group backend could not be compiled or loaded.

    Do: install a C++ compiler and Python's headers, then run `flashrecovery doctor --build`; see groups.md#building.
    """


class PreflightError(FlashRecoveryError):
    """`flashrecovery run --preflight` has found a device that computes or communicates wrongly, or not at all. The job
    was not started; exit code 2.

    Do: take the node of the device that the message names out, and have the device checked; see health.md#preflight.
    """


class PluginError(FlashRecoveryError):
    """A device plugin cannot be loaded, or returns something other than a `Finding`.

    Do: fix the plugin, or disable it; see health.md#writing-ones-own.
    """


class RestoreError(FlashRecoveryError):
    """State could not be transferred, or its digest is wrong.

    Do: read the reason in the message. Other sources and the checkpoint were tried first.
    """


class DamagedCheckpointError(RestoreError):
    """A checkpoint cannot be read, or its content has changed since it was written. An older one may be intact.

    Do: check the storage. Delete this checkpoint and start with `--resume`.
    """


class RegroupError(FlashRecoveryError):
    """The ranks could not form their process groups again before the deadline.

    Do: check the network between the nodes; raise `timeouts.regroup_s` if the job is large.
    """


class DrainError(FlashRecoveryError):
    """Pending operations did not release a process's tensors in time, so the process is replaced.

    Do: nothing. If it happens often, raise `timeouts.drain_s`.
    """


class ProtocolError(FlashRecoveryError):
    """A process received a message that it did not expect: a bug, or a peer that runs another version.

    Do: run the same version on all nodes. If it is the same already, report a bug and attach `events.jsonl`.
    """


class JobFailedError(FlashRecoveryError):
    """The job cannot be recovered. The message says why.

    Do: fix the cause, then start again with `--resume`; see operations.md#when-a-job-ends-with-an-error.
    """


class DivergedError(JobFailedError):
    """Ranks that should hold equal state do not. The message names what differs, and on which ranks. Replacing a
    process does not help.

    Do: register what differs, or exclude the node that the message names; see operations.md#the-ranks-do-not-agree.

    Args:
        suspects: ranks that differ from a majority, whose nodes may be to blame.
        alike: the newest version at which all ranks are known to have held equal state, 0: none; None: not compared.
        partly: only a part of each tensor was compared then.
    """

    def __init__(
        self, message: str, *, suspects: tuple[int, ...] = (), alike: int | None = None, partly: bool = False
    ) -> None:
        super().__init__(message)
        self.suspects, self.alike, self.partly = suspects, alike, partly


class StepInterrupted(BaseException):
    """Raised in the training thread when a recovery aborts the current step; `with step:` catches it.

    It derives from ``BaseException`` so that an ``except Exception`` around user code does not swallow it.

    Do: do not catch it. A bare `except:` or `except BaseException:` in the step must re-raise it.
    """
