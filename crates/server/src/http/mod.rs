//! HTTP: connections, the router with its middleware, bodies as JSON, errors, and shutdown.

pub(crate) mod accept;
pub(crate) mod blocking;
pub(crate) mod body;
pub(crate) mod caller;
pub(crate) mod drain;
pub(crate) mod error;
pub(crate) mod fields;
pub(crate) mod json;
mod json_parser;
pub(crate) mod listen;
pub(crate) mod long_text;
pub(crate) mod route_table;
pub(crate) mod router;
pub(crate) mod routes;
