"""Tasks on a Dask cluster; what a lost worker did is done again by another, and counted once."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from equilibria.errors import EquilibriaError, positive
from equilibria.lab.harness.workers import Call, Done, Failed, work

if TYPE_CHECKING:
    from distributed import Client


_ADDRESS = re.compile(r"((tcp|tls|ws|wss|ucx)://)?(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):\d{1,5}/?")
_EXPECTED = "expected the address that `dask scheduler` prints, such as tcp://host:8786"


class Cluster:
    """Does the tasks on the workers of a Dask scheduler, which must have the same equilibria installed.

    Raises:
        EquilibriaError: if distributed is not installed, or no scheduler with a worker answers in time.
    """

    def __init__(self, address: str, *, timeout: float = 5.0) -> None:
        self._address = address
        self._client = _connect(address, positive("timeout", timeout))

    def run(self, calls: Mapping[str, Call], finished: Callable[[str, Done | Failed], None]) -> None:
        """See `Workers.run`."""
        from distributed import as_completed

        run = uuid.uuid4().hex  # a scheduler that has seen a key before would answer with its old result
        futures = {self._client.submit(work, call, key=f"{key}-{run}"): key for key, call in calls.items()}
        try:
            for future in as_completed(futures, loop=self._client.loop):
                failure = future.exception()
                outcome = future.result() if failure is None else Failed(f"{type(failure).__name__}: {failure}")
                finished(futures[future], outcome)
                future.release()  # the scheduler may forget it: it is on disk here
        except BaseException:
            self._client.cancel(list(futures), force=True)
            raise

    def close(self) -> None:
        """Leave the cluster; it goes on without us."""
        self._client.close()


def _connect(address: str, timeout: float) -> Client:
    try:
        from distributed import Client
    except ImportError:
        raise EquilibriaError(
            f"got cluster={address!r}, which needs Dask; install it: pip install 'equilibria[cluster]'"
        ) from None
    if not _ADDRESS.fullmatch(address):  # a client of what is no address complains again when it is thrown away
        raise EquilibriaError(f"got cluster={address!r}; {_EXPECTED}")
    try:
        client = Client(address, timeout=timeout, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:  # ValueError: an address of no known form
        raise EquilibriaError(
            f"got cluster={address!r}, where no Dask scheduler answers within {timeout:g} s ({_first_line(error)}); "
            f"{_EXPECTED}"
        ) from None
    try:
        client.wait_for_workers(1, timeout=timeout)
    except TimeoutError:
        client.close()
        raise EquilibriaError(
            f"got cluster={address!r}, which has no worker; start one: dask worker {address}"
        ) from None
    return client


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
