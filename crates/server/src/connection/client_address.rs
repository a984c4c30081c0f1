//! The address of a client: that of its connection, or the one that a trusted proxy reports in a header.
//!
//! A header can be written by anyone, so it counts only if the connection comes from an address that the operator has
//! declared to be a proxy. Proxies append the address from which they received the request. The list is therefore read
//! from its end: entries that are trusted proxies themselves are skipped, and the first other one is the client.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use axum::http::{HeaderMap, HeaderName, header};

/// Header in which trusted proxies report addresses. Exactly one is read: a proxy overwrites or extends the one that it
/// knows and passes the other on as the client sent it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ForwardedHeader {
    /// `X-Forwarded-For: 192.0.2.1, 198.51.100.7`
    #[default]
    XForwardedFor,
    /// `Forwarded: for=192.0.2.1, for="[2001:db8::1]:80"` (RFC 7239)
    Forwarded,
}

/// The proxies in front of the server. Without any, headers about addresses are ignored.
#[derive(Debug, Clone, Default)]
pub struct Proxies {
    /// Addresses of the proxies.
    pub trusted: Vec<Network>,
    /// Header that they set.
    pub header: ForwardedHeader,
}

/// A range of addresses, as `10.0.0.0/8`, `fd00::/8` or a single address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix_len: u8,
}

impl FromStr for Network {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Network, Self::Err> {
        const EXPECTED: &str = "expected an address or a range of addresses such as 10.0.0.0/8 or fd00::/8";
        let (address, prefix_len) = match text.split_once('/') {
            Some((address, len)) => (address, Some(len.parse::<u8>().map_err(|_| EXPECTED)?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| EXPECTED)?;
        let max = if address.is_ipv4() { 32 } else { 128 };
        let prefix_len = prefix_len.unwrap_or(max);
        if prefix_len > max {
            return Err(EXPECTED);
        }
        Ok(Network { address, prefix_len })
    }
}

impl Network {
    /// Whether `address`, which must be canonical, lies in the range.
    fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let ignored = 32 - u32::from(self.prefix_len);
                (u64::from(own.to_bits()) >> ignored) == (u64::from(other.to_bits()) >> ignored)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let shift = |bits: u128| bits.checked_shr(128 - u32::from(self.prefix_len)).unwrap_or(0);
                shift(own.to_bits()) == shift(other.to_bits())
            }
            _ => false,
        }
    }
}

/// The part of an address that tells clients apart: an IPv4 address, or the /64 network of an IPv6 address, of which
/// one client usually has all addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct AddressKey(IpAddr);

impl AddressKey {
    pub(crate) fn of(address: IpAddr) -> AddressKey {
        AddressKey(match address.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
            v4 => v4,
        })
    }
}

/// The address of the client that sent a request, set by the outermost middleware.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientAddress(pub(crate) IpAddr);

impl Proxies {
    /// Whether connections from `address` are those of many clients: a declared proxy, or this machine, on which a
    /// proxy may run that was not declared.
    pub(crate) fn is_shared(&self, address: IpAddr) -> bool {
        address.to_canonical().is_loopback() || self.is_trusted(address)
    }

    /// Whether `address` is a declared proxy.
    pub(crate) fn is_trusted(&self, address: IpAddr) -> bool {
        self.trusted.iter().any(|network| network.contains(address.to_canonical()))
    }

    /// Returns the address of the client that sent a request with `headers` over a connection from `peer`. An entry
    /// that is not an address ends the search: the address found so far is the last one that a trusted proxy vouches
    /// for.
    pub(crate) fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut client = peer.to_canonical();
        let name = match self.header {
            ForwardedHeader::XForwardedFor => HeaderName::from_static("x-forwarded-for"),
            ForwardedHeader::Forwarded => header::FORWARDED,
        };
        if !self.is_trusted(client) {
            return client;
        }
        // Several lines are one list in the order of the lines.
        for line in headers.get_all(name).iter().rev() {
            for entry in line.to_str().unwrap_or_default().rsplit(',') {
                let address = match self.header {
                    ForwardedHeader::XForwardedFor => address_of(entry.trim()),
                    ForwardedHeader::Forwarded => forwarded_for(entry),
                };
                let Some(address) = address else { return client };
                client = address;
                if !self.is_trusted(client) {
                    return client;
                }
            }
        }
        client
    }
}

