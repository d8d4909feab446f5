"""What ``pyproject.toml`` cannot say: the scripts of ``flashrecovery demo`` are installed beside the package."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLE = Path(__file__).parent / "examples" / "gpt"
SCRIPTS = ("train_ddp.py", "training.py", "model.py", "data.py", "corpus.py", "indexed_dataset.py")


class BuildWithDemo(build_py):
    """Copies what the demo runs."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for name in SCRIPTS:
                target = Path(self.build_lib) / "flashrecovery" / "demo" / name
                self.mkpath(str(target.parent))
                self.copy_file(str(EXAMPLE / name), str(target))


setup(cmdclass={"build_py": BuildWithDemo})
