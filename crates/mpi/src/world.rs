//! [`World`]: all processes of a job that `mpiexec` started.
//!
//! Every operation is begun without blocking and then polled, so that a rank that is lost or hangs is noticed after the
//! time limit, on the thread that waits for it. While a rank may be idle, the polls are far apart, and cost no core.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pellucid_tensor::{Communicator, Error as DeviceError, Patience};

use crate::Error;
use crate::abi::{
    BYTE, COMM_WORLD, ERRORS_RETURN, Handle, Library, MAX_ERROR_STRING, MAX_LIBRARY_VERSION_STRING, REQUEST_NULL,
    SUCCESS, THREAD_SERIALIZED,
};

/// Time of polling without a pause. An exchange between ranks of a step takes less, unless one of them is slower.
const BUSY: Duration = Duration::from_micros(500);
/// Time of polling with pauses of a time slice before the pauses become longer.
const YIELDING: Duration = Duration::from_millis(20);
/// Longest pause between two polls: the time by which a message to an idle rank is late.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Names of the library, by platform.
const NAMES: [&str; 3] = ["libmpi_abi.so.1", "libmpi_abi.so", "libmpi_abi.dylib"];

/// Set when MPI is initialised, which is possible once in a process.
static IS_OPEN: AtomicBool = AtomicBool::new(false);

/// Options of a [`World`].
#[allow(missing_debug_implementations)] // It holds a function.
pub struct MpiOptions {
    /// Path of the library; `None` for the one that the system finds.
    pub library: Option<String>,
    /// Time in which every rank must take part in an operation of a step.
    pub time_limit: Duration,
    /// Reports why the job ends, before all of its processes are ended.
    pub report: Box<dyn Fn(&str) + Send>,
}

/// The connection of this process with all others of the job.
pub struct World {
    library: Library,
    version: String,
    rank: usize,
    num_ranks: usize,
    options: MpiOptions,
    counts: Vec<c_int>,
    displacements: Vec<c_int>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} ({})", self.rank, self.num_ranks, self.version)
    }
}

impl World {
    /// Opens the library and joins the job. Possible once in a process.
    pub fn open(options: MpiOptions) -> Result<World, Error> {
        let names = match &options.library {
            Some(path) => vec![path.clone()],
            None => NAMES.map(String::from).to_vec(),
        };
        let library = Library::open(&names)?;
        if IS_OPEN.swap(true, Ordering::SeqCst) {
            return Err(Error::OpenedTwice);
        }
        let mut is_initialized = 0;
        // SAFETY: the place is valid, and the function may be called at any time.
        unsafe { (library.initialized)(&mut is_initialized) };
        if is_initialized != 0 {
            return Err(Error::OpenedTwice);
        }
        let (none, mut provided) = (ptr::null_mut(), 0);
        // SAFETY: the standard allows null in place of the arguments of `main`; `provided` is valid.
        let code = unsafe { (library.init_thread)(none, ptr::null_mut(), THREAD_SERIALIZED, &mut provided) };
        check(&library, "MPI_Init_thread", code)?;
        if provided < THREAD_SERIALIZED {
            let reason = format!("the library is not built for threads (level {provided})");
            return Err(Error::Failed { function: "MPI_Init_thread", reason });
        }
        // SAFETY: MPI is initialised, and both handles are predefined.
        let code = unsafe { (library.comm_set_errhandler)(COMM_WORLD, ERRORS_RETURN) };
        check(&library, "MPI_Comm_set_errhandler", code)?;
        let number = |function: &'static str, get: unsafe extern "C" fn(Handle, *mut c_int) -> c_int| {
            let mut number = 0;
            // SAFETY: MPI is initialised, the handle is predefined, and the place is valid.
            check(&library, function, unsafe { get(COMM_WORLD, &mut number) })?;
            Ok(number as usize)
        };
        let rank = number("MPI_Comm_rank", library.comm_rank)?;
        let num_ranks = number("MPI_Comm_size", library.comm_size)?;
        let version = Library::text(MAX_LIBRARY_VERSION_STRING, |text, len| {
            // SAFETY: the buffer is as long as the standard asks for.
            unsafe { (library.get_library_version)(text, len) };
        });
        // The first line names the library; some go on with their settings.
        let first = version.split(['\n', ',']).next().unwrap_or_default();
        let version = first.split_whitespace().collect::<Vec<_>>().join(" ");
        let (counts, displacements) = (Vec::new(), Vec::new());
        Ok(World { library, version, rank, num_ranks, options, counts, displacements })
    }

    /// Returns the name and version of the library.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Begins an operation with `begin` and waits for its end. A failure ends the job: this process does not go on.
    ///
    /// # Safety
    /// The memory that `begin` hands to the library is valid until this returns.
    unsafe fn complete(
        &mut self,
        operation: &'static str,
        patience: Patience,
        begin: impl FnOnce(&Library, &mut Handle) -> c_int,
    ) -> Result<(), DeviceError> {
        let mut request = REQUEST_NULL;
        let code = begin(&self.library, &mut request);
        let mut failure = error_text(&self.library, code);
        let (started, mut is_done) = (Instant::now(), 0);
        while failure.is_none() {
            // SAFETY: the request was begun and has not ended; the standard allows a null status.
            let code = unsafe { (self.library.test)(&mut request, &mut is_done, ptr::null_mut()) };
            failure = error_text(&self.library, code);
            if is_done != 0 {
                break;
            }
            let elapsed = started.elapsed();
            if patience == Patience::Step && elapsed > self.options.time_limit {
                let limit = self.options.time_limit.as_secs_f32();
                failure = Some(format!("another rank did not answer within {limit} s: it hangs or is lost"));
            } else if elapsed > YIELDING {
                thread::sleep(LONGEST_PAUSE.min(elapsed / 100));
            } else if elapsed > BUSY {
                thread::yield_now();
            }
        }
        match failure {
            None => Ok(()),
            Some(reason) => {
                // The library may still write to the memory of the request, so this does not return.
                self.end(&format!("{operation} failed: {reason}"))
            }
        }
    }

    /// Reports the reason and ends all processes of the job.
    fn end(&mut self, reason: &str) -> ! {
        (self.options.report)(&format!("rank {}: {reason}", self.rank));
        // SAFETY: MPI is initialised, and the handle is predefined. A library ends this process as well.
        unsafe { (self.library.abort)(COMM_WORLD, 1) };
        std::process::exit(1)
    }
}

