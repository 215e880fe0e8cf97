"""Which hosts are this machine alone, and which addresses are anybody's: RFC 6890 and its kin."""

import ipaddress
import socket

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # all of IPv6 that is anybody's: RFC 4291
# what `is_global` takes for public: protocol assignments with a cloud's metadata service among
# them, and another cloud's own server, which every one of its machines reaches at one address
_RESERVED = (ipaddress.ip_network("192.0.0.0/24"), ipaddress.ip_network("168.63.129.16/32"))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_network(text: str) -> bool:
    """Whether it is an address, or a network of such: 10.0.0.0/8."""
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def literal_address_is_public(host: str) -> bool:
    """False for an address that is not public, in any of its spellings (0x7f000001, 127.1), and for
    this machine's name. A name has to be asked for, which is not done here."""
    if host == "localhost" or host.endswith(".localhost"):
        return False
    try:
        return is_public(host)
    except ValueError:
        pass
    try:
        return is_public(socket.inet_ntoa(socket.inet_aton(host)))
    except OSError:
        return True


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, and no way round to another.

    An IPv6 address that is an IPv4 one in another spelling counts by that: mapped, NAT64. Tunnels
    (6to4, Teredo) are refused, and everything outside of global unicast.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip.sixtofour is not None or ip.teredo is not None:
            return False
        if ip in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip not in _GLOBAL_UNICAST:
            return False
    elif any(ip in network for network in _RESERVED):
        return False
    return ip.is_global and not ip.is_multicast
