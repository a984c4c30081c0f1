//! Soak: mixed traffic of several tenants for as long as `--requests` lasts, every reply compared with the reply that
//! the same request got alone. Nothing may be lost or wrong, and the server's memory may not grow.

mod connection;
mod traffic;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use connection::{Connection, request};
use traffic::{Checked, Exchange, KEYS, KINDS};

use super::requests::Random;
use super::server::Outcome;
use super::{Arguments, Server};

/// Number of different requests of each kind.
const VARIANTS: usize = 60;
/// Maximum growth of the server's memory between the end of the warm-up and the end.
const MEMORY_SLACK: u64 = 16 << 20;
/// Maximum time for the server to become idle after the clients disconnected.
const SETTLING: Duration = Duration::from_secs(60);
/// Time between two lines of progress.
const PROGRESS: Duration = Duration::from_secs(15);
/// Pause before a refused request is sent again.
const RETRY: Duration = Duration::from_millis(20);
/// Lost and wrong replies that are printed; all are counted.
const SHOWN: usize = 5;

/// Counts of all clients.
#[derive(Debug, Default)]
struct Counts {
    /// Requests by kind, in the order of [`KINDS`].
    done: [AtomicUsize; KINDS.len()],
    busy: AtomicUsize,
    lost: AtomicUsize,
    wrong: AtomicUsize,
}

impl Counts {
    fn total(&self) -> usize {
        self.done.iter().map(|done| done.load(Ordering::Relaxed)).sum()
    }

    fn report(&self, counter: &AtomicUsize, message: &str) {
        if counter.fetch_add(1, Ordering::Relaxed) < SHOWN {
            eprintln!("{message}");
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Outcome<()> {
    let keys = KeysFile::write()?;
    let path = keys.0.to_str().ok_or("a folder for temporary files with a name in UTF-8")?;
    let mut server = Server::start(arguments, &["--max-waiting", "4096", "--keys-file", path])?;
    let mut exchanges = traffic::exchanges(VARIANTS);
    let mut connection = Connection::open(server.address)?;
    for exchange in exchanges.iter_mut().flatten() {
        exchange.learn(&mut connection)?;
    }
    drop(connection);

    // The first round allocates threads, buffers and arenas; later rounds must not add to them.
    let warm_up = Counts::default();
    send_all(&server, arguments, (arguments.requests / 50).max(2_000), 0, &exchanges, &warm_up)?;
    let before = settled(&server)?;
    let started = Instant::now();
    let counts = Counts::default();
    let highest = send_all(&server, arguments, arguments.requests, 1, &exchanges, &counts)?;
    let seconds = started.elapsed().as_secs_f64();
    let after = settled(&server)?;
    server.check_alive()?;

    println!("\n| kind | requests |\n|---|---|");
    for ((kind, _), done) in KINDS.iter().zip(&counts.done) {
        println!("| {} | {} |", kind.name(), done.load(Ordering::Relaxed));
    }
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let (lost, wrong) = (counts.lost.load(Ordering::Relaxed), counts.wrong.load(Ordering::Relaxed));
    println!(
        "\n{} requests in {seconds:.0} s ({:.0}/s) by {} clients of {} tenants: {lost} lost, {wrong} wrong, {} refused \
         and repeated; memory {:.1} MiB before, {:.1} at most, {:.1} after",
        counts.total(),
        counts.total() as f64 / seconds,
        arguments.clients,
        KEYS.len(),
        counts.busy.load(Ordering::Relaxed),
        mib(before),
        mib(highest),
        mib(after),
    );
    if lost + wrong + warm_up.lost.into_inner() + warm_up.wrong.into_inner() > 0 {
        return Err("replies were lost or differ from those without load".into());
    }
    if after > before + MEMORY_SLACK {
        return Err(format!("memory grew by more than {MEMORY_SLACK} bytes").into());
    }
    Ok(())
}

/// Sends `count` requests, divided among the clients. Returns the highest resident memory that was seen.
fn send_all(
    server: &Server,
    arguments: &Arguments,
    count: usize,
    round: u64,
    exchanges: &[Vec<Exchange>],
    counts: &Counts,
) -> Outcome<u64> {
    let left = AtomicUsize::new(count);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..arguments.clients)
            .map(|client| {
                let left = &left;
                scope.spawn(move || -> Outcome<()> {
                    let mut connection = Connection::open(server.address)?;
                    let mut random = Random::new((round << 32) | (client as u64 + 1));
                    let take = |left: usize| left.checked_sub(1);
                    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                        send_one(&mut connection, server, &mut random, exchanges, counts)?;
                    }
                    Ok(())
                })
            })
            .collect();
        let watch = scope.spawn(|| watch(server, count, counts, &is_over));
        let joined = clients.into_iter().try_for_each(|client| client.join().map_err(|_| "a client panicked")?);
        is_over.store(true, Ordering::Relaxed);
        watch.thread().unpark();
        let highest = watch.join().map_err(|_| "the observer panicked")?;
        joined?;
        highest
    })
}

