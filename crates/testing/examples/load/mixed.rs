//! Mixed load: good requests whole and streamed, cancels and bad input all at once. Each good reply must equal the reply to the same
//! request sent alone, each bad one gets its status, and afterwards memory, descriptors and blocks are where they were.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::client::Client;
use super::requests::{self, Dice, Good};
use super::server::{Outcome, metric};
use super::{Arguments, Server};

/// Good requests that differ; each is sent alone once.
const VARIANTS: usize = 150;
/// Bytes that the allocator may keep between two idle moments: pages that are in part used, buffers of threads.
const MEMORY_SLACK: u64 = 8 << 20;
/// For the server to notice that clients have gone.
const SETTLING: Duration = Duration::from_secs(30);

/// What an idle server holds.
#[derive(Debug)]
struct Holding {
    resident_bytes: u64,
    num_descriptors: usize,
    blocks_in_use: f64,
}

#[derive(Debug, Default)]
struct Counts {
    whole: AtomicUsize,
    streamed: AtomicUsize,
    cancelled: AtomicUsize,
    bad: AtomicUsize,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome<()> {
    let mut server = Server::start(arguments, &["--max-waiting", "4096"])?;
    let good: Vec<Good> = (0..VARIANTS).map(requests::good).collect();
    let solo = one_by_one(&server, &good)?;
    // The first crowd brings threads, buffers and arenas to life; what comes after must not add to them.
    let counts = Counts::default();
    let warm_up = (arguments.requests / 10).max(arguments.clients * 4);
    crowd(&server, arguments, warm_up, 0, &good, &solo, &counts)?;
    let before = settled(&server)?;
    let counts = Counts::default();
    let started = Instant::now();
    crowd(&server, arguments, arguments.requests, 1, &good, &solo, &counts)?;
    let seconds = started.elapsed().as_secs_f64();
    let after = settled(&server)?;
    server.check_alive()?;
    let Counts { whole, streamed, cancelled, bad } = counts;
    println!(
        "{} requests in {seconds:.1} s by {} clients: {} whole and {} streamed equal to their solo replies, {} cancelled, {} bad",
        arguments.requests,
        arguments.clients,
        whole.into_inner(),
        streamed.into_inner(),
        cancelled.into_inner(),
        bad.into_inner(),
    );
    println!(
        "memory {:.1} MiB before, {:.1} after; descriptors {} and {}; KV blocks in use {} and {}; {} preemptions",
        before.resident_bytes as f64 / 1048576.0,
        after.resident_bytes as f64 / 1048576.0,
        before.num_descriptors,
        after.num_descriptors,
        before.blocks_in_use,
        after.blocks_in_use,
        metric(&mut server.client()?, "pellucid_preemptions_total")?,
    );
    if after.num_descriptors != before.num_descriptors || after.blocks_in_use != 0.0 {
        return Err("descriptors or blocks were not given back".into());
    }
    if after.resident_bytes > before.resident_bytes + MEMORY_SLACK {
        return Err(format!("memory grew by more than {MEMORY_SLACK} bytes").into());
    }
    Ok(())
}

/// The answer to each request when nobody else asks.
fn one_by_one(server: &Server, good: &[Good]) -> Outcome<Vec<Value>> {
    let mut client = server.client()?;
    let mut solo = Vec::with_capacity(good.len());
    for (i, good) in good.iter().enumerate() {
        let reply = client.post(good.path, &good.whole)?;
        let answer = requests::answer(&reply.body).filter(|_| reply.status == 200);
        solo.push(answer.ok_or_else(|| format!("request {i} alone: {} {}", reply.status, reply.body))?);
    }
    Ok(solo)
}

/// Sends so many requests, split over the clients.
fn crowd(
    server: &Server,
    arguments: &Arguments,
    count: usize,
    round: u64,
    good: &[Good],
    solo: &[Value],
    counts: &Counts,
) -> Outcome<()> {
    let left = AtomicUsize::new(count);
    let bad = requests::bad();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..arguments.clients)
            .map(|worker| {
                let (left, bad) = (&left, &bad);
                scope.spawn(move || -> Outcome<()> {
                    let mut client = server.client()?;
                    let mut dice = Dice::new((round << 32) | (worker as u64 + 1));
                    let take = |left: usize| left.checked_sub(1);
                    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                        one(&mut client, &mut dice, good, solo, bad, counts)
                            .inspect_err(|_| left.store(0, Ordering::Relaxed))?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a client panicked")?)
    })
}

fn one(
    client: &mut Client,
    dice: &mut Dice,
    good: &[Good],
    solo: &[Value],
    bad: &[(&'static str, Vec<u8>, u16)],
    counts: &Counts,
) -> Outcome<()> {
    let i = dice.roll(good.len());
    let counter = match dice.roll(20) {
        0..9 => {
            let reply = client.post(good[i].path, &good[i].whole)?;
            check(i, reply.status, &reply.body, requests::answer(&reply.body), &solo[i])?;
            &counts.whole
        }
        9..15 => {
            let mut events = Vec::new();
            let reply = client.ask("POST", good[i].path, &good[i].streamed, &mut |data| {
                events.push(data.to_owned());
                true
            })?;
            check(i, reply.status, &reply.body, requests::answer_of_stream(&events), &solo[i])?;
            &counts.streamed
        }
        15..17 => {
            // The first event of a chat comes before its turn; later ones while it is under way.
            let mut left = dice.roll(8);
            let body = &good[i].streamed;
            let mut reads = |_: &str| {
                left = left.saturating_sub(1);
                left > 0
            };
            client.ask("POST", good[i].path, body, &mut reads)?;
            client.hang_up()?;
            &counts.cancelled
        }
        _ => {
            let (path, body, status) = &bad[dice.roll(bad.len())];
            let reply = client.post(path, body)?;
            if reply.status != *status || !reply.body.contains("\"error\"") {
                return Err(format!("{path}: expected {status}, found {}: {}", reply.status, reply.body).into());
            }
            &counts.bad
        }
    };
    counter.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

fn check(i: usize, status: u16, body: &str, found: Option<Value>, expected: &Value) -> Outcome<()> {
    if found.as_ref() == Some(expected) {
        return Ok(());
    }
    Err(format!("request {i}: expected {expected}\nfound {status} {found:?}\nin {body}").into())
}

/// Waits until nothing is under way and nobody but this client is connected.
fn settled(server: &Server) -> Outcome<Holding> {
    // A new one: the server closes connections that were idle for long.
    let client = &mut server.client()?;
    let started = Instant::now();
    loop {
        let mut busy = 0.0;
        for name in ["pellucid_kv_blocks_in_use", "pellucid_sequences_running", "pellucid_requests_waiting"] {
            busy += metric(client, name)?;
        }
        busy += metric(client, "pellucid_connections")? - 1.0;
        if busy == 0.0 {
            return Ok(Holding {
                resident_bytes: server.resident_bytes()?,
                num_descriptors: server.num_descriptors()?,
                blocks_in_use: metric(client, "pellucid_kv_blocks_in_use")?,
            });
        }
        if started.elapsed() > SETTLING {
            return Err(format!(
                "after {SETTLING:?} the server is still busy with {busy} blocks, sequences or connections"
            )
            .into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
