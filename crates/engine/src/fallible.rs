//! Allocations whose size grows with a request. They fail with an error that ends the request; an ordinary allocation
//! that fails ends the process, and every other request with it.

use crate::Error;

/// Returns the error of a request for which an allocation failed.
pub fn out_of_memory() -> Error {
    Error::OutOfMemory("there is not enough memory for this request now; try again later".into())
}

/// Returns an empty list with room for `capacity` values.
pub fn with_capacity<T>(capacity: usize) -> Result<Vec<T>, Error> {
    let mut values = Vec::new();
    reserve(&mut values, capacity)?;
    Ok(values)
}

/// Makes room for `more` values.
pub fn reserve<T>(values: &mut Vec<T>, more: usize) -> Result<(), Error> {
    values.try_reserve(more).map_err(|_| out_of_memory())
}

/// Adds a value.
pub fn push<T>(values: &mut Vec<T>, value: T) -> Result<(), Error> {
    reserve(values, 1)?;
    values.push(value);
    Ok(())
}

/// Adds the values of another list, or takes that list if there are none yet.
pub fn extend<T>(values: &mut Vec<T>, mut more: Vec<T>) -> Result<(), Error> {
    if values.is_empty() {
        *values = more;
        return Ok(());
    }
    reserve(values, more.len())?;
    values.append(&mut more);
    Ok(())
}

/// Adds a value to a queue.
pub fn push_back<T>(values: &mut std::collections::VecDeque<T>, value: T) -> Result<(), Error> {
    values.try_reserve(1).map_err(|_| out_of_memory())?;
    values.push_back(value);
    Ok(())
}

/// Returns a copy of a list.
pub fn copy_of<T: Clone>(values: &[T]) -> Result<Vec<T>, Error> {
    let mut copy = with_capacity(values.len())?;
    copy.extend_from_slice(values);
    Ok(copy)
}

/// Returns a copy of a text.
pub fn string_of(text: &str) -> Result<String, Error> {
    let mut copy = String::new();
    append(&mut copy, text)?;
    Ok(copy)
}

/// Adds a text to another.
pub fn append(text: &mut String, more: &str) -> Result<(), Error> {
    text.try_reserve(more.len()).map_err(|_| out_of_memory())?;
    text.push_str(more);
    Ok(())
}
