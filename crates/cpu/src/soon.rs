//! What will be read soon: threads that wait for each other bring it into their second-level caches.
//!
//! Between two products of a step one thread works by itself (norms, quantizing, rotating) while the others wait, and each product
//! begins with memory that nobody has asked for. The products of a step are the same ones in the same order as those of the step before,
//! so it is known where threads will begin to read next.

/// Bytes that a thread fetches at most: a small part of a second-level cache of 1 or 2 MB.
const MAX_BYTES: usize = 192 * 1024;

/// A way through memory, in groups of stretches that are read side by side.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Way {
    /// Address of the group, and the distance to the next one.
    group: usize,
    step: isize,
    groups: usize,
    /// Stretches of a group, and the bytes of each.
    streams: usize,
    stretch: usize,
    /// Bytes of each stretch that have been asked for.
    done: usize,
}

/// The ways of the thread that begins at the first panel and of the one that begins at the last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Soon {
    pub(crate) up: Way,
    pub(crate) down: Way,
}

impl Way {
    /// From the first stretch of `bytes` up, `streams` of them at a time; at most half of them all.
    pub(crate) fn up(bytes: &[u8], stretch: usize, streams: usize) -> Self {
        let group_bytes = streams * stretch;
        let groups = MAX_BYTES.min(bytes.len() / 2) / group_bytes.max(1);
        Way { group: bytes.as_ptr().addr(), step: group_bytes as isize, groups, streams, stretch, done: 0 }
    }

    /// From the last one down.
    pub(crate) fn down(bytes: &[u8], stretch: usize, streams: usize) -> Self {
        let up = Way::up(bytes, stretch, streams);
        Way { group: (up.group + bytes.len()).saturating_sub(streams * stretch), step: -up.step, ..up }
    }

    /// The way of a thread that begins so many groups later.
    pub(crate) fn skip(self, groups: usize) -> Self {
        let group = self.group.wrapping_add_signed(self.step.wrapping_mul(groups as isize));
        Way { group, groups: self.groups.saturating_sub(groups), ..self }
    }

    /// Asks for the next lines, one of each stretch of a group; false when there are none.
    #[inline]
    pub(crate) fn fetch(&mut self) -> bool {
        if self.groups == 0 {
            return false;
        }
        for stream in 0..self.streams {
            prefetch(self.group + stream * self.stretch + self.done);
        }
        self.done += 64;
        if self.done >= self.stretch {
            (self.group, self.groups, self.done) = (self.group.wrapping_add_signed(self.step), self.groups - 1, 0);
        }
        true
    }
}

#[inline(always)]
fn prefetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may go anywhere, and every processor of this family has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(std::ptr::without_provenance(address));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// What was read after each thing the last time. A table with a place for each, found at once: where two things share one, the later has it.
#[derive(Debug)]
pub(crate) struct Order {
    /// The address of a thing, and what came after it.
    places: Box<[(usize, Soon); Order::PLACES]>,
    last: usize,
}

impl Default for Order {
    fn default() -> Self {
        Order { places: Box::new([(0, Soon::default()); Order::PLACES]), last: 0 }
    }
}

impl Order {
    const PLACES: usize = 1024;

    /// Notes what is read now; gives what was read after it the last time, or nothing.
    pub(crate) fn after(&mut self, now: Soon) -> Soon {
        let address = now.up.group;
        self.places[Self::place(self.last)] = (self.last, now);
        self.last = address;
        let (of, next) = self.places[Self::place(address)];
        if of == address { next } else { Soon::default() }
    }

    /// Things are many lines apart: their numbers in lines, spread out.
    fn place(address: usize) -> usize {
        ((address as u64 >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_after_comes_after() {
        let things: Vec<[u8; 256]> = vec![[0; 256]; 4];
        let soon = |i: usize| Soon { up: Way::up(&things[i], 64, 1), ..Soon::default() };
        let mut order = Order::default();
        for i in [0, 1, 2, 3] {
            order.after(soon(i));
        }
        assert_eq!([0, 1, 2, 3, 0].map(|i| order.after(soon(i))), [1, 2, 3, 0, 1].map(soon));
        assert_eq!([2, 3, 2].map(|i| order.after(soon(i))), [3, 0, 3].map(soon), "whatever came before");
    }

    #[test]
    fn a_way_takes_half_of_what_there_is_from_its_end() {
        let bytes = [0; 10 * 128];
        let count = |mut way: Way| (way.group - bytes.as_ptr().addr(), (0..).take_while(|_| way.fetch()).count());
        // Two groups of two stretches of two lines are less than half of ten stretches.
        assert_eq!(count(Way::up(&bytes, 128, 2)), (0, 4));
        assert_eq!(count(Way::down(&bytes, 128, 2).skip(1)), (6 * 128, 2));
        assert_eq!(count(Way::down(&bytes, 128, 2)), (8 * 128, 4));
        assert_eq!(count(Way { group: bytes.as_ptr().addr(), ..Way::default() }).1, 0);
        assert_eq!(Way::up(&[], 0, 0).groups, 0);
    }
}
