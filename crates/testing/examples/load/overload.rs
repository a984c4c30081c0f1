//! Ten times more clients than the server has places: the excess is refused at once, and those inside notice nothing.
//!
//! Clients for whom there is no place get 429 and come back after the seconds that they are told.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use super::server::{MODEL, Outcome};
use super::speed::percentile;
use super::{Arguments, Server};

const RUNNING: usize = 8;
/// Room for a whole batch that ends and comes back at once, behind another that waits already.
const WAITING: usize = 16;
/// Clients that are never refused: one batch runs and one waits.
const CAPACITY: usize = 2 * RUNNING;
/// How soon a refusal must come, and how much goodput it may cost.
const REFUSED_IN: Duration = Duration::from_millis(20);
const GOODPUT: f64 = 0.95;

/// What came of a while of load.
#[derive(Debug, Default)]
struct Level {
    tokens_per_second: f64,
    completed: u64,
    refused_in: Vec<Duration>,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome<()> {
    let (running, waiting) = (RUNNING.to_string(), WAITING.to_string());
    let mut server = Server::start(arguments, &["--max-sequences", &running, "--max-waiting", &waiting])?;
    let time = Duration::from_secs(arguments.seconds);
    level(&server, CAPACITY, time / 4, arguments)?;
    // Alternating, so that a machine that changes its mind changes both.
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
    over.refused_in.sort();
    let late = over.refused_in.iter().filter(|&&time| time > REFUSED_IN).count();
    println!(
        "{} completed, {} refused in p50 {:.2} ms, p99 {:.2} ms, max {:.2} ms; {late} later than {REFUSED_IN:?}",
        over.completed,
        over.refused_in.len(),
        percentile(&over.refused_in, 0.50),
        percentile(&over.refused_in, 0.99),
        percentile(&over.refused_in, 1.0),
    );
    if !peak.refused_in.is_empty() {
        return Err(format!("{} requests were refused within capacity", peak.refused_in.len()).into());
    }
    if over.refused_in.is_empty() || over.completed == 0 {
        return Err("ten times the capacity was not too much, or nothing was served".into());
    }
    if arguments.is_strict && (ratio < GOODPUT || late > 0) {
        return Err(
            format!("expected {:.0} % of goodput and no refusal later than {REFUSED_IN:?}", 100.0 * GOODPUT).into()
        );
    }
    Ok(())
}

fn add(sum: &mut Level, level: Level) {
    sum.tokens_per_second += level.tokens_per_second;
    sum.completed += level.completed;
    sum.refused_in.extend(level.refused_in);
}

/// So many clients ask again and again for a while.
fn level(server: &Server, num_clients: usize, time: Duration, arguments: &Arguments) -> Outcome<Level> {
    let body = json!({ "model": MODEL, "prompt": "a reply that takes a while", "max_tokens": arguments.output, "ignore_eos": true });
    let body = body.to_string().into_bytes();
    let (tokens, completed, refused) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(Vec::new()));
    let started = Instant::now();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..num_clients)
            .map(|_| {
                scope.spawn(|| -> Outcome<()> {
                    let mut client = server.client()?;
                    while started.elapsed() < time {
                        let reply = client.post("/v1/completions", &body)?;
                        match reply.status {
                            // What ends after the while was not made in it.
                            200 if started.elapsed() <= time => {
                                tokens.fetch_add(arguments.output as u64, Ordering::Relaxed);
                                completed.fetch_add(1, Ordering::Relaxed);
                            }
                            200 => {}
                            429 => {
                                let wait_s = reply.retry_after_s.ok_or("a 429 without Retry-After")?;
                                refused.lock().map_err(|_| "a client panicked")?.push(reply.answered_in);
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
        refused_in: refused.into_inner().map_err(|_| "a client panicked")?,
    })
}
