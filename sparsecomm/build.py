"""The versions and compiled parts of this installation."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sparsecomm import _C, torch_release, transports

__version__ = version("sparsecomm")
# Present where sparsecomm was built with nvcc, for a torch with CUDA.
CUDA_LIBRARY = Path(_C.__file__).with_name("_cuda.so")
_C.use_cuda_library(str(CUDA_LIBRARY))


def build_info() -> dict[str, Any]:
    """Returns the compiled parts that are present.

    Keys: ``version``, ``torch`` (the release it runs with), ``compiled_for_torch`` (those that
    fit, such as ``"2.13.*"``), ``compiler``, ``simd_targets`` (instruction sets that this machine
    can run, the scalar oracle first), ``simd_target`` (the one in use), ``index_codecs``,
    ``value_codecs``, ``algorithms``, ``transports`` (those that can be used here), ``transport``
    (what ``"auto"`` takes where it works on all ranks), ``transport_problems`` (by transport, why
    the others cannot), ``ucx`` (the release and the file, ``None`` without), ``listening`` (by
    transport, the interfaces on which ranks accept connections), ``listening_on_loopback`` (the
    same if the store is on the loopback interface), ``cuda`` (whether the CUDA kernels were built),
    and ``cuda_problem`` (why they cannot be used here, empty where they can).
    """
    table = transports.table()
    problems = {row["name"]: row["problem"] for row in table if row["problem"]}
    usable = [row for row in table if not row["problem"]]
    options = transports.query_options()
    return {
        "version": __version__,
        "torch": torch.__version__,
        "compiled_for_torch": torch_release.compiled_for(),
        **_C.build_info(),
        "cuda": CUDA_LIBRARY.exists(),
        "cuda_problem": _C.cuda_problem(str(CUDA_LIBRARY)),
        "transports": [row["name"] for row in usable],
        "transport": next(row["name"] for row in usable if row["automatic"])
        if options.transport == transports.AUTO
        else options.transport,
        "transport_problems": problems,
        "ucx": None if "ucx" in problems else _C.ucx_version(options),
        "listening": transports.listening(loopback=False),
        "listening_on_loopback": transports.listening(loopback=True),
    }