fn error_text(library: &Library, code: c_int) -> Option<String> {
    (code != SUCCESS).then(|| {
        Library::text(MAX_ERROR_STRING, |text, len| {
            // SAFETY: the buffer is as long as the standard asks for.
            unsafe { (library.error_string)(code, text, len) };
        })
    })
}

fn check(library: &Library, function: &'static str, code: c_int) -> Result<(), Error> {
    match error_text(library, code) {
        None => Ok(()),
        Some(reason) => Err(Error::Failed { function, reason }),
    }
}

/// Returns a number of bytes as C counts them.
fn count(len: usize) -> c_int {
    c_int::try_from(len).expect("an exchange of less than 2 GiB")
}

impl Communicator for World {
    fn rank(&self) -> usize {
        self.rank
    }

    fn num_ranks(&self) -> usize {
        self.num_ranks
    }

    fn all_gather(&mut self, part: &[u8], lens: &[usize], all: &mut [u8]) -> Result<(), DeviceError> {
        assert_eq!((lens.len(), lens[self.rank]), (self.num_ranks, part.len()), "the length of this rank's part");
        assert_eq!(lens.iter().sum::<usize>(), all.len(), "the length of all parts");
        let (mut counts, mut displacements) =
            (std::mem::take(&mut self.counts), std::mem::take(&mut self.displacements));
        counts.clear();
        displacements.clear();
        let mut start = 0;
        for &len in lens {
            counts.push(count(len));
            displacements.push(count(start));
            start += len;
        }
        // SAFETY: the parts fit into `all` by the assertions; `complete` returns when the library is done with them.
        let outcome = unsafe {
            self.complete("all-gather", Patience::Step, |library, request| {
                let (part, len, all) = (part.as_ptr().cast::<c_void>(), count(part.len()), all.as_mut_ptr().cast());
                let (counts, starts) = (counts.as_ptr(), displacements.as_ptr());
                (library.iallgatherv)(part, len, BYTE, all, counts, starts, BYTE, COMM_WORLD, request)
            })
        };
        (self.counts, self.displacements) = (counts, displacements);
        outcome
    }

    fn broadcast(&mut self, bytes: &mut [u8], patience: Patience) -> Result<(), DeviceError> {
        // SAFETY: the bytes are borrowed until `complete` returns.
        unsafe {
            self.complete("broadcast", patience, |library, request| {
                (library.ibcast)(bytes.as_mut_ptr().cast(), count(bytes.len()), BYTE, 0, COMM_WORLD, request)
            })
        }
    }

    fn barrier(&mut self, patience: Patience) -> Result<(), DeviceError> {
        // SAFETY: a barrier has no memory.
        unsafe { self.complete("barrier", patience, |library, request| (library.ibarrier)(COMM_WORLD, request)) }
    }

    /// Reports the reason and ends all processes of the job, this one included.
    fn abort(&mut self, reason: &str) {
        self.end(reason)
    }
}

impl Drop for World {
    /// Leaves the job, when all ranks do.
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.end("it ended with an internal error");
        }
        // SAFETY: MPI is initialised, and no operation is running.
        unsafe { (self.library.finalize)() };
    }
}
