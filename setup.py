"""Builds and installs ds_basisrot; an editable install also carries its own copy of the PyTorch autoload module."""

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from setuptools import find_packages, setup

try:
    from setuptools.command.editable_wheel import editable_wheel
except ImportError:  # setuptools before 64 has no editable wheels; its `develop` install works as usual
    editable_wheel = None

ROOT = Path(__file__).resolve().parent
AUTOLOAD_FILE = "ds_basisrot_autoload.py"
DEEPSPEED = "deepspeed>=0.19,<0.20"
MEGATRON = "megatron-core>=0.16,<0.17"


def add_to_wheel(wheel: Path, source: Path) -> None:
    """Add `source` to the top folder of a finished `wheel` and to its RECORD; a wheel that has it already is left as it is."""
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    if source.name in contents:
        return
    data = source.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    record = next(name for name in contents if name.endswith(".dist-info/RECORD"))
    contents[record] = f"{source.name},sha256={digest},{len(data)}\n".encode() + contents[record]
    contents[source.name] = data
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def command_classes() -> dict:
    """An `editable_wheel` that ships the autoload module itself instead of a pointer to the checkout.

    PyTorch loads our entry point at the end of `import torch`. If the module lived in the checkout only, deleting or moving the
    checkout would break `import torch`; a copy in site-packages can still say what is wrong.
    """
    if editable_wheel is None:
        return {}

    class EditableWheelWithAutoload(editable_wheel):
        def run(self):
            super().run()
            for wheel in Path(self.dist_dir).glob("ds_basisrot-*.whl"):
                add_to_wheel(wheel, ROOT / AUTOLOAD_FILE)

    return {"editable_wheel": EditableWheelWithAutoload}


def read(name: str) -> str:
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
    name="ds_basisrot",
    version=re.search(r'^__version__ = "(.+)"$', read("ds_basisrot/__init__.py"), re.MULTILINE).group(1),
    description="Pipelines without flushes, and Adam in a rotated basis that tolerates their staleness, for DeepSpeed",
    long_description=read("README.md"),
    long_description_content_type="text/markdown",
    author="the ds_basisrot authors",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.6",
        "numpy",
        "pydantic>=2",
        "wrapt",
        "pyyaml",
        "safetensors",
        "rich",
        "matplotlib",
    ],
    extras_require={
        "deepspeed": [DEEPSPEED],
        "megatron": [MEGATRON],
        "data": ["tokenizers", "datasets"],
        "peers": ["pytorch-optimizer"],
        # setuptools builds wheels by itself since 70.1; the tests of installations need that
        "test": ["pytest", "hypothesis", "ruff", "setuptools>=70.1", "transformers>=5,<6", "accelerate>=1,<2", DEEPSPEED, MEGATRON],
    },
    # Naming the root makes an editable install a plain .pth line. The other form, an import finder, loses against any folder called
    # ds_basisrot in the current directory, such as the checkout itself seen from its parent.
    package_dir={"": "."},
    packages=find_packages(include=["ds_basisrot*", "megatron_patches*"]),
    py_modules=["ds_basisrot_autoload"],
    entry_points={
        "console_scripts": ["ds-basisrot = ds_basisrot.cli:main"],
        "torch.backends": ["ds_basisrot = ds_basisrot_autoload:activate"],
    },
    cmdclass=command_classes(),
)
