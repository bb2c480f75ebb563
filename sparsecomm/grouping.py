"""Which parameters are exchanged together: what ``groups`` of a compression may be."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from sparsecomm.units import parse_bytes

MODEL, BUCKETS, AUTO = "model", "buckets", "auto"
_NAMED = (MODEL, BUCKETS, AUTO)
_LISTED = ", ".join(f'"{name}"' for name in _NAMED)
Groups: TypeAlias = int | str | Sequence[Sequence[str | nn.Module]] | None
_SHOWN = 5  # names in a message
_WHOLE = -1  # the number of parameters that are sent whole: one group, small as a rule


def checked(groups: Any) -> Groups:
    """Returns it with tuples for lists.

    Raises:
        TypeError: it is of no kind that ``groups`` may be of.
        ValueError: it is, and says nothing that can be done.
    """
    if groups is None or groups in _NAMED:
        return groups  # type: ignore[no-any-return]
    if isinstance(groups, bool) or not isinstance(groups, (int, str, Sequence)):
        raise TypeError(
            f'groups must be a number, {_LISTED}, a size such as "25MB", or lists of names or '
            f"modules, not {type(groups).__name__}"
        )
    if isinstance(groups, int):
        if groups < 1:
            raise ValueError(f"groups={groups} is no number of groups: use 1 or more")
        return groups
    if isinstance(groups, str):
        try:
            parse_bytes(groups)
        except ValueError as error:
            raise ValueError(
                f"groups={groups!r} is none of {_LISTED}, and no size: {error}"
            ) from error
        return groups
    lists = []
    for number, members in enumerate(groups):
        if isinstance(members, str) or not isinstance(members, Sequence):
            raise TypeError(
                f"groups[{number}] must be a list of names or modules, not {type(members).__name__}"
            )
        for member in members:
            if not isinstance(member, (str, nn.Module)):
                raise TypeError(
                    f"groups[{number}] has a {type(member).__name__}: give names, as in "
                    "model.named_parameters(), or modules"
                )
        if not members:
            raise ValueError(f"groups[{number}] is empty: leave it out")
        lists.append(tuple(members))
    if not lists:
        raise ValueError(f'groups has no list: give some, or "{MODEL}"')
    return tuple(lists)


def way(groups: Groups) -> str:
    """Returns how the engine is to form groups, as its ``GroupsBy`` names it."""
    if groups is None:
        return "arrival"
    return {BUCKETS: "bucket", AUTO: "measured"}.get(str(groups), "number")


def described(groups: Groups) -> str:
    """Returns what ranks compare; it is empty if nothing was said."""
    if groups is None or isinstance(groups, int) or groups in _NAMED:
        return "" if groups is None else str(groups)
    if isinstance(groups, str):
        return f"{parse_bytes(groups)} bytes"
    members = [[_named(member) for member in each] for each in groups]
    return f"{len(members)} lists with the checksum {zlib.crc32(repr(members).encode()):08x}"


def _named(member: str | nn.Module) -> str:
    if isinstance(member, str):
        return member
    shapes = [tuple(parameter.shape) for parameter in member.parameters()]
    return f"{type(member).__name__} of {shapes}"


def with_names(groups: Groups, named: Sequence[tuple[str, Tensor]]) -> Groups:
    """Returns the same with names of parameters in place of modules."""
    if groups is None or isinstance(groups, (int, str)):
        return groups
    names = {parameter: name for name, parameter in named}
    return tuple(
        tuple(
            name
            for member in members
            for name in (
                [member]
                if isinstance(member, str)
                else [names[parameter] for parameter in _fitting(member, names)]
            )
        )
        for members in groups
    )


def numbers(
    groups: Groups, named: Sequence[tuple[str, Tensor]], is_whole: Callable[[Tensor], bool]
) -> list[tuple[Tensor, int]]:
    """Returns the number of each trained parameter's group.

    Numbers count in the opposite order of parameters, that in which backward passes bring their
    gradients, but for lists, which keep theirs. Of lists, frozen parameters have theirs too, which
    may be trained later.

    Args:
        groups: what :func:`checked` returned, of which :func:`way` is ``"number"``.
        named: the model's parameters.
        is_whole: whether every entry of a parameter is sent. Such are a group of their own.

    Raises:
        ValueError: more groups than parameters, a size below that of a parameter, or lists that
            name what is not there, name a parameter twice, or leave one out.
    """
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    chosen = [(name, parameter) for name, parameter in trained if not is_whole(parameter)]
    if groups == MODEL:
        found = [0 for _ in chosen]
    elif isinstance(groups, int):
        found = _balanced(groups, chosen)
    elif isinstance(groups, str):
        found = _capped(groups, chosen)
    else:
        assert groups is not None
        return _listed(groups, named, chosen, is_whole)
    by_parameter = {parameter: number for (_, parameter), number in zip(chosen, found, strict=True)}
    return [(parameter, by_parameter.get(parameter, _WHOLE)) for _, parameter in trained]


def _balanced(count: int, chosen: Sequence[tuple[str, Tensor]]) -> list[int]:
    """Splits into runs of which the largest is as small as can be."""
    if count > len(chosen):
        raise ValueError(
            f"groups={count} is more than the {len(chosen)} parameters of which a share is sent; "
            "use fewer"
        )
    sizes = [parameter.numel() for _, parameter in reversed(chosen)]
    low, high = max(sizes, default=0), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _runs(sizes, middle, 1)[-1] < count:
            high = middle
        else:
            low = middle + 1
    return _runs(sizes, low, count)[::-1] if sizes else []


def _runs(sizes: Sequence[int], largest: int, least: int) -> list[int]:
    """Numbers runs that hold no more than ``largest``, and are ``least`` in number or more."""
    found: list[int] = []
    held = 0
    for place, size in enumerate(sizes):
        number = found[-1] if found else 0
        must_begin = len(sizes) - place < least - number
        if found and (held + size > largest or must_begin):
            number, held = number + 1, 0
        held += size
        found.append(number)
    return found


def _capped(size: str, chosen: Sequence[tuple[str, Tensor]]) -> list[int]:
    capacity = parse_bytes(size)
    for name, parameter in chosen:
        if parameter.nbytes > capacity:
            raise ValueError(
                f"groups={size!r} is less than {name}, which takes {parameter.nbytes / 1e6:.3g}MB: "
                "a parameter is in one group, so use at least that"
            )
    return _runs([parameter.nbytes for _, parameter in reversed(chosen)], capacity, 1)[::-1]


def _listed(
    lists: Sequence[Sequence[str | nn.Module]],
    named: Sequence[tuple[str, Tensor]],
    chosen: Sequence[tuple[str, Tensor]],
    is_whole: Callable[[Tensor], bool],
) -> list[tuple[Tensor, int]]:
    place: dict[Tensor, int] = {}
    names = {parameter: name for name, parameter in named}
    for number, members in enumerate(lists):
        for member in members:
            fitting = _fitting(member, names)
            if not fitting:
                what = repr(member) if isinstance(member, str) else f"a {type(member).__name__}"
                raise ValueError(
                    f"groups[{number}] has {what}, of which no parameter is exchanged; use the "
                    "names of model.named_parameters(), or of modules: a parameter that several "
                    "modules share has the first of its names alone"
                )
            for parameter in fitting:
                if place.setdefault(parameter, number) != number:
                    raise ValueError(
                        f"{names[parameter]} is in groups[{place[parameter]}] and in "
                        f"groups[{number}]: a parameter is in one group"
                    )
    missing = [name for name, parameter in chosen if parameter not in place]
    if missing:
        more = len(missing) - _SHOWN
        raise ValueError(
            f"groups leaves out {', '.join(missing[:_SHOWN])}"
            + (f" and {more} more" if more > 0 else "")
            + ": put each parameter of which a share is sent into one of the lists"
        )
    return [
        (parameter, _WHOLE if is_whole(parameter) else place[parameter])
        for _, parameter in named
        if is_whole(parameter) or parameter in place
    ]


def _fitting(member: str | nn.Module, names: dict[Tensor, str]) -> list[Tensor]:
    if isinstance(member, nn.Module):
        return [parameter for parameter in member.parameters() if parameter in names]
    return [p for p, name in names.items() if name == member or name.startswith(member + ".")]
