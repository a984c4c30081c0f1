//! The log of `serve`, and the lines that all commands write to standard error.
//!
//! Once [`start`] was called, every line of the process goes through the queue of `log_queue.rs`, in the chosen format:
//! events of the server, notes, errors and the messages of panics. Other commands write to standard error directly; if
//! that fails, the line is lost and the command goes on.

use std::io::{self, Write};
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use pellucid_server::LogLosses;
use serde_json::json;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

use super::cells::hanging;
use super::log_queue::LogQueue;

/// Maximum bytes of a line.
const MAX_LINE_BYTES: usize = 8 << 10;
/// Bytes that a line beyond the maximum keeps. As text in JSON, a byte takes up to six.
const KEPT_BYTES: usize = 1 << 10;
/// Maximum time that the program waits at its end for lines to be written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

static LOG: OnceLock<Log> = OnceLock::new();

/// Whether notes and events are dropped: of several ranks, the first one reports.
static IS_SILENT: AtomicBool = AtomicBool::new(false);

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
pub(crate) enum LogFormat {
    #[default]
    Text,
    Json,
}

#[derive(Debug, Clone)]
struct Log {
    queue: Arc<LogQueue>,
    format: LogFormat,
}

/// Starts logging to standard error and returns the counts of lost lines. No level logs texts of prompts or replies, or
/// keys.
pub(crate) fn start(level: LevelFilter, format: LogFormat) -> io::Result<Arc<LogLosses>> {
    let losses = Arc::new(LogLosses::default());
    let log = Log { queue: Arc::new(LogQueue::new(losses.clone())), format };
    let queue = log.queue.clone();
    let notice = move |lost: u64| {
        let lines = if lost == 1 { "line was" } else { "lines were" };
        line_text(format, "WARN", &format!("{lost} log {lines} lost because they could not be written"))
    };
    let output = standard_error();
    std::thread::Builder::new().name("log".into()).spawn(move || queue.write_to(output, notice))?;
    // An error of formatting would otherwise be printed to standard error, and printing panics if that fails.
    let builder = tracing_subscriber::fmt().log_internal_errors(false).with_max_level(level).with_target(false);
    // Both fail only if there is a log already, which cannot happen: this is called once.
    let _ = match format {
        LogFormat::Text => tracing::subscriber::set_global_default(builder.with_writer(log.clone()).finish()),
        LogFormat::Json => {
            let json = builder.json().flatten_event(true).with_writer(log.clone());
            tracing::subscriber::set_global_default(json.finish())
        }
    };
    let _ = LOG.set(log);
    Ok(losses)
}

/// Drops notes and events from now on. Errors are still written.
pub(crate) fn silence_notes() {
    IS_SILENT.store(true, Ordering::Relaxed);
}

/// Writes a note for the user: to the log if there is one, else to standard error.
pub(crate) fn note(text: &str) {
    if IS_SILENT.load(Ordering::Relaxed) {
        return;
    }
    match LOG.get() {
        Some(_) => tracing::info!("{text}"),
        // A standard error that cannot be written is no reason to stop.
        None => drop(match terminal_size::terminal_size_of(io::stderr()) {
            Some((columns, _)) => writeln!(io::stderr(), "{}", hanging(text, columns.0.into())),
            None => writeln!(io::stderr(), "{text}"),
        }),
    }
}

/// Reports the error that ends the program. In a log of text it looks as without a log.
pub(crate) fn error(text: &str) {
    match LOG.get() {
        Some(log) => log.push(match log.format {
            LogFormat::Text => format!("error: {text}"),
            LogFormat::Json => line_text(log.format, "ERROR", text),
        }),
        None => drop(writeln!(io::stderr(), "error: {text}")),
    }
}

/// Reports a panic as an internal error of this program.
pub(crate) fn report_panic(info: &PanicHookInfo<'_>) {
    let place = info.location().map_or_else(String::new, |place| format!(" ({}:{})", place.file(), place.line()));
    let what = info.payload_as_str().unwrap_or("no message");
    error(&format!("internal error{place}: {what}; please report it"));
}

