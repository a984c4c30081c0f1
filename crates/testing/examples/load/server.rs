//! A server process with the tiny model or a given one, watched through `/proc` and `/metrics`, and killed on drop.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use pellucid_testing::{TINY_TEMPLATE, TinyModel};
use serde_json::Value;

use super::Arguments;
use super::client::Client;

pub(crate) type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// The model name in requests.
pub(crate) const MODEL: &str = "loaded";
/// Context length of the tiny model: enough for long prompts and long replies.
const CONTEXT: usize = 2048;

pub(crate) struct Server {
    process: Child,
    pub(crate) address: SocketAddr,
    /// The tiny model's folder.
    folder: Option<PathBuf>,
}

impl Server {
    pub(crate) fn start(arguments: &Arguments, flags: &[&str]) -> Outcome<Server> {
        let mut folder = None;
        let model = match &arguments.model {
            Some(model) => model.into(),
            None => {
                let path = std::env::temp_dir().join(format!("pellucid-load-{}", std::process::id()));
                TinyModel {
                    template: Some(TINY_TEMPLATE),
                    context_len: Some(CONTEXT),
                    has_words: true,
                    has_brackets: false,
                    fills_gaps: false,
                }
                .write(&path)?;
                folder.insert(path).clone()
            }
        };
        let mut process = Command::new(&arguments.pellucid)
            .args(["serve", "--port", "0", "--served-model-name", MODEL, "--log-format", "json", "--model"])
            .arg(&model)
            .args(flags)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", arguments.pellucid.display()))?;
        let log = process.stderr.take().ok_or("the server has no log")?;
        let mut lines = BufReader::new(log).lines().map_while(Result::ok);
        let address = lines.find_map(|line| {
            let value: Value = serde_json::from_str(&line).ok().or_else(|| {
                eprintln!("{line}");
                None
            })?;
            value["url"].as_str()?.strip_prefix("http://")?.parse().ok()
        });
        // The pipe must be read, or the server would block. A line that is not JSON is the message of a crash.
        std::thread::spawn(move || lines.filter(|line| !line.starts_with('{')).for_each(|line| eprintln!("{line}")));
        let address = address.ok_or("the server ended without logging its address")?;
        Ok(Server { process, address, folder })
    }

    pub(crate) fn client(&self) -> Outcome<Client> {
        Ok(Client::connect(self.address)?)
    }

    /// Returns the resident memory of the process.
    pub(crate) fn resident_bytes(&self) -> Outcome<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
    }

    pub(crate) fn num_descriptors(&self) -> Outcome<usize> {
        Ok(std::fs::read_dir(format!("/proc/{}/fd", self.process.id()))?.count())
    }

    /// Returns the processor time of the server's threads so far, in seconds, by their name without its number.
    pub(crate) fn thread_seconds(&self) -> Outcome<BTreeMap<String, f64>> {
        let mut seconds = BTreeMap::new();
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.process.id()))? {
            // A thread that ends meanwhile is left out.
            let Ok(stat) = std::fs::read_to_string(thread?.path().join("stat")) else { continue };
            let (name, time) = parse_stat(&stat).ok_or("a line of /proc that cannot be read")?;
            *seconds.entry(name).or_default() += time;
        }
        Ok(seconds)
    }

    /// Returns an error if the process has ended.
    pub(crate) fn check_alive(&mut self) -> Outcome<()> {
        match self.process.try_wait()? {
            None => Ok(()),
            Some(status) => Err(format!("the server ended: {status}").into()),
        }
    }
}

/// Returns the processor time of this program so far, in seconds.
pub(crate) fn own_seconds() -> Outcome<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    Ok(parse_stat(&stat).ok_or("a line of /proc that cannot be read")?.1)
}

/// Returns the name, without a number at its end, and the processor time in seconds from a `stat` file of `/proc`.
fn parse_stat(stat: &str) -> Option<(String, f64)> {
    /// Clock ticks per second in `/proc`, the same on every Linux.
    const TICKS: f64 = 100.0;
    let (head, rest) = stat.rsplit_once(") ")?;
    let name = head.split_once(" (")?.1.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-');
    // User and system time are fields 14 and 15 of the line; the state is field 3.
    let ticks = |field: usize| rest.split(' ').nth(field - 3)?.parse::<f64>().ok();
    Some((name.to_owned(), (ticks(14)? + ticks(15)?) / TICKS))
}

/// Reads one value of `/metrics`.
pub(crate) fn metric(client: &mut Client, name: &str) -> Outcome<f64> {
    let text = client.get("/metrics")?.body;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))
        .ok_or_else(|| format!("/metrics has no {name}"))?;
    Ok(line.parse()?)
}

impl Drop for Server {
    fn drop(&mut self) {
        // Errors are ignored: the process may have ended before, which `check_alive` reports.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}
