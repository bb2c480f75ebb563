"""How ranks find aggregators through the store that they meet at."""

import time
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from sparsecomm.transports import AUTO, aggregator_addresses, innermost

_KEY = "sparsecomm/aggregators"


def announce_aggregators(store: Store, addresses: Sequence[str]) -> None:
    """Tells all ranks that meet at ``store`` where aggregators are.

    For process groups with ``Options(aggregators="store")``, which wait for it. Called once, on any
    rank or by another program that has the store, such as the one that starts the aggregators. A
    store that outlives an attempt, as torchrun's may, keeps what was announced: announce anew
    before the ranks of the next one make their groups.

    Args:
        store: as ``init_process_group`` was given it, or of the default group:
            ``dist.distributed_c10d._get_default_store()``.
        addresses: HOST:PORT each.

    Raises:
        ValueError: there is none, or an address is not HOST:PORT or comes twice.
    """
    if not addresses:
        raise ValueError("no addresses were given; give HOST:PORT of one aggregator at least")
    aggregator_addresses(addresses, AUTO, environment={})  # checks them
    innermost(store).set(_KEY, ",".join(addresses))


def announced_aggregators(store: Store) -> list[str]:
    """Waits, as long as the store does, until some have been announced, and returns them."""
    base: Any = innermost(store)  # torch's stubs know no timeout of a Store
    end = time.monotonic() + base.timeout.total_seconds()
    while not base.check([_KEY]):  # get() would not let Ctrl-C through
        if time.monotonic() > end:
            raise RuntimeError(
                'aggregators="store": nobody has announced any; call '
                "sparsecomm.announce_aggregators(store, addresses) on one rank"
            )
        time.sleep(0.05)
    found: str = base.get(_KEY).decode()
    return found.split(",")
