"""What takes the batches of a data stream: a generator that lives from step to step cannot be rolled back.

A stop unwinds the step, and so ends every generator that waits for a batch; what such a generator has fetched ahead
belongs to no version. It is named in the second step in which it asks. A generator that is made and used up within one
step is harmless, and so is one *behind* the stream: ``recovery.data(prefetch(loader))``.
"""

from __future__ import annotations

import gc
import inspect
import types
import weakref

from flashrecovery.errors import DataSourceError

_step = 0
"""Counts the steps that this process has entered."""
_step_code: types.CodeType | None = None
"""The function that contains the ``with step:``."""


def step_entered(frame: types.FrameType | None) -> None:
    """``frame``: where the ``with step:`` is."""
    global _step, _step_code
    _step += 1
    _step_code = None if frame is None else frame.f_code


class Consumers:
    """The generators through which one stream has been asked for batches."""

    def __init__(self) -> None:
        self._known: dict[types.CodeType, tuple[int, weakref.ref[types.GeneratorType[object, object, object]]]] = {}
        self._harmless: set[types.CodeType] = set()

    def check(self, frame: types.FrameType | None) -> None:
        """``frame`` asks for a batch. Raises DataSourceError if a generator that does so has lived in an earlier step,
        too."""
        while frame is not None and frame.f_code is not _step_code:
            if frame.f_code.co_flags & inspect.CO_GENERATOR and frame.f_code not in self._harmless:
                self._check_generator(frame)
            frame = frame.f_back

    def _check_generator(self, frame: types.FrameType) -> None:
        code = frame.f_code
        if code not in self._known:
            generator = _generator_of(frame)
            if generator is not None:
                self._known[code] = _step, weakref.ref(generator)
            return
        step, reference = self._known[code]
        generator = reference()
        if generator is None or generator.gi_frame is not frame:
            self._harmless.add(code)  # each step makes its own
        elif step != _step:
            raise DataSourceError(
                f"the generator {code.co_name!r} ({code.co_filename}:{code.co_firstlineno}) takes batches of "
                "recovery.data() from step to step: a recovery can neither go on with it nor bring back what it has "
                "fetched ahead; turn the two around, so that it reads the loader itself: "
                f"recovery.data({code.co_name}(loader))"
            )


def _generator_of(frame: types.FrameType) -> types.GeneratorType[object, object, object] | None:
    """Frames do not refer to their generators. Asked once for each generator function."""
    for thing in gc.get_objects():
        if type(thing) is types.GeneratorType and thing.gi_frame is frame:
            return thing
    return None
