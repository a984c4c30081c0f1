//! Host memory behind a tensor: bytes of a mapped file, or owned bytes that begin on a cache line.

use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use pellucid_tensor::{DType, Error, HostFloats, Memory, SharedBytes, Tensor};

/// Owned bytes that begin on a cache line, so that no aligned vector load crosses one.
///
/// The operating system provides zeroed pages when they are first touched: KV memory for a long context costs nothing
/// until it is used.
pub(crate) struct AlignedBytes {
    start: NonNull<u8>,
    layout: Layout,
    /// Whether the pages were mapped from the operating system; otherwise they are from the allocator, which may have
    /// to write the zeros.
    mapped: bool,
}

const CACHE_LINE: usize = 64;
/// From this number of bytes on, memory is mapped in whole pages.
const WHOLE_PAGES: usize = 256 * 1024;

// SAFETY: the bytes are owned by this value alone, like those of a `Vec<u8>`.
unsafe impl Send for AlignedBytes {}
// SAFETY: a shared reference gives shared access to plain bytes only.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    fn zeroed(len: usize) -> Option<Self> {
        // At least one cache line, because a layout of size zero must not be allocated.
        let size = len.max(1).checked_next_multiple_of(CACHE_LINE)?;
        let layout = Layout::from_size_align(size, CACHE_LINE).ok()?;
        #[cfg(all(target_os = "linux", not(miri)))]
        if size >= WHOLE_PAGES {
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a new anonymous mapping does not overlap existing memory.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, flags, -1, 0) };
            if start == libc::MAP_FAILED {
                return None;
            }
            return Some(AlignedBytes { start: NonNull::new(start.cast())?, layout, mapped: true });
        }
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(AlignedBytes { start, layout, mapped: false })
    }

    /// Asks the system for pages of 2 MiB: weights are read sequentially, and with small pages the translation of
    /// addresses takes a third of the time. Has no effect where the system offers none.
    fn prefer_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if self.mapped {
            // SAFETY: the pages belong to this value, and the advice does not change their contents.
            unsafe { libc::madvise(self.start.as_ptr().cast(), self.layout.size(), libc::MADV_HUGEPAGE) };
        }
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: the allocation is `size` initialised bytes and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the allocation is `size` initialised bytes, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if self.mapped {
            // SAFETY: mapped in `zeroed` with this size, and unmapped once.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.layout.size()) };
            return;
        }
        // SAFETY: allocated in `zeroed` with this layout, and freed once.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

pub(crate) enum HostMemory {
    /// Bytes of a mapped file, which stay in the page cache.
    Mapped(SharedBytes),
    Owned(AlignedBytes),
}

impl HostMemory {
    pub(crate) fn zeroed(bytes: usize) -> Result<Self, Error> {
        AlignedBytes::zeroed(bytes)
            .map(HostMemory::Owned)
            .ok_or_else(|| Error::OutOfMemory { device: "the CPU".into(), bytes })
    }

    pub(crate) fn copied(source: &[u8]) -> Result<Self, Error> {
        let mut memory = HostMemory::zeroed(source.len())?;
        memory.bytes_mut()[..source.len()].copy_from_slice(source);
        Ok(memory)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            HostMemory::Mapped(bytes) => bytes,
            HostMemory::Owned(bytes) => bytes.as_slice(),
        }
    }

    pub(crate) fn prefer_huge_pages(&self) {
        if let HostMemory::Owned(bytes) = self {
            bytes.prefer_huge_pages();
        }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            HostMemory::Mapped(_) => panic!("a mapped weight is read-only"),
            HostMemory::Owned(bytes) => bytes.as_mut_slice(),
        }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if matches!(self, HostMemory::Mapped(_)) { "mapped" } else { "owned" };
        write!(f, "{kind} host memory of {} bytes", self.bytes().len())
    }
}

impl Memory for HostMemory {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl HostFloats for HostMemory {
    fn get(&self) -> &[f32] {
        // SAFETY: every pattern of four bytes is a valid f32.
        unsafe { self.bytes().align_to().1 }
    }

