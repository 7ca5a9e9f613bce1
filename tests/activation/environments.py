"""Throw-away virtual environments that share the packages of the running one, with this project installed into them by pip."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# what a user's checkout holds and an installation needs
CHECKOUT = ("setup.py", "pyproject.toml", "LICENSE", "README.md", "ds_basisrot_autoload.py", "ds_basisrot", "megatron_patches")
SWITCHES = ("DS_BASISROT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE")


class Environment:
    """One virtual environment, in the folder `path`."""

    def __init__(self, path: Path):
        self.path = path
        self.python = path / "bin" / "python"
        self.site_packages = path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    @classmethod
    def create(cls, path: Path) -> "Environment":
        """A new environment: links to every package of the running one, except any installation of this project."""
        venv.EnvBuilder(with_pip=False, symlinks=True).create(path)
        environment = cls(path)
        for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(folder).iterdir():
                link = environment.site_packages / entry.name
                if "ds_basisrot" not in entry.name and entry.name != "__pycache__" and not link.exists():
                    link.symlink_to(entry)
        return environment

    def copy(self, path: Path) -> "Environment":
        """A copy that a test may break."""
        shutil.copytree(self.path, path, symlinks=True)
        return Environment(path)

    def install(self, checkout: Path, *options: str) -> None:
        """pip install `checkout`, offline."""
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
            + [*options, checkout],
            check=True,
        )

    def run(self, *arguments, expect_code: int | None = 0, **variables: str) -> subprocess.CompletedProcess:
        """Run this environment's Python on `arguments` away from the checkout; its output comes back as text."""
        clean = {name: value for name, value in os.environ.items() if name not in SWITCHES}
        result = subprocess.run(
            [self.python, *arguments], cwd=self.path, env={**clean, **variables}, capture_output=True, text=True, timeout=120
        )
        if expect_code is not None:
            assert result.returncode == expect_code, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result


def copy_checkout(path: Path) -> Path:
    """The parts of this checkout that an installation needs, copied to the new folder `path`."""
    path.mkdir()
    for name in CHECKOUT:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, path / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy2(source, path / name)
    return path
