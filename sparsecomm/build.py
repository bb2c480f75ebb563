"""What this installation of sparsecomm consists of."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

from sparsecomm import _C

__version__ = version("sparsecomm")


def build_info() -> dict[str, Any]:
    """Returns the compiled parts that are present.

    Keys: ``version``, ``torch`` (the release it runs with), ``compiler``, ``simd_targets``
    (instruction sets that this machine can run, the scalar oracle first), ``simd_target`` (the one
    in use), ``index_codecs``, ``value_codecs``, ``algorithms``, ``transports``, and ``cuda``
    (whether the CUDA kernels are there).
    """
    return {"version": __version__, "torch": torch.__version__, **_C.build_info()}
