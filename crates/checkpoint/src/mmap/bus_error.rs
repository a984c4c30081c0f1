//! Names the file when a mapped file is truncated or its disk fails.
//!
//! Reading a page that the file no longer has ends the process with the signal SIGBUS, which says nothing. [`report`]
//! installs a handler that writes one line with the path to standard error; then the process ends as it would have, so
//! the exit status stays that of a bus error. Bus errors at other addresses take their former course. Programs decide
//! whether they want the handler; the library only keeps the table of mapped files that it reads.
//!
//! A signal handler may use few functions: no memory is allocated, no lock is taken, and the messages are built when
//! the files are mapped.

use std::mem::MaybeUninit;
use std::path::Path;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Maximum files in the table. Further files are mapped without an entry, and their bus errors have no message.
const MAX_FILES: usize = 1024;

/// An entry of the table: the addresses of a mapped file and its message. `start` of a free entry is 0.
struct Entry {
    start: AtomicUsize,
    end: AtomicUsize,
    message: AtomicPtr<u8>,
    message_len: AtomicUsize,
}

static TABLE: [Entry; MAX_FILES] = [const {
    Entry {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        message: AtomicPtr::new(ptr::null_mut()),
        message_len: AtomicUsize::new(0),
    }
}; MAX_FILES];

/// A mapped file's entry in the table, which is freed with the map.
#[derive(Debug)]
pub(super) struct Registered {
    entry: Option<usize>,
    _message: Box<[u8]>,
}

/// Marks an entry whose other fields are being written.
const RESERVED: usize = usize::MAX;

impl Registered {
    /// Adds the addresses of a mapped file.
    pub(super) fn new(path: &Path, map: &[u8]) -> Registered {
        let message = format!(
            "error: {}: the mapped file was truncated, or cannot be read any more; the program ends with a bus error. \
             --no-mmap reads a model into memory instead\n",
            path.display()
        );
        let message = message.into_bytes().into_boxed_slice();
        let free =
            |entry: &Entry| entry.start.compare_exchange(0, RESERVED, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        let entry = TABLE.iter().position(free);
        if let Some(entry) = entry.map(|index| &TABLE[index]) {
            entry.message.store(message.as_ptr().cast_mut(), Ordering::Relaxed);
            entry.message_len.store(message.len(), Ordering::Relaxed);
            entry.end.store(map.as_ptr() as usize + map.len(), Ordering::Relaxed);
            entry.start.store(map.as_ptr() as usize, Ordering::Release);
        }
        Registered { entry, _message: message }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Some(entry) = self.entry.map(|index| &TABLE[index]) {
            entry.end.store(0, Ordering::Relaxed);
            entry.start.store(0, Ordering::Release);
        }
    }
}

/// The action that the handler replaced. Written once, before the handler is installed.
struct Former(std::cell::UnsafeCell<MaybeUninit<libc::sigaction>>);

// SAFETY: the cell is written once, within `INSTALL`, before the handler that reads it can run.
unsafe impl Sync for Former {}

static FORMER: Former = Former(std::cell::UnsafeCell::new(MaybeUninit::zeroed()));
static INSTALL: Once = Once::new();

/// Installs the handler for the process.
pub(crate) fn report() {
    INSTALL.call_once(|| {
        // SAFETY: `sigaction` is called with valid pointers. The former action is read first, so it is in place before
        // the handler can run. The handler only does what a handler may do.
        unsafe {
            if libc::sigaction(libc::SIGBUS, ptr::null(), (*FORMER.0.get()).as_mut_ptr()) != 0 {
                return;
            }
            let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            action.sa_sigaction = on_bus_error as *const () as libc::sighandler_t;
            // On the thread's own stack: the small one for handlers does not hold the registers of AMX (11 KB).
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigemptyset(&mut action.sa_mask);
            libc::sigaction(libc::SIGBUS, &action, ptr::null_mut());
        }
    });
}

extern "C" fn on_bus_error(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the system passes a valid `info`. `sigaction`, `raise` and `write` may be called in a handler.
    unsafe {
        // A signal that a process sent has no address.
        let was_sent = (*info).si_code <= 0;
        let address = (*info).si_addr() as usize;
        let entry = TABLE.iter().find(|entry| !was_sent && contains(entry, address));
        if let Some(entry) = entry {
            // The map cannot be dropped meanwhile, since this thread is reading it; so the message is alive.
            let message = entry.message.load(Ordering::Relaxed);
            let _ = libc::write(libc::STDERR_FILENO, message.cast(), entry.message_len.load(Ordering::Relaxed));
        } else if !was_sent {
            // The instruction runs again when the handler returns, and fails again under the former action.
            libc::sigaction(signal, (*FORMER.0.get()).as_ptr(), ptr::null_mut());
            return;
        }
        // The default action ends the process when the handler returns.
        let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
        action.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &action, ptr::null_mut());
        libc::raise(signal);
    }
}

fn contains(entry: &Entry, address: usize) -> bool {
    let start = entry.start.load(Ordering::Acquire);
    start != 0 && start != RESERVED && (start..entry.end.load(Ordering::Relaxed)).contains(&address)
}
