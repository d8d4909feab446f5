"""Draw the picture of a run directory as its own SVG file, as ``docs/course.svg`` was:
``python scripts/draw_course.py RUN_DIR FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

from flashrecovery.events import RunFiles
from flashrecovery.observe.course import course_of
from flashrecovery.observe.picture import standalone


def main() -> int:
    run_dir, file = map(Path, sys.argv[1:])
    file.write_text(standalone(course_of(RunFiles(run_dir))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
