//! Ctrl-C: what is said before the program leaves, or what is stopped in its stead.
//!
//! `main` installs the one handler; a command that would leave something behind says so for as long as that is true, and one that
//! can stop short of leaving asks to be told.

use std::io::Write;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The status that shells give a program stopped by Ctrl-C: 128 plus the signal's number.
pub(crate) const INTERRUPTED_STATUS: u8 = 130;

/// A handle on the process's one interrupt handler.
#[derive(Clone)]
pub(crate) struct Interrupt {
    farewell: Arc<Mutex<Option<Farewell>>>,
    wish: Arc<AtomicU8>,
    listener: Arc<Mutex<Option<Listener>>>,
}

/// Done before the program leaves; gives what is said.
type Farewell = Box<dyn FnOnce() -> String + Send>;

/// Called for each signal, in place of everything else.
type Listener = Box<dyn Fn() + Send>;

/// Nobody listens: Ctrl-C leaves the program.
const LEAVE: u8 = 0;
/// Somebody is at work who will stop when asked.
const LISTENING: u8 = 1;
/// It has been asked; the next Ctrl-C leaves after all.
const ASKED: u8 = 2;

impl std::fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interrupt")
    }
}

impl Interrupt {
    /// Takes over Ctrl-C (and the request to terminate). Without a handler the program still works: it then ends wordlessly.
    pub(crate) fn install() -> Interrupt {
        let interrupt =
            Interrupt { farewell: Arc::default(), wish: Arc::new(AtomicU8::new(LEAVE)), listener: Arc::default() };
        let (farewell, wish, listener) =
            (interrupt.farewell.clone(), interrupt.wish.clone(), interrupt.listener.clone());
        let _ = ctrlc::set_handler(move || {
            if let Some(listener) = &*listener.lock().unwrap_or_else(PoisonError::into_inner) {
                return listener();
            }
            if wish.compare_exchange(LISTENING, ASKED, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return;
            }
            let farewell = farewell.lock().unwrap_or_else(PoisonError::into_inner).take();
            let _ = match farewell {
                Some(farewell) => writeln!(std::io::stderr(), "\ninterrupted: {}", farewell()),
                None => writeln!(std::io::stderr()),
            };
            std::process::exit(INTERRUPTED_STATUS.into());
        });
        interrupt
    }

    /// When Ctrl-C comes while the returned value lives, calls `farewell` and says what it gives.
    pub(crate) fn leaving(&self, farewell: impl FnOnce() -> String + Send + 'static) -> Leaving {
        *self.farewell.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(farewell));
        Leaving { farewell: self.farewell.clone() }
    }

    /// From now on every Ctrl-C, and every request to terminate, calls `listener` and does nothing else.
    pub(crate) fn telling(&self, listener: impl Fn() + Send + 'static) {
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(listener));
    }

    /// While the returned value lives, the first Ctrl-C asks it to stop and does nothing else.
    pub(crate) fn stopping(&self) -> Stopping {
        self.wish.store(LISTENING, Ordering::Relaxed);
        Stopping { wish: self.wish.clone() }
    }
}

#[derive(Debug)]
#[must_use]
pub(crate) struct Stopping {
    wish: Arc<AtomicU8>,
}

impl Stopping {
    /// Whether Ctrl-C has come.
    pub(crate) fn asked(&self) -> bool {
        self.wish.load(Ordering::Relaxed) == ASKED
    }
}

impl Drop for Stopping {
    fn drop(&mut self) {
        self.wish.store(LEAVE, Ordering::Relaxed);
    }
}

#[must_use]
pub(crate) struct Leaving {
    farewell: Arc<Mutex<Option<Farewell>>>,
}

/// A command that stopped where it was asked to, with everything said: the status tells a script that the work is not whole.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

impl Drop for Leaving {
    fn drop(&mut self) {
        *self.farewell.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