    fn get_mut(&mut self) -> &mut [f32] {
        // SAFETY: every pattern of four bytes is a valid f32, and the bytes are borrowed uniquely.
        unsafe { self.bytes_mut().align_to_mut().1 }
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Moves a tensor's values to `out` by swapping the two memories. Returns false if `out` is not memory of this backend.
pub(crate) fn exchange(tensor: &mut Tensor, out: &mut dyn HostFloats) -> bool {
    assert_eq!(tensor.dtype(), DType::F32, "an f32 tensor");
    assert!(tensor.len() <= out.get().len(), "the output is large enough for the tensor");
    let Some(out) = out.as_any_mut().downcast_mut::<HostMemory>() else { return false };
    std::mem::swap(host_mut(tensor), out);
    true
}

fn host(tensor: &Tensor) -> &HostMemory {
    tensor.memory().as_any().downcast_ref().expect("a tensor of the CPU backend")
}

fn host_mut(tensor: &mut Tensor) -> &mut HostMemory {
    tensor.memory_mut().as_any_mut().downcast_mut().expect("a tensor of the CPU backend")
}

/// The stored bytes of a tensor, whole rows in order.
pub(crate) fn bytes(tensor: &Tensor) -> &[u8] {
    let len = tensor.dtype().bytes_for(tensor.len()).expect("rows are whole blocks");
    &host(tensor).bytes()[..len]
}

pub(crate) fn bytes_mut(tensor: &mut Tensor) -> &mut [u8] {
    let len = tensor.dtype().bytes_for(tensor.len()).expect("rows are whole blocks");
    &mut host_mut(tensor).bytes_mut()[..len]
}

/// The values of an f32 tensor.
pub(crate) fn floats(tensor: &Tensor) -> &[f32] {
    assert_eq!(tensor.dtype(), DType::F32, "an f32 tensor");
    let bytes = bytes(tensor);
    // SAFETY: every pattern of four bytes is a valid f32.
    let (head, middle, tail) = unsafe { bytes.align_to::<f32>() };
    assert!(head.is_empty() && tail.is_empty(), "f32 memory is aligned when it is made");
    middle
}

pub(crate) fn floats_mut(tensor: &mut Tensor) -> &mut [f32] {
    assert_eq!(tensor.dtype(), DType::F32, "an f32 tensor");
    let len = tensor.len();
    let bytes = &mut host_mut(tensor).bytes_mut()[..len * 4];
    // SAFETY: every pattern of four bytes is a valid f32, and the bytes are borrowed uniquely.
    let (_, middle, _) = unsafe { bytes.align_to_mut::<f32>() };
    middle
}

/// Sets the number of rows of an activation, and replaces its memory if that is too small.
pub(crate) fn resize_rows(tensor: &mut Tensor, rows: usize) -> Result<(), Error> {
    let needed = tensor.dtype().bytes_for(rows * tensor.cols()).expect("rows are whole blocks");
    let memory = host_mut(tensor);
    if memory.bytes().len() < needed {
        *memory = HostMemory::zeroed(needed)?;
        memory.prefer_huge_pages();
    }
    tensor.set_rows(rows);
    Ok(())
}

/// A buffer that an operation keeps from step to step. It begins on a cache line; a large one lies on huge pages.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    memory: Option<HostMemory>,
    values: PhantomData<T>,
}

/// Types for which every pattern of bytes is a valid value.
///
/// # Safety
/// Every pattern of bytes is a valid value, and the alignment is at most a cache line.
pub(crate) unsafe trait AnyBits: Copy {}

macro_rules! any_bits {
    ($($number:ty)*) => {
        // SAFETY: integers and floats have no invalid patterns.
        $(unsafe impl AnyBits for $number {})*
    };
}
any_bits!(i8 i16 u16 i32 f32);

// SAFETY: an array has no invalid patterns when its elements have none.
unsafe impl<T: AnyBits, const N: usize> AnyBits for [T; N] {}

impl<T> Default for Buffer<T> {
    fn default() -> Self {
        Buffer { memory: None, values: PhantomData }
    }
}

impl<T: AnyBits> Buffer<T> {
    /// Returns a buffer of at least `len` values. If it has to grow, its contents are lost and the new memory is all
    /// zeros.
    ///
    /// # Panics
    /// When there is not enough memory, like `Vec`.
    pub(crate) fn grow(&mut self, len: usize) -> &mut [T] {
        let bytes = len.checked_mul(size_of::<T>()).expect("a buffer that fits the address space");
        if self.memory.as_ref().is_none_or(|memory| memory.bytes().len() < bytes) {
            let memory = HostMemory::zeroed(bytes).unwrap_or_else(|error| panic!("{error}"));
            memory.prefer_huge_pages();
            self.memory = Some(memory);
        }
        let bytes = self.memory.as_mut().map_or(&mut [][..], HostMemory::bytes_mut);
        // SAFETY: `AnyBits` guarantees that any bytes are valid values.
        let (_, values, _) = unsafe { bytes.align_to_mut() };
        values
    }
}

impl<T: AnyBits> std::ops::Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes = self.memory.as_ref().map_or(&[][..], HostMemory::bytes);
        // SAFETY: `AnyBits` guarantees that any bytes are valid values.
        let (_, values, _) = unsafe { bytes.align_to() };
        values
    }
}

/// Returns the distance in bytes between blocks of rows that take `bytes` each: an odd number of pages. Products read
/// the same few kilobytes of many blocks at a time; at a distance of a power of two, all of these would share a few
/// sets of the second-level cache.
pub(crate) const fn block_stride(bytes: usize) -> usize {
    const PAGE: usize = 4096;
    (bytes.div_ceil(PAGE) | 1) * PAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_grows_in_zeros_and_keeps_its_contents_otherwise() {
        let mut buffer = Buffer::<f32>::default();
        assert!(buffer.is_empty());
        buffer.grow(100)[99] = 1.0;
        assert_eq!(
            (buffer.grow(50)[99], buffer.as_ptr().align_offset(CACHE_LINE)),
            (1.0, 0),
            "it was large enough already"
        );
        let large = WHOLE_PAGES / size_of::<f32>() + 1;
        assert!(buffer.grow(large)[..large].iter().all(|&value| value == 0.0));
    }

    #[test]
    fn blocks_lie_an_odd_number_of_pages_apart() {
        for (bytes, pages) in [(1, 1), (4096, 1), (4097, 3), (128 << 10, 33), (100 << 10, 25)] {
            assert_eq!(block_stride(bytes), pages * 4096, "{bytes} bytes");
        }
    }
}
