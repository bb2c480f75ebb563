"""What this installation of sparsecomm consists of."""

from __future__ import annotations

from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sparsecomm import _C, transports

__version__ = version("sparsecomm")
# Present where sparsecomm was built with nvcc.
CUDA_LIBRARY = Path(_C.__file__).with_name("_cuda.so")
_C.use_cuda_library(str(CUDA_LIBRARY))


def build_info() -> dict[str, Any]:
    """Returns the compiled parts that are present.

    Keys: ``version``, ``torch`` (the release it runs with), ``compiler``, ``simd_targets``
    (instruction sets that this machine can run, the scalar oracle first), ``simd_target`` (the one
    in use), ``index_codecs``, ``value_codecs``, ``algorithms``, ``transports`` (those that can be
    used here), ``transport`` (what ``"auto"`` takes where it works on all ranks),
    ``transport_problems`` (by transport, why the others cannot), ``ucx`` (the release and the file,
    ``None`` without), ``cuda`` (whether the CUDA kernels were built), and ``cuda_problem`` (why
    they cannot be used here, empty where they can).
    """
    table = transports.table()
    problems = {row["name"]: row["problem"] for row in table if row["problem"]}
    usable = [row for row in table if not row["problem"]]
    options = transports.connect_options(transports.AUTO, timedelta(0))
    return {
        "version": __version__,
        "torch": torch.__version__,
        **_C.build_info(),
        "cuda": CUDA_LIBRARY.exists(),
        "cuda_problem": _C.cuda_problem(str(CUDA_LIBRARY)),
        "transports": [row["name"] for row in usable],
        "transport": next(row["name"] for row in usable if row["automatic"])
        if options.transport == transports.AUTO
        else options.transport,
        "transport_problems": problems,
        "ucx": None if "ucx" in problems else _C.ucx_version(options),
    }
