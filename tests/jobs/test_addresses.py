"""Which addresses are nobody's but this machine's or a private network's."""

import pytest

from jobs.addresses import is_public, literal_address_is_public

PRIVATE = [
    "127.0.0.1", "::1", "::ffff:127.0.0.1", "169.254.169.254", "10.1.2.3", "172.16.0.1",
    "192.168.1.1", "0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "fe80::1%eth0",
    "fd00::1",
    "::7f00:1", "::ffff:0:7f00:1", "64:ff9b:1::7f00:1", "fec0::1", "4000::1",
    "192.0.0.192", "168.63.129.16", "::ffff:168.63.129.16",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "::", "ff02::1", "fd00:ec2::254",
]  # fmt: skip
PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_known(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_known(address):
    assert is_public(address)


@pytest.mark.parametrize("host", ["0x7f000001", "2130706433", "127.1", "0177.0.0.1", "localhost"])
def test_other_spellings_of_this_machine_are_known(host):
    assert not literal_address_is_public(host)


@pytest.mark.parametrize("host", ["shop.example", "1.1.1.1", "dead.beef.example"])
def test_a_name_is_left_to_who_asks_for_its_address(host):
    assert literal_address_is_public(host)
