//! Progress of loading a model.

use std::io::IsTerminal;
use std::sync::mpsc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pellucid::LoadEvent;

use crate::terminal::log;

/// Time of loading after which a terminal shows what is done.
const LOADING_PATIENCE: Duration = Duration::from_millis(300);

/// Progress of loading on a terminal, and notes. Clears itself when the last clone is dropped.
#[derive(Clone)]
pub(crate) struct LoadingBar {
    bar: ProgressBar,
    /// Dropped with the last clone, which keeps the bar from appearing any more.
    _done: mpsc::Sender<()>,
}

impl LoadingBar {
    pub(crate) fn new() -> LoadingBar {
        let bar = ProgressBar::hidden();
        let (done, is_done) = mpsc::channel();
        if std::io::stderr().is_terminal() {
            bar.set_style(style("{spinner} {msg}"));
            let shown = bar.clone();
            // Without a thread there is no progress to see, and the model is loaded all the same.
            let _ = std::thread::Builder::new().spawn(move || {
                if is_done.recv_timeout(LOADING_PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
                    shown.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
                    shown.enable_steady_tick(Duration::from_millis(100));
                    // Waits for the last clone, and clears what was drawn after its own attempt to do so.
                    let _ = is_done.recv();
                    shown.finish_and_clear();
                }
            });
        }
        LoadingBar { bar, _done: done }
    }

    pub(crate) fn show(&self, event: LoadEvent) {
        match event {
            LoadEvent::Phase(phase) => {
                self.bar.set_style(style("{spinner} {msg}"));
                self.bar.set_message(phase.to_string());
            }
            LoadEvent::Weights { loaded, total } => {
                if self.bar.length().is_none() {
                    self.bar.set_style(style("{msg} {bar:24} {percent} % {eta}"));
                    self.bar.set_length(total as u64);
                }
                self.bar.set_position(loaded as u64);
            }
            LoadEvent::Note(note) => self.bar.suspend(|| log::note(&note)),
            _ => {}
        }
    }
}

impl Drop for LoadingBar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Parses a template; one that does not parse gives the default bar.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
