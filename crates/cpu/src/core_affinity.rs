//! The cores that threads run on.

/// The cores that this program may run on, by their numbers; none where nobody tells.
#[cfg(target_os = "linux")]
pub(crate) fn allowed_cores() -> Vec<usize> {
    // SAFETY: an array of zeros is an empty set; the call fills in as many bytes as it is told of.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        match libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) {
            0 => set,
            _ => return Vec::new(),
        }
    };
    // SAFETY: a set holds so many.
    (0..libc::CPU_SETSIZE as usize).filter(|&core| unsafe { libc::CPU_ISSET(core, &set) }).collect()
}

/// Keeps the calling thread on one core. Without effect where the system refuses.
#[cfg(target_os = "linux")]
pub(crate) fn stay_on(core: usize) {
    // SAFETY: the set is made of zeros and one core that the system named; the call only reads it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set);
    }
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn allowed_cores() -> Vec<usize> {
    Vec::new()
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn stay_on(_core: usize) {}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    #[test]
    fn a_thread_stays_where_it_is_put() {
        let cores = allowed_cores();
        assert!(!cores.is_empty());
        let last = cores[cores.len() - 1];
        let seen = std::thread::spawn(move || {
            stay_on(last);
            allowed_cores()
        });
        assert_eq!(seen.join().expect("no panic"), [last]);
        assert_eq!(allowed_cores(), cores, "other threads are not touched");
    }
}
