//! Signals: Ctrl-C cleans up and exits, or stops what is running; SIGHUP reloads files in a server.
//!
//! `main` installs the handlers. A command that must clean up before the program exits registers that with
//! [`Interrupt::on_exit`]; one that can stop without an exit uses [`Interrupt::stopping`] or [`Interrupt::on_signal`].

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use super::{log, output};

/// Exit status of a program that a signal stopped, as in shells: 128 plus the number of the signal.
const INTERRUPT_STATUS: u8 = 130;
#[cfg(unix)]
const TERMINATE_STATUS: u8 = 143;
#[cfg(unix)]
const HANG_UP_STATUS: u8 = 129;

/// Status of the last signal that stopped the program; 0 if there was none.
static STATUS: AtomicU8 = AtomicU8::new(0);

/// Returns the exit status of a program that was stopped: that of the last signal, or else that of Ctrl-C.
pub(crate) fn interrupted_status() -> u8 {
    match STATUS.load(Ordering::Relaxed) {
        0 => INTERRUPT_STATUS,
        status => status,
    }
}

/// A handle on the process's signal handlers.
#[derive(Clone)]
pub(crate) struct Interrupt {
    cleanups: Cleanups,
    state: Arc<AtomicU8>,
    listener: Arc<Mutex<Option<Listener>>>,
    /// Called for each SIGHUP; without it, SIGHUP is handled like Ctrl-C.
    reload: Arc<Mutex<Option<Listener>>>,
}

/// Called before the program exits; returns the message to print.
type Cleanup = Box<dyn FnOnce() -> String + Send>;

/// Work to be cleaned up, the innermost last.
type Cleanups = Arc<Mutex<Vec<Cleanup>>>;

/// Called for each signal; nothing else happens then.
type Listener = Box<dyn Fn() + Send>;

/// Nothing can be stopped: Ctrl-C exits the program.
const EXIT: u8 = 0;
/// Something is running that stops on request.
const RUNNING: u8 = 1;
/// The stop was requested; the next Ctrl-C exits the program.
const STOP_REQUESTED: u8 = 2;

/// Time after a request to stop in which a write that waits for its reader ends the program.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// Whether a signal ends the program now.
static IS_EXITING: AtomicBool = AtomicBool::new(false);

/// Waits for the end of the program if a signal ends it now. What the program does meanwhile may fail, because it is
/// being cleaned up; neither that error nor its exit status are of interest.
pub(crate) fn wait_if_exiting() {
    while IS_EXITING.load(Ordering::SeqCst) {
        std::thread::park();
    }
}

/// Cleans up and exits.
fn exit(cleanups: &Mutex<Vec<Cleanup>>) -> ! {
    IS_EXITING.store(true, Ordering::SeqCst);
    let cleanups = std::mem::take(&mut *cleanups.lock().unwrap_or_else(PoisonError::into_inner));
    let messages: Vec<String> = cleanups.into_iter().rev().map(|cleanup| cleanup()).collect();
    log::note_within_timeout(match &messages[..] {
        [] => String::new(),
        messages => format!("\ninterrupted: {}", messages.join("\n")),
    });
    std::process::exit(interrupted_status().into());
}

impl std::fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interrupt")
    }
}

impl Interrupt {
    /// Handles Ctrl-C, SIGTERM and SIGHUP. If no handler can be installed, the program still works and exits without a
    /// message.
    pub(crate) fn install() -> Interrupt {
        let interrupt = Interrupt {
            cleanups: Arc::default(),
            state: Arc::new(AtomicU8::new(EXIT)),
            listener: Arc::default(),
            reload: Arc::default(),
        };
        let handler = interrupt.clone();
        let (installed, wait) = mpsc::channel();
        let _ = std::thread::Builder::new().name("signals".into()).spawn(move || listen(&handler, &installed));
        // An error means that no handler was installed.
        let _ = wait.recv();
        interrupt
    }

