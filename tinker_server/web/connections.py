"""Open connections, each counted for an account: the owner of the key that came on it, or before that its address.

File descriptors are few, and a new connection must not fail because somebody holds all of them. So beyond a bound a new
connection ends another: of the account that has the most, the connection that was silent for longest.
"""

import ipaddress
import resource
from collections import OrderedDict
from typing import Protocol

MOST_STRANGERS, MOST = 8192, 40960
"""Connections on which no key has come, and all connections. The first take at most 64 KiB each (the head of a
request) for 20 s."""
PART_OF_STRANGERS, PART_OF_ALL = 0.25, 0.75
"""Parts of the process's file descriptors: what strangers always have, and what all connections may take. The others
are for files, the database and the engines."""
MOST_HELD, PART_OF_HELD = 4096, 0.5
"""Requests that wait for the server to start, and their part of all connections: each of them has one."""
PREFIX_IPV6 = 64
"""Bits of an IPv6 address that tell clients apart: whoever has one has 2**64."""


class Connection(Protocol):
    """What can be ended."""

    def end(self) -> None:
        """End the connection at once."""


class Accounts:
    """Connections of a kind by their accounts, each account's in the order of their last activity."""

    def __init__(self) -> None:
        self.num = 0
        self._of: dict[str, OrderedDict[Connection, None]] = {}

    def add(self, account: str, connection: Connection) -> None:
        """Count a connection."""
        self._of.setdefault(account, OrderedDict())[connection] = None
        self.num += 1

    def note_activity(self, account: str, connection: Connection) -> None:
        """Note that a client has sent or read something."""
        if connection in self._of.get(account, ()):
            self._of[account].move_to_end(connection)

    def remove(self, account: str, connection: Connection) -> None:
        """Count a connection no longer. Ignore it if it is not counted: it was ended to make room."""
        connections = self._of.get(account)
        if connections is None or connection not in connections:
            return
        del connections[connection]
        self.num -= 1
        if not connections:
            del self._of[account]

    def end_one(self) -> None:
        """End the connection that was silent for longest, of the account that has the most."""
        largest = max(self._of, key=lambda name: len(self._of[name]))
        longest_silent = next(iter(self._of[largest]))
        self.remove(largest, longest_silent)
        longest_silent.end()


class Connections:
    """All connections of a server: of strangers, by address, and of owners."""

    def __init__(self) -> None:
        num_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if num_descriptors == resource.RLIM_INFINITY:
            num_descriptors = 2 * MOST
        self._most = min(MOST, int(num_descriptors * PART_OF_ALL))
        self._always = int(num_descriptors * PART_OF_STRANGERS)
        self.most_held = min(MOST_HELD, int(self._most * PART_OF_HELD))
        self.strangers, self.owners = Accounts(), Accounts()

    def make_room(self) -> None:
        """End a connection if there are too many: an owner's only if strangers have no more than their part."""
        is_full = self.strangers.num + self.owners.num > self._most
        if self.strangers.num > MOST_STRANGERS or (is_full and self.strangers.num > self._always):
            self.strangers.end_one()
        elif is_full:
            self.owners.end_one()


def account_of(address: str) -> str:
    """Return the account of a client's address: the address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # of a Unix socket, or of a link, as fe80::1%eth0
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:  # of a server that listens on ::
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), PREFIX_IPV6), strict=False))
