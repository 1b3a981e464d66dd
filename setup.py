"""Cythonizes the extension modules under fastprod/_core; metadata is in pyproject.toml.

FASTPROD_DEBUG=1       bounds checks, overflow checks and C assertions on, optimiser off
FASTPROD_SANITIZE=...  adds -fsanitize=... (address, undefined), for the sanitizer run
FASTPROD_COVERAGE=1    line tracing, so that coverage.py can see inside .pyx files
"""

import os
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup


def flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


debug = flag("FASTPROD_DEBUG")
coverage = flag("FASTPROD_COVERAGE")
sanitize = os.environ.get("FASTPROD_SANITIZE")

CPLUSPLUS = {"_arrow_memory", "_json"}  # for pyarrow's C++ objects, for std::to_chars; all else is C
compile_args = ["-pthread", "-fvisibility=hidden"]
compile_args += ["-O0", "-g3", "-UNDEBUG", "-DFASTPROD_DEBUG=1"] if debug else ["-O3", "-g1"]
link_args = ["-pthread"]
macros: list[tuple[str, str | None]] = [("_GNU_SOURCE", None)]
if sanitize:
    compile_args += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
    link_args += [f"-fsanitize={sanitize}"]
if coverage:
    macros += [("CYTHON_TRACE_NOGIL", "1"), ("CYTHON_USE_SYS_MONITORING", "0")]

core = Path("fastprod/_core")
setup(
    # Spark finds data sources in top-level modules named pyspark_*; ours lives with the rest of the Spark code.
    packages=[*find_packages(include=["fastprod", "fastprod.*"]), "pyspark_fastprod"],
    package_dir={"pyspark_fastprod": "fastprod/spark/_discovery"},
    ext_modules=cythonize(
        [
            Extension(
                f"fastprod._core.{source.stem}",
                [source.as_posix()],
                include_dirs=[core.as_posix()],
                extra_compile_args=[f"-std={'c++17' if source.stem in CPLUSPLUS else 'c11'}", *compile_args],
                extra_link_args=link_args,
                define_macros=macros,
                libraries=["dl"],
            )
            for source in sorted(core.glob("*.pyx"))
        ],
        compiler_directives={
            "language_level": 3,
            "boundscheck": debug,
            "initializedcheck": debug,
            "overflowcheck": False,
            "wraparound": False,
            "cdivision": True,
            # Lists of receipts and blocks are kept by the GIL: a free-threaded Python turns it on for us.
            "freethreading_compatible": False,
            "embedsignature": True,
            "linetrace": coverage,
        },
        build_dir=os.environ.get("FASTPROD_BUILD_DIR", "build/cython"),
        force=debug or coverage or bool(sanitize),
    ),
)
