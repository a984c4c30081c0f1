//! Progress of a pull on standard error: a bar on a terminal, lines elsewhere.

use crate::terminal::format::bytes_text;
use crate::terminal::log;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

/// Redraws per second; more would slow down slow terminals.
const FRAMES_PER_SECOND: u8 = 10;

#[derive(Debug, Clone)]
pub(crate) struct Screen {
    interactive: bool,
}

impl Screen {
    pub(crate) fn new() -> Screen {
        Screen { interactive: std::io::stderr().is_terminal() }
    }

    /// Writes one line. A closed standard error does not stop a download.
    pub(crate) fn say(&self, line: &str) {
        log::note(line);
    }

    /// Shows a transfer of `total` bytes that begins at `start`.
    pub(crate) fn transfer(&self, label: &str, start: u64, total: u64) -> Progress {
        if !self.interactive {
            let from = if start > 0 { format!(", resuming at {}", bytes_text(start)) } else { String::new() };
            self.say(&format!("{label}: {}{from}", bytes_text(total)));
            return Progress { bar: None };
        }
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(FRAMES_PER_SECOND));
        bar.set_style(style("{msg} {bar:24} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}"));
        bar.set_message(label.to_owned());
        bar.set_position(start);
        // Otherwise the rate of a resumed transfer would include the bytes of the earlier run.
        bar.reset_eta();
        Progress { bar: Some(bar) }
    }
}

/// Progress of one transfer. Dropping it clears it from the terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    /// Writes a line where there is no bar.
    pub(crate) fn mark(&self, line: &str) {
        if self.bar.is_none() {
            log::note(line);
        }
    }

    pub(crate) fn at(&self, position: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(position);
        }
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
