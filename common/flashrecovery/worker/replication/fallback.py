"""Fallback checkpoints, as one rank writes and reads them."""

from __future__ import annotations

from collections.abc import Callable

from flashrecovery.config import Settings
from flashrecovery.errors import RestoreError
from flashrecovery.plan.elastic.replicas import Sharing
from flashrecovery.redundancy.checkpoint import reader, writer
from flashrecovery.redundancy.checkpoint.manifest import StoredCheckpoint
from flashrecovery.redundancy.memory.own_copy import PreStepCopy
from flashrecovery.worker.registry import Registry

_CLOSE_S = 60.0
"""Seconds that the job's end waits for the checkpoint part that is being written."""


class FallbackCheckpoints:
    """Those of one rank. Raises ConfigError if the directory cannot be written."""

    def __init__(
        self,
        registry: Registry,
        settings: Settings,
        on_published: Callable[[writer.Published], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._registry = registry
        self._elastic = settings.elastic is not None
        # A framework's format is of one number of ranks; the core's can be read by any.
        self.form = None if self._elastic else registry.checkpoint_format()
        self.checkpoint: writer.CheckpointFallback | None = None
        if settings.checkpoint.dir is not None:
            self.checkpoint = writer.CheckpointFallback(
                settings.checkpoint.dir,
                rank=registry.rank,
                world=registry.world_size,
                keep=settings.checkpoint.keep,
                form=self.form,
                on_published=on_published,
                on_error=on_error,
                shape=registry.shape if self._elastic else None,
                model_ranks=registry.model_ranks() if self._elastic else (),
            )

    def save_if_due(self, version: int, generation: int, copies: PreStepCopy | None) -> None:
        """The live state is ``version``. ``copies``: makes a copy of it next, of at least what this rank writes; None:
        the checkpoint makes its own."""
        if self.checkpoint is not None and self.checkpoint.due(version):
            local_state, common = self._registry.local_state.kept_at(version), self._registry.common.kept_at(version)
            rules = self._registry.rules() if self._elastic else None
            if copies is None:
                shards = self._registry.tensor_shards()
                self.checkpoint.commit(
                    version, shards, local_state=local_state, common=common, generation=generation, rules=rules
                )
                return
            copies.reserve(version)
            self.checkpoint.commit_copy(
                *(version, copies.shards, copies.reserved, copies.release),
                local_state=local_state,
                common=common,
                generation=generation,
                rules=rules,
            )

    def announced(self, version: int) -> bool:
        """Whether a checkpoint of ``version`` has been announced."""
        return self.checkpoint is not None and self.checkpoint.announced == version

    def resize(self, members: tuple[int, ...]) -> None:
        """The job consists of these ranks of the launch from now on."""
        if self.checkpoint is not None:
            self.checkpoint.resize(self._registry.rank, self._registry.shape.now(members))

    def load(self, checkpoint: StoredCheckpoint, version: int) -> str:
        """Load everything of this rank from a checkpoint. Returns the layout of the ranks that wrote it if that is
        another one: then this rank's own state is that of the script's start. Raises RestoreError if it is damaged or
        of another job."""
        registry, form = self._registry, self.form
        of_calls = self._elastic and registry.batches is not None and registry.batches.of_calls
        other = "" if form is None else reader.checkpoint_layout_mismatch(checkpoint, form)
        if other:
            registry.begin_again()
        plain = reader.load(
            checkpoint,
            registry.tensor_shards(),
            rank=registry.rank,
            world=registry.world_size,
            form=form,
            elastic=self._elastic,
            rules=registry.rules() if self._elastic else None,
            sharing=self._sharing() if self._elastic else None,
            lend=of_calls,
        )
        local_state = plain.lent if plain.local_state is None else plain.local_state
        if local_state is None and of_calls:
            raise RestoreError(
                f"checkpoint {checkpoint.path} has been converted, and has nothing of the framework's own loop: "
                "where its samples and its log stand; that which it was made of can be read by any number of ranks"
            )
        registry.local_state.keep(
            version, registry.capture_local_state(registry.drawn(), version) if local_state is None else local_state
        )
        registry.common.keep(version, plain.common)
        return other

    def _sharing(self) -> Sharing:
        registry = self._registry
        return Sharing.of_rank(registry.shape.now(registry.members), registry.rank, registry.model_ranks())

    def close(self) -> None:
        """Returns when the part that is being written is complete, or after a minute."""
        if self.checkpoint is not None:
            self.checkpoint.close(_CLOSE_S)