    fn interrupted(&self, status: u8) {
        STATUS.store(status, Ordering::Relaxed);
        if let Some(listener) = &*self.listener.lock().unwrap_or_else(PoisonError::into_inner) {
            return listener();
        }
        let cleanups = self.cleanups.clone();
        if self.state.compare_exchange(RUNNING, STOP_REQUESTED, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            // A command that waits for the reader of its standard output cannot see the request.
            let exit_if_stuck = move || {
                if output::gets_stuck_within(STOP_TIMEOUT) {
                    exit(&cleanups);
                }
            };
            // Without a thread, a second Ctrl-C exits.
            let _ = std::thread::Builder::new().spawn(exit_if_stuck);
            return;
        }
        exit(&cleanups);
    }

    #[cfg(unix)]
    fn hung_up(&self) {
        match &*self.reload.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(reload) => reload(),
            None => self.interrupted(HANG_UP_STATUS),
        }
    }

    /// While the returned value lives, Ctrl-C calls `cleanup`, before those that were registered earlier, and prints
    /// the messages that they return. Values end in the reverse order of their beginning.
    pub(crate) fn on_exit(&self, cleanup: impl FnOnce() -> String + Send + 'static) -> CleanupGuard {
        self.cleanups.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(cleanup));
        CleanupGuard { cleanups: self.cleanups.clone() }
    }

    /// From now on every Ctrl-C and every SIGTERM calls `listener` and does nothing else.
    pub(crate) fn on_signal(&self, listener: impl Fn() + Send + 'static) {
        *self.listener.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(listener));
    }

    /// From now on every SIGHUP calls `reload` and does nothing else.
    pub(crate) fn on_hang_up(&self, reload: impl Fn() + Send + 'static) {
        *self.reload.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(reload));
    }

    /// While the returned value lives, the first Ctrl-C requests a stop and does nothing else.
    pub(crate) fn stop_on_interrupt(&self) -> StopRequest {
        self.state.store(RUNNING, Ordering::Relaxed);
        StopRequest { state: self.state.clone() }
    }
}

/// Signal for a write beyond the limit of file sizes; the number is that of Linux, macOS and the BSDs.
#[cfg(unix)]
const SIGXFSZ: i32 = 25;

/// Waits for signals and calls `interrupt`. Sends on `installed` when signals do not end the process any more.
#[cfg(unix)]
fn listen(interrupt: &Interrupt, installed: &mpsc::Sender<()>) {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
    runtime.block_on(async {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [Ok(mut interrupts), Ok(mut terminations), Ok(mut hang_ups)] = kinds.map(signal) else { return };
        // Writing beyond the limit of file sizes (`ulimit -f`) then is an error of that write, as on a full disk.
        let _too_large = signal(SignalKind::from_raw(SIGXFSZ));
        let _ = installed.send(());
        loop {
            tokio::select! {
                Some(()) = interrupts.recv() => interrupt.interrupted(INTERRUPT_STATUS),
                Some(()) = terminations.recv() => interrupt.interrupted(TERMINATE_STATUS),
                Some(()) = hang_ups.recv() => interrupt.hung_up(),
                else => return,
            }
        }
    });
}

/// Waits for Ctrl-C and calls `interrupt`.
#[cfg(not(unix))]
fn listen(interrupt: &Interrupt, installed: &mpsc::Sender<()>) {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_io().build() else { return };
    runtime.block_on(async {
        let _ = installed.send(());
        while tokio::signal::ctrl_c().await.is_ok() {
            interrupt.interrupted(INTERRUPT_STATUS);
        }
    });
}

/// Tells whether Ctrl-C has requested a stop.
#[derive(Debug)]
#[must_use]
pub(crate) struct StopRequest {
    state: Arc<AtomicU8>,
}

impl StopRequest {
    /// Whether Ctrl-C was pressed.
    pub(crate) fn is_requested(&self) -> bool {
        self.state.load(Ordering::Relaxed) == STOP_REQUESTED
    }
}

impl Drop for StopRequest {
    fn drop(&mut self) {
        self.state.store(EXIT, Ordering::Relaxed);
    }
}

/// Keeps a cleanup registered.
#[must_use]
pub(crate) struct CleanupGuard {
    cleanups: Cleanups,
}

/// Error of a command that Ctrl-C stopped and that has printed everything: only the exit status is left to set.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

impl Drop for CleanupGuard {
    fn drop(&mut self) {
        drop(self.cleanups.lock().unwrap_or_else(PoisonError::into_inner).pop());
    }
}
