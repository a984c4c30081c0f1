//! The limits of tenants: keys, rate limits, client memory, and the account of each request.

pub(crate) mod account;
pub(crate) mod client_memory;
pub(crate) mod failed_keys;
pub(crate) mod keys_file;
pub(crate) mod permit;
pub(crate) mod rate_limit;
mod recent;
pub(crate) mod shared_tenants;
pub(crate) mod tenants;
