//! Host memory behind a tensor: a mapped file's bytes as they are, or cache-line aligned bytes of our own.

use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use pellucid_tensor::{DType, Error, HostFloats, Memory, SharedBytes, Tensor};

/// Bytes that start on a cache line, so that no vector load crosses one.
///
/// The operating system hands out zero pages and fills them in when they are first touched: KV memory for a long context costs
/// nothing until it is used.
pub(crate) struct AlignedBytes {
    start: NonNull<u8>,
    layout: Layout,
    /// Whether the pages came from the operating system rather than the allocator, which would write the zeros.
    mapped: bool,
}

const CACHE_LINE: usize = 64;
/// From this size on, whole pages are asked for.
const WHOLE_PAGES: usize = 256 * 1024;

// SAFETY: the bytes are owned by this value alone, like those of a `Vec<u8>`.
unsafe impl Send for AlignedBytes {}
// SAFETY: a shared reference gives shared access to plain bytes only.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    fn zeroed(len: usize) -> Option<Self> {
        // At least one line, because a layout of size zero must not be allocated.
        let size = len.max(1).checked_next_multiple_of(CACHE_LINE)?;
        let layout = Layout::from_size_align(size, CACHE_LINE).ok()?;
        #[cfg(target_os = "linux")]
        if size >= WHOLE_PAGES {
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: a new map of fresh pages touches no memory that exists.
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

    /// Asks for pages of 2 MiB: weights are read from end to end, and with small pages the translation of addresses is a third of
    /// the work. Without effect where the system has none.
    fn prefer_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if self.mapped {
            // SAFETY: advice on pages that are ours; the contents stay.
            unsafe { libc::madvise(self.start.as_ptr().cast(), self.layout.size(), libc::MADV_HUGEPAGE) };
        }
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: the allocation is `size` initialised bytes and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access unique.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if self.mapped {
            // SAFETY: mapped in `zeroed` with this very size, and unmapped once.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.layout.size()) };
            return;
        }
        // SAFETY: allocated in `zeroed` with this very layout, and freed once.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

pub(crate) enum HostMemory {
    /// Weights that stay in the page cache.
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
        // SAFETY: every pattern of four bytes is a valid f32; memory of one's own begins on a cache line.
        unsafe { self.bytes().align_to().1 }
    }

    fn get_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and the bytes are borrowed uniquely.
        unsafe { self.bytes_mut().align_to_mut().1 }
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

/// Brings a tensor's numbers to where the host reads them: the two memories change places. False where `out` is not ours.
pub(crate) fn exchange(tensor: &mut Tensor, out: &mut dyn HostFloats) -> bool {
    assert_eq!(tensor.dtype(), DType::F32, "an f32 tensor");
    assert!(tensor.len() <= out.get().len(), "room for the numbers");
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

/// The numbers of an f32 tensor.
pub(crate) fn floats(tensor: &Tensor) -> &[f32] {
    assert_eq!(tensor.dtype(), DType::F32, "an f32 tensor");
    let bytes = bytes(tensor);
    // SAFETY: every pattern of four bytes is a valid f32; `align_to` gives the aligned middle.
    let (head, middle, tail) = unsafe { bytes.align_to::<f32>() };
    assert!(head.is_empty() && tail.is_empty(), "f32 memory is aligned when it is made");
    middle
}

pub(crate) fn floats_mut(tensor: &mut Tensor) -> &mut [f32] {
    assert_eq!(tensor.dtype(), DType::F32, "an f32 tensor");
    let len = tensor.len();
    let bytes = &mut host_mut(tensor).bytes_mut()[..len * 4];
    // SAFETY: as in `floats`, and the bytes are borrowed uniquely.
    let (_, middle, _) = unsafe { bytes.align_to_mut::<f32>() };
    middle
}

/// Grows the memory of an activation when it is too small for `rows`.
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

/// Numbers that an operation keeps from step to step: they begin on a cache line, and many of them lie on large pages.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    memory: Option<HostMemory>,
    numbers: PhantomData<T>,
}

/// Types of which zeros, and any other bytes, are valid values.
///
/// # Safety
/// Every pattern of bytes is a value, and the type is no stricter than a cache line in its alignment.
pub(crate) unsafe trait AnyBits: Copy {}

macro_rules! plain {
    ($($number:ty)*) => {
        // SAFETY: numbers have no invalid patterns.
        $(unsafe impl AnyBits for $number {})*
    };
}
plain!(i8 i16 u16 i32 f32);

// SAFETY: an array has no invalid patterns when its elements have none.
unsafe impl<T: AnyBits, const N: usize> AnyBits for [T; N] {}

impl<T> Default for Buffer<T> {
    fn default() -> Self {
        Buffer { memory: None, numbers: PhantomData }
    }
}

impl<T: AnyBits> Buffer<T> {
    /// Makes room for at least `len` numbers. What the buffer held is lost when it grows: the new room is all zeros.
    ///
    /// # Panics
    /// When there is no memory, as a `Vec` would.
    pub(crate) fn grow(&mut self, len: usize) -> &mut [T] {
        let bytes = len.checked_mul(size_of::<T>()).expect("a buffer that fits the address space");
        if self.memory.as_ref().is_none_or(|memory| memory.bytes().len() < bytes) {
            let memory = HostMemory::zeroed(bytes).unwrap_or_else(|error| panic!("{error}"));
            memory.prefer_huge_pages();
            self.memory = Some(memory);
        }
        let bytes = self.memory.as_mut().map_or(&mut [][..], HostMemory::bytes_mut);
        // SAFETY: any bytes are valid numbers by the promise of `AnyBits`; the memory begins on a cache line.
        let (_, numbers, _) = unsafe { bytes.align_to_mut() };
        numbers
    }
}

impl<T: AnyBits> std::ops::Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let bytes = self.memory.as_ref().map_or(&[][..], HostMemory::bytes);
        // SAFETY: as in `grow`.
        let (_, numbers, _) = unsafe { bytes.align_to() };
        numbers
    }
}

/// Bytes from one block of rows to the next, for `bytes` in a block: an odd number of pages. Products read the same few kilobytes of many
/// blocks at a time; at distances that are powers of two, all of these would fall into the same few sets of the second-level cache.
pub(crate) const fn block_stride(bytes: usize) -> usize {
    const PAGE: usize = 4096;
    (bytes.div_ceil(PAGE) | 1) * PAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_grows_in_zeros_and_keeps_what_fits() {
        let mut buffer = Buffer::<f32>::default();
        assert!(buffer.is_empty());
        buffer.grow(100)[99] = 1.0;
        assert_eq!((buffer.grow(50)[99], buffer.as_ptr().align_offset(CACHE_LINE)), (1.0, 0), "there was room already");
        let large = WHOLE_PAGES / size_of::<f32>() + 1;
        assert!(buffer.grow(large)[..large].iter().all(|&number| number == 0.0));
    }

    #[test]
    fn blocks_lie_an_odd_number_of_pages_apart() {
        for (bytes, pages) in [(1, 1), (4096, 1), (4097, 3), (128 << 10, 33), (100 << 10, 25)] {
            assert_eq!(block_stride(bytes), pages * 4096, "{bytes} bytes");
        }
    }
}