/// Waits for the log to be written, for a bounded time: a pipe that nobody reads does not keep the program alive.
pub(crate) fn finish() {
    if let Some(log) = LOG.get() {
        log.queue.flush(FLUSH_TIMEOUT);
    }
}

/// Reports `text` and waits for that, for a bounded time, even if another thread is stuck in a write to standard error.
pub(crate) fn note_within_timeout(text: String) {
    if LOG.get().is_some() {
        note(text.trim_start());
        return finish();
    }
    let (written, is_written) = std::sync::mpsc::channel();
    let writer = std::thread::Builder::new().spawn(move || {
        note(&text);
        let _ = written.send(());
    });
    if writer.is_ok() {
        let _ = is_written.recv_timeout(FLUSH_TIMEOUT);
    }
}

impl Log {
    /// Adds one event as one line of bounded length.
    fn push(&self, mut text: String) {
        if text.contains(['\n', '\r']) {
            text = text.replace('\n', "\\n").replace('\r', "\\r");
        }
        if text.len() > MAX_LINE_BYTES {
            text = self.cut(&text);
        }
        self.queue.push(text.as_bytes());
    }

    /// Returns the beginning of a line, and its length.
    fn cut(&self, text: &str) -> String {
        let kept = &text[..text.floor_char_boundary(KEPT_BYTES)];
        match self.format {
            LogFormat::Text => format!("{kept}... ({} bytes in all)", text.len()),
            LogFormat::Json => json!({
                "timestamp": now(), "level": "WARN", "message": "a log line was too long",
                "bytes": text.len(), "beginning": kept,
            })
            .to_string(),
        }
    }
}

/// Receives one event of `tracing` in one call.
#[derive(Debug)]
pub(crate) struct EventWriter<'a>(&'a Log);

impl Write for EventWriter<'_> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        if IS_SILENT.load(Ordering::Relaxed) {
            return Ok(event.len());
        }
        self.0.push(String::from_utf8_lossy(event).trim_end().to_owned());
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = EventWriter<'a>;

    fn make_writer(&'a self) -> EventWriter<'a> {
        EventWriter(self)
    }
}

/// Returns a line in the form that `tracing` gives its events.
fn line_text(format: LogFormat, level: &str, message: &str) -> String {
    match format {
        LogFormat::Text => format!("{} {level:>5} {message}", now()),
        LogFormat::Json => json!({ "timestamp": now(), "level": level, "message": message }).to_string(),
    }
}

fn now() -> String {
    let mut text = String::new();
    // Fails only if the string does.
    let _ = SystemTime.format_time(&mut format::Writer::new(&mut text));
    text
}

/// Returns standard error without the standard library's lock, which a stuck write would hold.
#[cfg(unix)]
fn standard_error() -> Box<dyn Write + Send> {
    use std::os::fd::AsFd;
    match io::stderr().as_fd().try_clone_to_owned() {
        Ok(descriptor) => Box::new(std::fs::File::from(descriptor)),
        Err(_) => Box::new(io::stderr()),
    }
}

#[cfg(not(unix))]
fn standard_error() -> Box<dyn Write + Send> {
    Box::new(io::stderr())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pushed(format: LogFormat, text: &str) -> String {
        let log = Log { queue: Arc::new(LogQueue::new(Arc::default())), format };
        log.push(text.to_owned());
        log.queue.first_lines()
    }

    #[test]
    fn an_event_is_one_line_of_bounded_length() {
        assert_eq!(pushed(LogFormat::Text, "left: 1\nright: 2"), "left: 1\\nright: 2\n");
        let long = "\u{1}é".repeat(MAX_LINE_BYTES);
        let text = pushed(LogFormat::Text, &long);
        assert!(text.len() < MAX_LINE_BYTES && text.ends_with("(24576 bytes in all)\n"), "{text}");
        let text = pushed(LogFormat::Json, &long);
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert!(text.len() < MAX_LINE_BYTES && line["bytes"] == 24576, "{text}");
    }
}
