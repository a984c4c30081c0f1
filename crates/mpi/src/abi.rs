//! The functions of MPI that ranks need, with the types and constants of the standard ABI (MPI 5.0, chapter 20).
//!
//! Handles are pointers whose predefined values are small numbers; counts are C integers. [`Library::open`] checks the
//! version of the ABI before any other function is called.

use std::error::Error as _;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use libloading::Library as SharedObject;

use crate::Error;

/// Version of the ABI that these types and constants are of.
const ABI_VERSION: c_int = 1;

pub(crate) const SUCCESS: c_int = 0;
/// Calls come from one thread at a time.
pub(crate) const THREAD_SERIALIZED: c_int = 2048;
/// Room for the text of an error.
pub(crate) const MAX_ERROR_STRING: usize = 512;
/// Room for the text of a library's version.
pub(crate) const MAX_LIBRARY_VERSION_STRING: usize = 8192;

/// An opaque handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Handle(*mut c_void);

// SAFETY: a handle is a number of the library, which may be used from any thread, one at a time.
unsafe impl Send for Handle {}

impl Handle {
    const fn predefined(value: usize) -> Handle {
        Handle(ptr::without_provenance_mut(value))
    }
}

pub(crate) const COMM_WORLD: Handle = Handle::predefined(0x101);
pub(crate) const ERRORS_RETURN: Handle = Handle::predefined(0x143);
pub(crate) const REQUEST_NULL: Handle = Handle::predefined(0x180);
pub(crate) const BYTE: Handle = Handle::predefined(0x247);

type GetText = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;
type GetFlag = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetOfComm = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;

/// The functions of an open library, which stays open until the process ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Library {
    pub(crate) get_library_version: GetText,
    pub(crate) initialized: GetFlag,
    pub(crate) init_thread: unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int,
    pub(crate) finalize: unsafe extern "C" fn() -> c_int,
    pub(crate) abort: unsafe extern "C" fn(Handle, c_int) -> c_int,
    pub(crate) comm_rank: GetOfComm,
    pub(crate) comm_size: GetOfComm,
    pub(crate) comm_set_errhandler: unsafe extern "C" fn(Handle, Handle) -> c_int,
    pub(crate) error_string: unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int,
    pub(crate) iallgatherv: unsafe extern "C" fn(
        *const c_void,
        c_int,
        Handle,
        *mut c_void,
        *const c_int,
        *const c_int,
        Handle,
        Handle,
        *mut Handle,
    ) -> c_int,
    pub(crate) ibcast: unsafe extern "C" fn(*mut c_void, c_int, Handle, c_int, Handle, *mut Handle) -> c_int,
    pub(crate) ibarrier: unsafe extern "C" fn(Handle, *mut Handle) -> c_int,
    pub(crate) test: unsafe extern "C" fn(*mut Handle, *mut c_int, *mut c_void) -> c_int,
}

impl Library {
    /// Opens the first of these libraries that exists.
    pub(crate) fn open(names: &[String]) -> Result<Library, Error> {
        let mut tried = Vec::new();
        for name in names {
            // SAFETY: opening a library runs its initialisers; those of MPI libraries have no preconditions.
            match unsafe { SharedObject::new(name) } {
                Ok(shared) => return Library::of(Box::leak(Box::new(shared)), name),
                // The source has the system's own words, with the name.
                Err(error) => tried.push(error.source().map_or_else(|| error.to_string(), ToString::to_string)),
            }
        }
        Err(Error::NoLibrary { tried })
    }

    fn of(shared: &'static SharedObject, name: &str) -> Result<Library, Error> {
        /// Finds a function under its C name.
        macro_rules! function {
            ($name:literal) => {{
                let missing = |_| Error::NoFunction { library: name.to_owned(), function: $name };
                // SAFETY: the type is that of the function in the standard, whose ABI the library has by its name.
                *unsafe { shared.get($name) }.map_err(missing)?
            }};
        }
        let abi_version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int = function!("MPI_Abi_get_version");
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both places are valid, and the function may be called before MPI is initialised.
        unsafe { abi_version(&mut major, &mut minor) };
        if major != ABI_VERSION {
            return Err(Error::WrongAbi { library: name.to_owned(), expected: ABI_VERSION, found: major });
        }
        Ok(Library {
            get_library_version: function!("MPI_Get_library_version"),
            initialized: function!("MPI_Initialized"),
            init_thread: function!("MPI_Init_thread"),
            finalize: function!("MPI_Finalize"),
            abort: function!("MPI_Abort"),
            comm_rank: function!("MPI_Comm_rank"),
            comm_size: function!("MPI_Comm_size"),
            comm_set_errhandler: function!("MPI_Comm_set_errhandler"),
            error_string: function!("MPI_Error_string"),
            iallgatherv: function!("MPI_Iallgatherv"),
            ibcast: function!("MPI_Ibcast"),
            ibarrier: function!("MPI_Ibarrier"),
            test: function!("MPI_Test"),
        })
    }

    /// Returns the text that a function writes into a buffer of `capacity` bytes.
    pub(crate) fn text(capacity: usize, write: impl FnOnce(*mut c_char, *mut c_int)) -> String {
        let (mut buffer, mut len) = (vec![0u8; capacity + 1], 0);
        write(buffer.as_mut_ptr().cast(), &mut len);
        buffer.truncate(usize::try_from(len).unwrap_or(0).min(capacity));
        String::from_utf8_lossy(&buffer).trim_end_matches(['\0', '\n']).to_owned()
    }
}
