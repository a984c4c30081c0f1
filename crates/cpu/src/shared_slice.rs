//! [`SharedSlice`]: a mutable slice that several threads fill at the same time, each its own elements.

use std::marker::PhantomData;

/// A slice borrowed for `'a`, of which threads take disjoint parts.
///
/// The borrow checker keeps the slice alive and unused elsewhere for `'a`, and bounds are checked. What is left to the
/// callers of the `unsafe` functions is that parts in use at the same time do not overlap.
#[derive(Debug)]
pub(crate) struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    /// `len`, or zero where the slice was borrowed for reading only.
    writable_len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

impl<T> Clone for SharedSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedSlice<'_, T> {}

// SAFETY: elements are reached only through the unsafe functions below, whose callers guarantee that no two threads use
// an element at the same time while one of them writes it.
unsafe impl<T: Send + Sync> Send for SharedSlice<'_, T> {}
// SAFETY: see `Send`.
unsafe impl<T: Send + Sync> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        let (start, len) = (slice.as_mut_ptr(), slice.len());
        SharedSlice { start, len, writable_len: len, borrow: PhantomData }
    }

    /// A slice that is only read: [`SharedSlice::part`] panics.
    pub(crate) fn read_only(slice: &'a [T]) -> Self {
        SharedSlice { start: slice.as_ptr().cast_mut(), len: slice.len(), writable_len: 0, borrow: PhantomData }
    }

    /// The elements `offset .. offset + len`, for one thread to write.
    ///
    /// # Safety
    /// While the result is in use, no other part and nothing that was returned by [`SharedSlice::read`] overlaps it.
    ///
    /// # Panics
    /// When the elements are not within the slice, or it is read-only.
    #[inline(always)]
    pub(crate) unsafe fn part(&self, offset: usize, len: usize) -> &'a mut [T] {
        assert!(offset + len <= self.writable_len);
        // SAFETY: in bounds and writable by the assertion, borrowed for 'a, and not aliased as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(offset), len) }
    }

    /// The elements `offset .. offset + len`, for any number of threads to read.
    ///
    /// # Safety
    /// While the result is in use, no thread writes these elements.
    ///
    /// # Panics
    /// When the elements are not within the slice.
    #[inline(always)]
    pub(crate) unsafe fn read(&self, offset: usize, len: usize) -> &'a [T] {
        assert!(offset + len <= self.len);
        // SAFETY: in bounds by the assertion, borrowed for 'a, and not written as the caller guarantees.
        unsafe { std::slice::from_raw_parts(self.start.add(offset), len) }
    }

    /// Writes one element.
    ///
    /// # Safety
    /// No other thread uses this element at the same time.
    #[inline(always)]
    pub(crate) unsafe fn write(&self, index: usize, value: T) {
        // SAFETY: passed on from the caller.
        let part = unsafe { self.part(index, 1) };
        part[0] = value;
    }

    /// The address of an element, which may lie outside the slice: to prefetch it, or to look at its alignment.
    #[inline(always)]
    pub(crate) fn address(&self, offset: usize) -> *const T {
        self.start.wrapping_add(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_fill_disjoint_parts() {
        let mut values = [0u32; 8];
        let shared = SharedSlice::new(&mut values);
        std::thread::scope(|scope| {
            for i in 0..4 {
                // SAFETY: each thread takes its own two elements.
                scope.spawn(move || unsafe { shared.part(2 * i, 2) }.fill(i as u32));
            }
        });
        assert_eq!(values, [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    #[should_panic(expected = "writable_len")]
    fn a_read_only_slice_has_no_parts() {
        // SAFETY: nothing else uses the slice.
        unsafe { SharedSlice::read_only(&[1u8, 2]).part(0, 1) };
    }

    #[test]
    #[should_panic(expected = "writable_len")]
    fn a_part_ends_within_the_slice() {
        // SAFETY: nothing else uses the slice.
        unsafe { SharedSlice::new(&mut [1u8, 2]).part(1, 2) };
    }
}
