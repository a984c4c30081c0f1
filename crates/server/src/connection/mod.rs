//! Connections below HTTP: their number and addresses, TLS, minimum rates, and clients that are gone.

pub(crate) mod client_address;
pub(crate) mod client_socket;
pub(crate) mod connections;
pub(crate) mod descriptors;
pub(crate) mod exchange;
pub(crate) mod tls;
pub(crate) mod transfer_rate;
