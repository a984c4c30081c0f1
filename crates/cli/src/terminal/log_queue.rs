//! A bounded queue of log lines and the thread that writes them.
//!
//! A full disk, a reader that has exited and a pipe that nobody reads must not stop the server. Threads that log put
//! whole lines into a ring of bytes allocated at the start, and never wait for the writer. A line that does not fit, or
//! whose write fails, is dropped and counted; after the next write that succeeds, one more line tells the number.

use std::collections::VecDeque;
use std::io::{ErrorKind, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pellucid_server::LogLosses;

/// Maximum bytes that wait: about 5,000 lines of a request each.
const QUEUE_BYTES: usize = 1 << 20;
/// Maximum bytes that one write passes to the system.
const BATCH_BYTES: usize = 64 << 10;
/// Pause before a write is tried again on a descriptor that another process has made non-blocking.
const RETRY: Duration = Duration::from_millis(20);

/// Lines that wait for the writer thread.
#[derive(Debug)]
pub(super) struct LogQueue {
    lines: Mutex<Lines>,
    /// Signalled when lines arrive and when lines were written.
    changed: Condvar,
    losses: Arc<LogLosses>,
}

#[derive(Debug)]
struct Lines {
    /// Whole lines, each with its line end.
    bytes: VecDeque<u8>,
    /// Whether the writer has taken lines and not finished them.
    is_writing: bool,
}

impl LogQueue {
    pub(super) fn new(losses: Arc<LogLosses>) -> LogQueue {
        let lines = Lines { bytes: VecDeque::with_capacity(QUEUE_BYTES), is_writing: false };
        LogQueue { lines: Mutex::new(lines), changed: Condvar::new(), losses }
    }

    /// Adds a line, which has no line end. It must not be longer than [`BATCH_BYTES`].
    pub(super) fn push(&self, line: &[u8]) {
        debug_assert!(line.len() < BATCH_BYTES && !line.contains(&b'\n'));
        let mut lines = self.lock();
        // The ring has its whole capacity from the start, so this allocates nothing.
        if lines.bytes.len() + line.len() + 1 > QUEUE_BYTES {
            drop(lines);
            self.losses.count_queue_full();
            return;
        }
        lines.bytes.extend(line);
        lines.bytes.push_back(b'\n');
        drop(lines);
        self.changed.notify_all();
    }

    /// Waits until every line was written or dropped, at most `timeout`.
    pub(super) fn flush(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut lines = self.lock();
        while lines.is_writing || !lines.bytes.is_empty() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return };
            lines = self.changed.wait_timeout(lines, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Writes lines to `to` forever. `notice` returns the line that tells a number of lost lines.
    pub(super) fn write_to(&self, mut to: impl Write, notice: impl Fn(u64) -> String) {
        let mut writer = Writer::default();
        let mut batch = Vec::with_capacity(2 * BATCH_BYTES);
        loop {
            self.take(&mut batch);
            writer.write(&mut to, &mut batch, &self.losses, &notice);
            self.lock().is_writing = false;
            self.changed.notify_all();
        }
    }

    /// Waits for lines and moves up to [`BATCH_BYTES`] of them into `batch`.
    fn take(&self, batch: &mut Vec<u8>) {
        let mut lines = self.lock();
        while lines.bytes.is_empty() {
            lines = self.changed.wait(lines).unwrap_or_else(PoisonError::into_inner);
        }
        lines.is_writing = true;
        let most = lines.bytes.len().min(BATCH_BYTES);
        let whole = lines.bytes.range(..most).rposition(|byte| *byte == b'\n').map_or(most, |end| end + 1);
        batch.clear();
        batch.extend(lines.bytes.drain(..whole));
    }

    /// Returns the lines at the front, for tests of other modules.
    #[cfg(test)]
    pub(super) fn first_lines(&self) -> String {
        let mut batch = Vec::new();
        self.take(&mut batch);
        String::from_utf8(batch).unwrap()
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// State of the writer between two batches.
#[derive(Debug, Default)]
struct Writer {
    /// Losses that the log tells of.
    num_told: u64,
    /// Whether the last byte written is not a line end, because a write failed in the middle of a line.
    is_torn: bool,
}

impl Writer {
    /// Writes a batch of whole lines, and a notice if lines were lost since the last one.
    fn write(&mut self, to: &mut impl Write, batch: &mut Vec<u8>, losses: &LogLosses, notice: &impl Fn(u64) -> String) {
        let begin = usize::from(self.is_torn);
        if self.is_torn {
            batch.insert(0, b'\n');
        }
        let num_lost = losses.total();
        let end = batch.len();
        if num_lost > self.num_told {
            batch.extend(notice(num_lost - self.num_told).as_bytes());
            batch.push(b'\n');
        }
        let num_written = write_most(to, batch);
        if num_written == batch.len() {
            self.num_told = num_lost;
        }
        if let Some(last) = num_written.checked_sub(1) {
            self.is_torn = batch[last] != b'\n';
        }
        // A line that was written in part counts as lost. The notice and the end of a torn line do not count.
        let unwritten = &batch[num_written.clamp(begin, end)..end];
        let num_unwritten = unwritten.iter().filter(|byte| **byte == b'\n').count();
        losses.count_write_failed(num_unwritten as u64);
    }
}

/// Writes until an error occurs; returns the number of bytes written.
fn write_most(to: &mut impl Write, bytes: &[u8]) -> usize {
    let mut num_written = 0;
    while num_written < bytes.len() {
        match to.write(&bytes[num_written..]) {
            Ok(0) => break,
            Ok(written) => num_written += written,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::sleep(RETRY),
            Err(_) => break,
        }
    }
    num_written
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// A file on a disk with `free` bytes left.
    #[derive(Default)]
    struct Disk {
        written: Vec<u8>,
        free: usize,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.free == 0 {
                return Err(ErrorKind::StorageFull.into());
            }
            let taken = bytes.len().min(self.free);
            self.free -= taken;
            self.written.extend(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn notice(lost: u64) -> String {
        format!("{lost} lost")
    }

    #[test]
    fn lines_lost_on_a_full_disk_are_counted_and_told_of_once() {
        let (mut disk, mut writer, losses) =
            (Disk { free: 10, ..Disk::default() }, Writer::default(), LogLosses::default());
        writer.write(&mut disk, &mut b"first\nsecond\nthird\n".to_vec(), &losses, &notice);
        assert_eq!(losses.total(), 2);
        writer.write(&mut disk, &mut b"fourth\n".to_vec(), &losses, &notice);
        assert_eq!(losses.total(), 3);
        disk.free = 1000;
        writer.write(&mut disk, &mut b"fifth\n".to_vec(), &losses, &notice);
        writer.write(&mut disk, &mut b"sixth\n".to_vec(), &losses, &notice);
        assert_eq!(String::from_utf8(disk.written).unwrap(), "first\nseco\nfifth\n3 lost\nsixth\n");
        assert_eq!(losses.total(), 3);
    }

    #[test]
    fn a_full_queue_drops_lines_and_never_waits() {
        let losses = Arc::new(LogLosses::default());
        let queue = LogQueue::new(losses.clone());
        let line = [b'x'; 1023];
        // Nobody takes lines out: were this to wait, it would not return.
        (0..QUEUE_BYTES / 1024 + 7).for_each(|_| queue.push(&line));
        assert_eq!(losses.total(), 7);
        queue.flush(Duration::ZERO);
        let mut batch = Vec::new();
        queue.take(&mut batch);
        assert_eq!(batch.len(), BATCH_BYTES);
        queue.push(&line);
        assert_eq!(losses.total(), 7, "there is room again");
    }

    #[test]
    fn a_batch_holds_whole_lines() {
        let queue = LogQueue::new(Arc::default());
        let line = [b'x'; 1000];
        (0..100).for_each(|_| queue.push(&line));
        let mut batch = Vec::new();
        queue.take(&mut batch);
        assert!(batch.len() <= BATCH_BYTES && batch.len() % 1001 == 0 && batch.ends_with(b"\n"), "{}", batch.len());
    }
}
