"""The modules that hold an optimizer's parameters, to notice that one was replaced there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

from sparsecomm.instances import instances


class Owners:
    """Knows in which modules, under which names, parameters were when they were added."""

    def __init__(self) -> None:
        self._places: dict[Tensor, list[tuple[weakref.ref[nn.Module], str]]] = {}

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Finds the modules; a pass over all that the garbage collector tracks."""
        added: dict[Tensor, list[tuple[weakref.ref[nn.Module], str]]]
        added = {parameter: [] for parameter in parameters}
        for module in instances(nn.Module):
            held = vars(module).get("_parameters")
            for key, parameter in held.items() if type(held) is dict else ():
                if parameter in added:
                    added[parameter].append((weakref.ref(module), key))
        self._places |= added

    def successor(self, parameter: Tensor) -> Tensor | None:
        """What trains in the parameter's place, in all modules that had it and are there still."""
        found = None
        for module, key in self._places[parameter]:
            owner = module()
            now = None if owner is None else owner._parameters.get(key)
            if now is parameter:
                return None
            # Where several had it and one has none now, it was taken apart, as by pruning.
            if now is not None and now.requires_grad and now not in self._places:
                found = now
        return found
