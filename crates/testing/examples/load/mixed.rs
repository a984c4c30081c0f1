//! Mixed load: whole replies, streams, cancelled and invalid requests at the same time. Each reply to a valid request
//! must equal the reply to the same request sent alone, each invalid request must get its status, and afterwards the
//! server's memory, descriptors and KV blocks must be back where they were.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::client::Client;
use super::requests::{self, Random, ValidRequest};
use super::server::{Outcome, metric};
use super::{Arguments, Server};

/// Number of different valid requests; each is sent alone once.
const VARIANTS: usize = 150;
/// Maximum growth of memory between two idle moments: the allocator keeps partially used pages and buffers of threads.
const MEMORY_SLACK: u64 = 8 << 20;
/// Maximum time for the server to become idle after the clients disconnected.
const SETTLING: Duration = Duration::from_secs(30);

/// The resources that an idle server holds.
#[derive(Debug)]
struct Resources {
    resident_bytes: u64,
    num_descriptors: usize,
    blocks_in_use: f64,
}

#[derive(Debug, Default)]
struct Counts {
    whole: AtomicUsize,
    streamed: AtomicUsize,
    cancelled: AtomicUsize,
    invalid: AtomicUsize,
}

pub(crate) fn run(arguments: &Arguments) -> Outcome<()> {
    let mut server = Server::start(arguments, &["--max-waiting", "4096"])?;
    let valid: Vec<ValidRequest> = (0..VARIANTS).map(requests::valid).collect();
    let solo = one_by_one(&server, &valid)?;
    // The first round allocates threads, buffers and arenas; later rounds must not add to them.
    let counts = Counts::default();
    let warm_up = (arguments.requests / 10).max(arguments.clients * 4);
    send_all(&server, arguments, warm_up, 0, &valid, &solo, &counts)?;
    let before = settled(&server)?;
    let counts = Counts::default();
    let started = Instant::now();
    send_all(&server, arguments, arguments.requests, 1, &valid, &solo, &counts)?;
    let seconds = started.elapsed().as_secs_f64();
    let after = settled(&server)?;
    server.check_alive()?;
    let Counts { whole, streamed, cancelled, invalid } = counts;
    println!(
        "{} requests in {seconds:.1} s by {} clients: {} whole and {} streamed equal to their solo replies, \
         {} cancelled, {} invalid",
        arguments.requests,
        arguments.clients,
        whole.into_inner(),
        streamed.into_inner(),
        cancelled.into_inner(),
        invalid.into_inner(),
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
        return Err("descriptors or KV blocks were not released".into());
    }
    if after.resident_bytes > before.resident_bytes + MEMORY_SLACK {
        return Err(format!("memory grew by more than {MEMORY_SLACK} bytes").into());
    }
    Ok(())
}

/// Returns the reply to each request when it is sent alone.
fn one_by_one(server: &Server, valid: &[ValidRequest]) -> Outcome<Vec<Value>> {
    let mut client = server.client()?;
    let mut solo = Vec::with_capacity(valid.len());
    for (i, valid) in valid.iter().enumerate() {
        let reply = client.post(valid.path, &valid.whole)?;
        let choices = requests::choices(&reply.body).filter(|_| reply.status == 200);
        solo.push(choices.ok_or_else(|| format!("request {i} alone: {} {}", reply.status, reply.body))?);
    }
    Ok(solo)
}

/// Sends `count` requests, divided among the clients.
fn send_all(
    server: &Server,
    arguments: &Arguments,
    count: usize,
    round: u64,
    valid: &[ValidRequest],
    solo: &[Value],
    counts: &Counts,
) -> Outcome<()> {
    let left = AtomicUsize::new(count);
    let invalid = requests::invalid();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..arguments.clients)
            .map(|worker| {
                let (left, invalid) = (&left, &invalid);
                scope.spawn(move || -> Outcome<()> {
                    let mut client = server.client()?;
                    let mut random = Random::new((round << 32) | (worker as u64 + 1));
                    let take = |left: usize| left.checked_sub(1);
                    while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok() {
                        send_one(&mut client, &mut random, valid, solo, invalid, counts)
                            .inspect_err(|_| left.store(0, Ordering::Relaxed))?;
                    }
                    Ok(())
                })
            })
            .collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| "a client panicked")?)
    })
}

fn send_one(
    client: &mut Client,
    random: &mut Random,
    valid: &[ValidRequest],
    solo: &[Value],
    invalid: &[(&'static str, Vec<u8>, u16)],
    counts: &Counts,
) -> Outcome<()> {
    let i = random.below(valid.len());
    let counter = match random.below(20) {
        0..9 => {
            let reply = client.post(valid[i].path, &valid[i].whole)?;
            check(i, reply.status, &reply.body, requests::choices(&reply.body), &solo[i])?;
            &counts.whole
        }
        9..15 => {
            let mut events = Vec::new();
            let reply = client.ask("POST", valid[i].path, &valid[i].streamed, &mut |data| {
                events.push(data.to_owned());
                true
            })?;
            check(i, reply.status, &reply.body, requests::choices_of_stream(&events), &solo[i])?;
            &counts.streamed
        }
        15..17 => {
            // The first event of a chat arrives before the request is scheduled, later events while it runs.
            let mut left = random.below(8);
            let body = &valid[i].streamed;
            let mut reads = |_: &str| {
                left = left.saturating_sub(1);
                left > 0
            };
            client.ask("POST", valid[i].path, body, &mut reads)?;
            client.hang_up()?;
            &counts.cancelled
        }
        _ => {
            let (path, body, status) = &invalid[random.below(invalid.len())];
            let reply = client.post(path, body)?;
            if reply.status != *status || !reply.body.contains("\"error\"") {
                return Err(format!("{path}: expected {status}, found {}: {}", reply.status, reply.body).into());
            }
            &counts.invalid
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

/// Waits until no request runs and no other client is connected.
fn settled(server: &Server) -> Outcome<Resources> {
    // A new connection: the server closes those that were idle for long.
    let client = &mut server.client()?;
    let started = Instant::now();
    loop {
        let mut busy = 0.0;
        for name in ["pellucid_kv_blocks_in_use", "pellucid_sequences_running", "pellucid_requests_waiting"] {
            busy += metric(client, name)?;
        }
        busy += metric(client, "pellucid_connections")? - 1.0;
        if busy == 0.0 {
            return Ok(Resources {
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
