//! Texts and lists whose size grows with a request. If there is no memory for one, the request fails and the server
//! goes on.

use super::error::ApiError;
use crate::limits::client_memory::out_of_memory;

/// Returns an empty list with room for `capacity` values.
pub(crate) fn with_capacity<T>(capacity: usize) -> Result<Vec<T>, ApiError> {
    let mut values = Vec::new();
    values.try_reserve_exact(capacity).map_err(|_| out_of_memory())?;
    Ok(values)
}

/// Adds texts to another text.
pub(crate) fn append(text: &mut String, parts: &[&str]) -> Result<(), ApiError> {
    text.try_reserve(parts.iter().map(|part| part.len()).sum()).map_err(|_| out_of_memory())?;
    parts.iter().for_each(|part| text.push_str(part));
    Ok(())
}
