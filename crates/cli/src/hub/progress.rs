//! Progress of a pull on standard error: a bar on a terminal, lines elsewhere.

use crate::terminal::format::bytes_text;
use crate::terminal::log;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;
use std::sync::Arc;

/// Redraws per second; more would slow down slow terminals.
const FRAMES_PER_SECOND: u8 = 10;

/// Takes the progress of transfers instead of the terminal: name of the file, bytes so far, bytes in total. Returns
/// false to end the transfer.
pub(crate) type Observer = Arc<dyn Fn(&str, u64, u64) -> bool + Send + Sync>;

#[derive(Clone)]
pub(crate) struct Screen {
    interactive: bool,
    observer: Option<Observer>,
}

impl std::fmt::Debug for Screen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Screen").field("interactive", &self.interactive).finish_non_exhaustive()
    }
}

impl Screen {
    pub(crate) fn new() -> Screen {
        Screen { interactive: std::io::stderr().is_terminal(), observer: None }
    }

    /// Returns a screen that shows transfers to `observer`.
    pub(crate) fn observed(observer: Observer) -> Screen {
        Screen { interactive: false, observer: Some(observer) }
    }

    /// Writes one line. A closed standard error does not stop a download.
    pub(crate) fn say(&self, line: &str) {
        log::note(line);
    }

    /// Shows a transfer of `total` bytes that begins at `start`.
    pub(crate) fn transfer(&self, label: &str, start: u64, total: u64) -> Progress {
        if let Some(observer) = &self.observer {
            let watched = Watched { observer: observer.clone(), label: label.to_owned(), total };
            return Progress { bar: None, watched: Some(watched) };
        }
        if !self.interactive {
            let from = if start > 0 { format!(", resuming at {}", bytes_text(start)) } else { String::new() };
            self.say(&format!("{label}: {}{from}", bytes_text(total)));
            return Progress { bar: None, watched: None };
        }
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(FRAMES_PER_SECOND));
        bar.set_style(style("{msg} {bar:24} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}"));
        bar.set_message(label.to_owned());
        bar.set_position(start);
        // Otherwise the rate of a resumed transfer would include the bytes of the earlier run.
        bar.reset_eta();
        Progress { bar: Some(bar), watched: None }
    }
}

/// Progress of one transfer. Dropping it clears it from the terminal.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    watched: Option<Watched>,
}

/// A transfer that an observer sees.
struct Watched {
    observer: Observer,
    label: String,
    total: u64,
}

impl Progress {
    /// Writes a line where there is no bar.
    pub(crate) fn mark(&self, line: &str) {
        if self.bar.is_none() && self.watched.is_none() {
            log::note(line);
        }
    }

    /// Shows the bytes so far. Returns whether to go on.
    pub(crate) fn at(&self, position: u64) -> bool {
        if let Some(bar) = &self.bar {
            bar.set_position(position);
        }
        self.watched.as_ref().is_none_or(|watched| (watched.observer)(&watched.label, position, watched.total))
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Parses a template; one that does not parse gives the default bar.
fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