/// Prints progress and returns the highest resident memory.
fn watch(server: &Server, count: usize, counts: &Counts, is_over: &AtomicBool) -> Outcome<u64> {
    let started = Instant::now();
    let mut highest = 0;
    while !is_over.load(Ordering::Relaxed) {
        std::thread::park_timeout(PROGRESS);
        let resident = server.resident_bytes()?;
        highest = highest.max(resident);
        let (done, seconds) = (counts.total(), started.elapsed().as_secs_f64());
        println!(
            "{seconds:>6.0} s: {done} of {count} requests, {:.0}/s, {} refused and repeated, {} lost, {} wrong, {:.1} MiB",
            done as f64 / seconds,
            counts.busy.load(Ordering::Relaxed),
            counts.lost.load(Ordering::Relaxed),
            counts.wrong.load(Ordering::Relaxed),
            resident as f64 / f64::from(1 << 20),
        );
    }
    Ok(highest)
}

/// Sends one request, again if it is refused for now, and counts its result.
fn send_one(
    connection: &mut Connection,
    server: &Server,
    random: &mut Random,
    exchanges: &[Vec<Exchange>],
    counts: &Counts,
) -> Outcome<()> {
    let mut ticket = random.below(KINDS.iter().map(|(_, share)| share).sum());
    let mut kind = 0;
    while ticket >= KINDS[kind].1 {
        ticket -= KINDS[kind].1;
        kind += 1;
    }
    let exchange = &exchanges[kind][random.below(exchanges[kind].len())];
    let tenant = random.below(KEYS.len());
    loop {
        match exchange.send(connection, tenant, random) {
            Ok(Checked::Equal) => {}
            Ok(Checked::Busy) => {
                counts.busy.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(RETRY);
                continue;
            }
            Ok(Checked::Wrong(message)) => counts.report(&counts.wrong, &format!("wrong: {message}")),
            Err(error) => {
                counts.report(&counts.lost, &format!("lost: {} request: {error}", exchange.kind.name()));
                *connection = Connection::open(server.address)?;
            }
        }
        counts.done[kind].fetch_add(1, Ordering::Relaxed);
        return Ok(());
    }
}

/// Waits until no request runs and no other client is connected; returns the resident memory.
fn settled(server: &Server) -> Outcome<u64> {
    let mut connection = Connection::open(server.address)?;
    let metrics = request("GET", "/metrics", KEYS[0], b"");
    let idle = [
        ("pellucid_kv_blocks_in_use", 0.0),
        ("pellucid_sequences_running", 0.0),
        ("pellucid_requests_waiting", 0.0),
        ("pellucid_client_memory_bytes", 0.0),
        ("pellucid_connections", 1.0),
    ];
    let started = Instant::now();
    loop {
        let text = connection.ask(&metrics)?.body;
        let value = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|value| value.parse::<f64>().ok()).ok_or_else(|| format!("/metrics has no {name}"))
        };
        let mut busy = None;
        for (name, expected) in idle {
            let found = value(name)?;
            if found != expected {
                busy = Some(format!("{name} is {found}"));
            }
        }
        let Some(busy) = busy else { return server.resident_bytes() };
        if started.elapsed() > SETTLING {
            return Err(format!("{SETTLING:?} after the last request, {busy}").into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A keys file, removed on drop.
struct KeysFile(std::path::PathBuf);

impl KeysFile {
    fn write() -> Outcome<KeysFile> {
        let path = std::env::temp_dir().join(format!("pellucid-soak-{}.toml", std::process::id()));
        let tenant = |(index, key): (usize, &&str)| {
            format!("[[tenant]]\nname = \"tenant-{index}\"\nkeys = [\"{key}\"]\nmetrics = {}\n\n", index == 0)
        };
        std::fs::write(&path, KEYS.iter().enumerate().map(tenant).collect::<String>())?;
        Ok(KeysFile(path))
    }
}

impl Drop for KeysFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
