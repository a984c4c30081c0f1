//! Overload: ten times more clients than the server has capacity for. The excess is rejected at once, and accepted
//! requests are not slowed down.
//!
//! A rejected client gets 429 and tries again after the seconds of `Retry-After`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use super::server::{MODEL, Outcome};
use super::speed::percentile;
use super::{Arguments, Server};

const RUNNING: usize = 8;
/// Queue length: one whole batch that ends and returns at once, behind another that waits already.
const WAITING: usize = 16;
/// Clients that are never rejected: one batch runs and one waits.
const CAPACITY: usize = 2 * RUNNING;
/// Maximum time to a rejection.
const MAX_REJECTION_TIME: Duration = Duration::from_millis(20);
/// Minimum goodput under overload, as a fraction of that at capacity.
const MIN_GOODPUT: f64 = 0.95;

/// Results of one measurement.
#[derive(Debug, Default)]
struct Level {
    tokens_per_second: f64,
    completed: u64,
    rejected_in: Vec<Duration>,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome<()> {
    let (running, waiting) = (RUNNING.to_string(), WAITING.to_string());
    let mut server = Server::start(arguments, &["--max-sequences", &running, "--max-waiting", &waiting])?;
    let time = Duration::from_secs(arguments.seconds);
    level(&server, CAPACITY, time / 4, arguments)?;
    // Alternate, so that changes of the machine's speed affect both.
    let (mut peak, mut over) = (Level::default(), Level::default());
    for _ in 0..arguments.rounds {
        add(&mut peak, level(&server, CAPACITY, time, arguments)?);
        add(&mut over, level(&server, 10 * CAPACITY, time, arguments)?);
        server.check_alive()?;
    }
    let ratio = over.tokens_per_second / peak.tokens_per_second;
    let rounds = arguments.rounds as f64;
    println!(
        "goodput {:.0} tokens/s with {CAPACITY} clients, {:.0} with {}: {:.1} %",
        peak.tokens_per_second / rounds,
        over.tokens_per_second / rounds,
        10 * CAPACITY,
        100.0 * ratio
    );
    over.rejected_in.sort();
    let late = over.rejected_in.iter().filter(|&&time| time > MAX_REJECTION_TIME).count();
    println!(
        "{} completed, {} rejected in p50 {:.2} ms, p99 {:.2} ms, max {:.2} ms; {late} after {MAX_REJECTION_TIME:?}",
        over.completed,
        over.rejected_in.len(),
        percentile(&over.rejected_in, 0.50),
        percentile(&over.rejected_in, 0.99),
        percentile(&over.rejected_in, 1.0),
    );
    if !peak.rejected_in.is_empty() {
        return Err(format!("{} requests were rejected within capacity", peak.rejected_in.len()).into());
    }
    if over.rejected_in.is_empty() || over.completed == 0 {
        return Err("no request was rejected at ten times the capacity, or none was served".into());
    }
    if arguments.is_strict && (ratio < MIN_GOODPUT || late > 0) {
        return Err(format!(
            "expected {:.0} % of goodput and no rejection later than {MAX_REJECTION_TIME:?}",
            100.0 * MIN_GOODPUT
        )
        .into());
    }
    Ok(())
}

fn add(sum: &mut Level, level: Level) {
    sum.tokens_per_second += level.tokens_per_second;
    sum.completed += level.completed;
    sum.rejected_in.extend(level.rejected_in);
}

/// Runs `num_clients` clients that send request after request for `time`.
fn level(server: &Server, num_clients: usize, time: Duration, arguments: &Arguments) -> Outcome<Level> {
    let prompt = "a reply that takes a while";
    let body = json!({ "model": MODEL, "prompt": prompt, "max_tokens": arguments.output, "ignore_eos": true });
    let body = body.to_string().into_bytes();
    let (tokens, completed, rejected) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(Vec::new()));
    let started = Instant::now();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..num_clients)
            .map(|_| {
                scope.spawn(|| -> Outcome<()> {
                    let mut client = server.client()?;
                    while started.elapsed() < time {
                        let reply = client.post("/v1/completions", &body)?;
                        match reply.status {
                            // A reply that ends after `time` does not count.
                            200 if started.elapsed() <= time => {
                                tokens.fetch_add(arguments.output as u64, Ordering::Relaxed);
                                completed.fetch_add(1, Ordering::Relaxed);
                            }
                            200 => {}
                            429 => {
                                let wait_s = reply.retry_after_s.ok_or("a 429 without Retry-After")?;
                                rejected.lock().map_err(|_| "a client panicked")?.push(reply.answered_in);
                                let left = time.saturating_sub(started.elapsed());
                                std::thread::sleep(Duration::from_secs(wait_s).min(left));
                            }
                            status => return Err(format!("expected 200 or 429, found {status}: {}", reply.body).into()),
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        clients.into_iter().try_for_each(|client| client.join().map_err(|_| "a client panicked")?)
    })?;
    Ok(Level {
        tokens_per_second: tokens.into_inner() as f64 / time.as_secs_f64(),
        completed: completed.into_inner(),
        rejected_in: rejected.into_inner().map_err(|_| "a client panicked")?,
    })
}
