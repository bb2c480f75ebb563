"""Which release of torch this installation was compiled for; imports nothing that was compiled."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import requires

REMEDY = (
    "in the folder of its sources, with this torch installed: "
    "pip install --no-build-isolation --force-reinstall --no-deps ."
)


def compiled_for(requirements: Sequence[str] | None = None) -> str:
    """The releases of torch that fit, such as ``"2.13.*"``; empty where that is not known.

    Args:
        requirements: the package's, which setup.py has pinned; of the installed one if ``None``.
    """
    requirements = requires("sparsecomm") or [] if requirements is None else requirements
    pins = [text.removeprefix("torch==") for text in requirements if text.startswith("torch==")]
    return pins[0] if pins else ""


def problem_with(release: str, fitting: str) -> str:
    """Says why torch of that release does not fit, and is empty if it does."""
    if release.startswith(fitting.removesuffix("*")):
        return ""
    return f"torch {release} is installed, and sparsecomm was compiled for {fitting}"


def require(release: str) -> None:
    """Raises ImportError unless torch of that release is what sparsecomm was compiled for.

    Torch's C++ interface changes with every minor release: the extension would end in an undefined
    symbol, or load and misread memory.
    """
    if problem := problem_with(release, compiled_for()):
        raise ImportError(f"{problem}; {REMEDY}", name="sparsecomm")
