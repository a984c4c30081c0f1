//! Pinning threads to cores.

/// Returns the numbers of the cores that this program may run on; empty where the system does not tell.
#[cfg(all(target_os = "linux", not(miri)))]
pub(crate) fn allowed_cores() -> Vec<usize> {
    // SAFETY: zeros are an empty set; the call writes at most the given number of bytes.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) {
            0 => set,
            _ => return Vec::new(),
        }
    };
    // SAFETY: a set holds `CPU_SETSIZE` cores.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// Pins the calling thread to a core. Has no effect where the system refuses.
#[cfg(all(target_os = "linux", not(miri)))]
pub(crate) fn pin_to(core: usize) {
    // SAFETY: zeros are an empty set, and the core is one that the system named; the call only reads the set.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
pub(crate) fn allowed_cores() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(all(target_os = "linux", not(miri))))]
pub(crate) fn pin_to(_core: usize) {}

#[cfg(test)]
#[cfg(all(target_os = "linux", not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_on_the_core_that_it_is_pinned_to() {
        let cores = allowed_cores();
        assert!(!cores.is_empty());
        let last = cores[cores.len() - 1];
        let seen = std::thread::spawn(move || {
            pin_to(last);
            allowed_cores()
        });
        assert_eq!(seen.join().expect("no panic"), [last]);
        assert_eq!(allowed_cores(), cores, "other threads are not pinned");
    }
}
