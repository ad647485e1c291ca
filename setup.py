"""Packaging of horovod_gradcomp.

Installing the package must never touch the torch, TensorFlow, Horovod or NumPy that
are already there: it requires none of them. Horovod itself has to be built for the
frameworks at hand (``docker/install_horovod.sh``), which no package index can do.

With a C compiler the compiled kernels are built, without Python's or a framework's
headers; without one the package is complete all the same, and slower on CPUs.
"""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"


def read_version() -> str:
    """Read the version without importing the package."""
    text = (HERE / "horovod_gradcomp" / "_version.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__\s*(?::[^=]+)?=\s*"([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('horovod_gradcomp/_version.py has no line __version__ = "..."')
    return match.group(1)


NATIVE = Path("horovod_gradcomp", "native")


def extension(name, folder, libraries):
    """Return what builds the C sources of a folder; no library among them is Python's."""

    def paths(ending):
        found = (HERE / NATIVE / folder).glob(ending)
        return sorted(path.relative_to(HERE).as_posix() for path in found)

    return Extension(
        f"horovod_gradcomp.native.{name}",
        sources=paths("*.c"),
        depends=[*paths("*.h"), (NATIVE / "kernels.h").as_posix()],
        extra_compile_args=[
            "-std=c11",
            "-O3",
            "-pthread",
            # The bits of the tensor operations: no multiply-and-add in one rounding.
            "-ffp-contract=off",
            "-fno-fast-math",
            # Neither changes a value; loops over comparisons and roots need them.
            "-fno-math-errno",
            "-fno-trapping-math",
            "-fvisibility=hidden",
        ],
        extra_link_args=["-pthread"],
        libraries=libraries,
        optional=True,
    )


class BuildKernels(build_ext):
    """Say what it means when there is no compiler."""

    def build_extension(self, ext):
        """Build the kernels."""
        try:
            super().build_extension(ext)
        except Exception:
            self.warn(
                "the compiled kernels cannot be built: tensor operations, which give the same "
                "bits and take longer on CPUs, will be used instead"
            )
            raise


setup(
    name="horovod_gradcomp",
    version=read_version(),
    description="Gradient compression for Horovod on PyTorch, TensorFlow and Keras",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="The horovod_gradcomp authors",
    keywords=["horovod", "gradient compression", "distributed training", "pytorch", "tensorflow"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["horovod_gradcomp", "horovod_gradcomp.*"]),
    package_data={"horovod_gradcomp": ["py.typed", "cli/*.json"]},
    ext_modules=[
        extension("_kernels", "", ["m"]),
        extension("_tensorflow", "tensorflow", ["dl"]),
    ],
    cmdclass={"build_ext": BuildKernels},
    zip_safe=False,
    python_requires=">=3.9",
    install_requires=[],
    entry_points={"console_scripts": ["gradcomp = horovod_gradcomp.cli.main:main"]},
    extras_require={
        "cli": ["rich", "typer"],
        "docs": ["furo", "myst-parser", "sphinx"],
        "examples": ["mlxtend", "numpy", "rich", "typer"],
        "plot": ["matplotlib", "rich"],
        "test": ["hypothesis", "numpy", "pytest", "pytest-timeout", "pytest-xdist", "tensorboard"],
    },
)
