//! Words errors of the HTTP library for users; `hub`, `server_client` and `guard_service` share it.

use std::io;

use ureq::{Error, Timeout};

use crate::hub::http::CONNECT_LIMIT;

/// Words of the TLS library in the error of a certificate, in lower case, and what is wrong with the certificate.
const CERTIFICATES: [(&str, &str); 6] = [
    ("unknownissuer", "its certificate is signed by an authority that this machine does not trust"),
    ("expired", "its certificate has expired"),
    ("not valid yet", "its certificate is not valid yet"),
    ("notvalidyet", "its certificate is not valid yet"),
    ("not valid for name", "its certificate is for another name"),
    ("notvalidforname", "its certificate is for another name"),
];

/// Says why a request to `host` has no answer, or a broken one.
pub(crate) fn sentence(error: &Error, host: &str) -> String {
    match error {
        Error::HostNotFound => format!("the name {host} could not be resolved"),
        Error::Timeout(Timeout::Resolve) => {
            format!("the name {host} could not be resolved within {} s", CONNECT_LIMIT.as_secs())
        }
        Error::Timeout(Timeout::Connect) => format!("no connection to {host} within {} s", CONNECT_LIMIT.as_secs()),
        Error::Timeout(_) => format!("{host} did not answer in time"),
        Error::Io(error) => io_sentence(error, host),
        Error::Rustls(error) => no_tls(&error.to_string(), host),
        Error::Tls(_) | Error::TlsRequired | Error::Pem(_) => no_tls("", host),
        Error::Protocol(_) | Error::LargeResponseHeader(..) => format!("{host} sent an answer that is not HTTP"),
        Error::BodyExceedsLimit(limit) => format!("{host} sent an answer of more than {limit} bytes"),
        Error::Json(_) => format!("{host} sent an answer that is not the JSON that was expected"),
        Error::TooManyRedirects | Error::RedirectFailed => format!("{host} redirected the request too often"),
        Error::InvalidProxyUrl | Error::ConnectProxyFailed(_) => {
            format!("the proxy of the environment makes no connection to {host}")
        }
        Error::BadUri(_) | Error::Http(_) => format!("the address of {host} is not valid"),
        _ => format!("the request to {host} failed"),
    }
}

fn io_sentence(error: &io::Error, host: &str) -> String {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => format!("{host} refused the connection"),
        io::ErrorKind::UnexpectedEof => format!("{host} closed the connection without an answer"),
        io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted | io::ErrorKind::BrokenPipe => {
            format!("{host} cut the connection")
        }
        // An error of the TLS library, of the kind `InvalidData`.
        io::ErrorKind::InvalidData => no_tls(&error.to_string(), host),
        // The standard library has no error kind for a name that does not resolve.
        _ if error.to_string().contains("lookup address") => format!("the name {host} could not be resolved"),
        _ => format!("the connection to {host} failed: {error}"),
    }
}

fn no_tls(text: &str, host: &str) -> String {
    let text = text.to_ascii_lowercase();
    let reason = if text.contains("certificate") {
        let known = CERTIFICATES.iter().find(|(theirs, _)| text.contains(theirs));
        known.map_or("its certificate is not valid", |(_, ours)| ours)
    } else {
        "it does not speak TLS as https needs it"
    };
    format!("no secure connection to {host}: {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_told_in_our_words() {
        let io = |kind: io::ErrorKind| Error::Io(kind.into());
        let invalid = |text: &str| Error::Io(io::Error::new(io::ErrorKind::InvalidData, text.to_owned()));
        let json = serde_json::from_str::<u8>("x").unwrap_err();
        for (error, expected) in [
            (io(io::ErrorKind::ConnectionRefused), "x refused the connection"),
            (io(io::ErrorKind::ConnectionReset), "x cut the connection"),
            (invalid("invalid peer certificate: Expired"), "no secure connection to x: its certificate has expired"),
            (
                invalid("invalid peer certificate: UnknownIssuer"),
                "no secure connection to x: its certificate is signed by an authority that this machine does not trust",
            ),
            (
                invalid("invalid peer certificate: certificate not valid for name \"x\""),
                "no secure connection to x: its certificate is for another name",
            ),
            (
                invalid("received corrupt message of type InvalidContentType"),
                "no secure connection to x: it does not speak TLS as https needs it",
            ),
            (Error::Timeout(Timeout::Global), "x did not answer in time"),
            (Error::Json(json), "x sent an answer that is not the JSON that was expected"),
            (Error::BodyExceedsLimit(5), "x sent an answer of more than 5 bytes"),
            (Error::ConnectionFailed, "the request to x failed"),
        ] {
            assert_eq!(sentence(&error, "x"), expected);
        }
    }
}
