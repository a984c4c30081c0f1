//! The limits of tenants: keys, rate limits, and the account of each request.

pub(crate) mod account;
pub(crate) mod keys_file;
pub(crate) mod rate_limit;
pub(crate) mod tenants;