/// Parses an address with or without a port; an IPv6 address with a port has brackets.
fn address_of(text: &str) -> Option<IpAddr> {
    if let Some(rest) = text.strip_prefix('[') {
        return rest.split(']').next()?.parse::<Ipv6Addr>().ok().map(|address| IpAddr::V6(address).to_canonical());
    }
    let address = text.parse::<IpAddr>().ok();
    let with_port = || text.rsplit_once(':')?.0.parse::<Ipv4Addr>().ok().map(IpAddr::V4);
    address.or_else(with_port).map(|address| address.to_canonical())
}

/// Returns the address of the `for` parameter of an element of `Forwarded`.
fn forwarded_for(element: &str) -> Option<IpAddr> {
    let pairs = element.split(';').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.into_iter().find(|(name, _)| name.trim().eq_ignore_ascii_case("for"))?;
    address_of(value.trim().trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    fn proxies(header: ForwardedHeader) -> Proxies {
        let trusted = ["10.0.0.0/8", "192.0.2.7", "fd00::/8"].map(|network| network.parse().unwrap()).to_vec();
        Proxies { trusted, header }
    }

    #[test]
    fn ranges_contain_their_addresses() {
        let contains =
            |network: &str, address: &str| network.parse::<Network>().unwrap().contains(address.parse().unwrap());
        assert!(contains("10.0.0.0/8", "10.255.0.1") && !contains("10.0.0.0/8", "11.0.0.1"));
        assert!(contains("0.0.0.0/0", "203.0.113.9") && !contains("0.0.0.0/0", "::1"));
        assert!(contains("::/0", "2001:db8::1") && contains("2001:db8::/33", "2001:db8:7fff::1"));
        assert!(!contains("2001:db8::/33", "2001:db8:8000::1") && contains("192.0.2.7", "192.0.2.7"));
        assert!(!contains("192.0.2.7", "192.0.2.8") && !contains("::1", "::2"));
        for text in ["", "10.0.0.0/33", "10.0.0/8", "::/129", "a", "10.0.0.1/", "10.0.0.1/-1"] {
            assert!(text.parse::<Network>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn only_trusted_proxies_are_believed() {
        let client = |peer: &str, lines: &[(&'static str, &str)]| {
            proxies(ForwardedHeader::XForwardedFor).client(peer.parse().unwrap(), &headers(lines)).to_string()
        };
        let spoofed = ("x-forwarded-for", "203.0.113.1");
        assert_eq!(client("198.51.100.1", &[spoofed]), "198.51.100.1", "a client that is no proxy invents an address");
        assert_eq!(client("10.1.2.3", &[spoofed]), "203.0.113.1", "the control: a proxy is believed");
        assert_eq!(client("::ffff:10.1.2.3", &[spoofed]), "203.0.113.1");
        // The client invents an entry; the proxies append the true ones.
        let appended = ("x-forwarded-for", "1.1.1.1, 203.0.113.1:4711, 192.0.2.7");
        assert_eq!(client("10.1.2.3", &[appended]), "203.0.113.1");
        assert_eq!(client("10.1.2.3", &[spoofed, ("x-forwarded-for", "2001:db8::5,fd00::1")]), "2001:db8::5");
        assert_eq!(client("10.1.2.3", &[("x-forwarded-for", "203.0.113.1, unknown, 192.0.2.7")]), "192.0.2.7");
        assert_eq!(client("10.1.2.3", &[("x-forwarded-for", "10.0.0.1, 10.0.0.2")]), "10.0.0.1");
        assert_eq!(client("10.1.2.3", &[]), "10.1.2.3");
        assert_eq!(client("10.1.2.3", &[("forwarded", "for=203.0.113.1")]), "10.1.2.3", "one header is read");
        let forwarded = |line: &str| {
            let proxies = proxies(ForwardedHeader::Forwarded);
            proxies.client("10.1.2.3".parse().unwrap(), &headers(&[("forwarded", line), spoofed])).to_string()
        };
        assert_eq!(forwarded("for=1.1.1.1, For=\"[2001:db8::1]:80\";proto=https;by=10.0.0.1"), "2001:db8::1");
        assert_eq!(forwarded("for=203.0.113.4;host=a, for=192.0.2.7"), "203.0.113.4");
        assert_eq!(forwarded("for=203.0.113.4, for=_hidden"), "10.1.2.3");
    }

    #[test]
    fn addresses_of_one_network_count_as_one() {
        let key = |address: &str| AddressKey::of(address.parse().unwrap());
        assert_eq!(key("2001:db8:0:1::1"), key("2001:db8:0:1:ffff:ffff:ffff:ffff"));
        assert_ne!(key("2001:db8:0:1::1"), key("2001:db8:0:2::1"));
        assert_eq!(key("::ffff:192.0.2.1"), key("192.0.2.1"));
        assert_ne!(key("192.0.2.1"), key("192.0.2.2"));
    }
}
